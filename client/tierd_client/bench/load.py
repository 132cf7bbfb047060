"""A rank of another engine that backs up at a steady rate, while something else is measured.

Started by `tierd_client.bench.scheduler`. Prints `ready` once it is at work, and when its standard
input ends, the pages that the tier has kept a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from tierd_client import DeviceBuffer, DevicePool, PoolPages, TierClient

STEP_S = 0.005
NODE_PAGES = 16
POOL_PAGES = 1 << 14
ROW = 2048
"""Bytes: a page's K, and its V, in the one layer that there is."""
STOP_TIMEOUT_S = 30.0


class Load:
    """Another engine's process, at work from `__enter__` to `stop`."""

    def __init__(self, socket: str, device: str, pages_per_s: int) -> None:
        command = [sys.executable, "-m", "tierd_client.bench.load", "--socket", socket]
        command += ["--device", device, "--pages-per-s", str(pages_per_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_ready(self) -> None:
        """Raises: RuntimeError: it cannot work."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            raise RuntimeError("the process that is to put the tier under load has failed")

    def stop(self) -> float:
        """End it. Returns: the pages that the tier kept a second."""
        output, _ = self._process.communicate(timeout=STOP_TIMEOUT_S)
        return float(output)

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def load(socket: str, device: str, pages_per_s: int) -> Iterator[Load]:
    """Puts the tier under load while it is open."""
    running = Load(socket, device, pages_per_s)
    try:
        running.wait_ready()
        yield running
    finally:
        running.kill()


def work(client: TierClient, device: str, pages_per_s: int) -> float:
    """Back up pages that nobody has seen before, at this rate at most, until standard input ends.
    Returns: the pages kept a second."""
    slots = torch.arange(POOL_PAGES, device=device)
    nodes = max(1, round(pages_per_s * STEP_S / NODE_PAGES))
    at = kept = 0
    start = due = time.monotonic()
    pending = 0
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        due = max(due + STEP_S, time.monotonic() - STEP_S)
        # What it has not been rid of yet is as much as its pool holds at most.
        for _ in range(min(nodes, POOL_PAGES // NODE_PAGES - pending)):
            keys, at = os.urandom(32 * NODE_PAGES), (at + NODE_PAGES) % POOL_PAGES
            client.backup([PoolPages("kv", keys, slots[at : at + NODE_PAGES])], parent=b"")
            pending += 1
        client.flush()
        acks = client.acks()
        pending -= len(acks)
        kept += NODE_PAGES * sum(ack.kept for ack in acks)
    return kept / (time.monotonic() - start)


def main() -> None:
    """The process of the other engine."""
    parser = argparse.ArgumentParser(prog="python -m tierd_client.bench.load", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--pages-per-s", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    k, v = (torch.zeros(POOL_PAGES, ROW, dtype=torch.uint8, device=arguments.device) for _ in "kv")
    pool = DevicePool("kv", 1, [DeviceBuffer(k, layer=0), DeviceBuffer(v, layer=0)])
    instance = f"load-{os.getpid()}"
    client = TierClient(arguments.socket, [pool], namespace={"load": instance}, instance=instance)
    try:
        if not client.connect(timeout_s=STOP_TIMEOUT_S):
            sys.exit("no tierd daemon answers")
        print("ready", flush=True)
        print(work(client, arguments.device, arguments.pages_per_s), flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main()
