"""How much longer a decode-like loop's step gets while a real daemon backs up and restores.

Started by `tierd bench interference`. The loop, the KV and tierd's client are one process, as in an
engine; backups are offered and restores started between steps. Every window with copies has one
without before and after it. Prints JSON lines: progress, then `result`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from tierd.bench.interference_plan import FULL, RUN_UP_S, WARM_UP_S, Traffic, Windows, traffics
from tierd_client.bench.decode import DecodeLoop
from tierd_client.bench.machine import machine
from tierd_client.bench.models import QWEN3_8B, DeviceMemory
from tierd_client.bench.rank import PATIENCE_S, BenchFailedError, BenchRank, Chain
from tierd_client.restore import Restore

TOKENS = 448_000
STREAM_BYTES = 96 << 20
"""What one prompt of the traffic holds: small enough for 1.5 GB/s to be a flow."""
RESTORABLE = 8
"""Prompts that the tier holds for the restores, over and over."""
FLAT_OUT_BACKUPS = 16
FLAT_OUT_RESTORES = 6
"""Prompts under way at once where there is no rate to keep."""


@dataclass(frozen=True)
class Row:
    """One kind of traffic: how much longer the loop's mean step got, the median of its windows,
    and what the copiers moved meanwhile. `quiet_ms`: the mean steps of the windows without traffic,
    of which `step_ms` is the median. `cores` of the daemon: control, and the copier."""

    placement: str
    path: str
    page_tokens: int
    run: int
    backups: bool
    restores: bool
    wanted_gbps: float | None
    backup_gbps: float
    restore_gbps: float
    step_ms: float
    quiet_ms: list[float]
    slowdown: float
    slowdowns: list[float]
    control_cores: float
    copier_cores: float


class Flow:
    """Keeps traffic going from the loop's thread. Never waits for the GPU."""

    def __init__(self, rank: BenchRank, traffic: Traffic, stored: Sequence[Chain]) -> None:
        self._rank = rank
        self._traffic = traffic
        self._stored = stored
        pages = len(stored[0].keys) // 32
        self._fresh = [rank.chains(1, pages, traffic.pages.run)[0] for _ in range(4)]
        self._prompt_bytes = pages * sum(rank.page_bytes.values())
        self._offered = self._acked = self._started = 0
        self._restores: deque[Restore] = deque()
        self._since = time.perf_counter()

    def step(self) -> None:
        """What an engine does between two steps."""
        client = self._rank.client
        if self._traffic.backups:
            while self._due(self._offered, self._offered - self._acked, FLAT_OUT_BACKUPS):
                chain = self._rank.renamed(self._fresh[self._offered % len(self._fresh)])
                client.backup(chain.parts, parent=b"")
                self._offered += 1
            client.flush()
            self._acked += len(client.acks())
        if self._traffic.restores:
            while self._restores and self._restores[0].settled:
                self._land()
            while self._due(self._started, len(self._restores), FLAT_OUT_RESTORES):
                chain = self._stored[self._started % len(self._stored)]
                self._rank.lookup([chain])
                self._restores.append(self._rank.restore([chain]))
                self._started += 1

    def drain(self) -> None:
        """Wait for all that is under way.

        Raises: BenchFailedError: it does not come to an end.
        """
        deadline = time.monotonic() + PATIENCE_S
        while self._restores:
            self._land()
        while self._acked < self._offered:
            self._rank.client.flush()
            self._acked += len(self._rank.client.acks())
            if time.monotonic() > deadline:
                raise BenchFailedError("the tier does not answer a backup")

    def _land(self) -> None:
        if not self._restores.popleft().finish():
            raise BenchFailedError("a restore has failed")

    def _due(self, begun: int, under_way: int, most: int) -> bool:
        if under_way >= most:
            return False
        if self._traffic.gbps is None:
            return True
        elapsed = time.perf_counter() - self._since
        return begun * self._prompt_bytes < elapsed * self._traffic.gbps * 1e9


def steps(
    loop: DecodeLoop, seconds: float, between: Callable[[], None], before_s: float = RUN_UP_S
) -> float:
    """Run the loop for about so long, and `before_s` before. Returns its mean step in seconds, on
    the GPU's clock."""
    begun = time.perf_counter()
    while time.perf_counter() - begun < before_s:
        between()
        loop.step()
    first = loop.mark()
    begun = time.perf_counter()
    ran = 0
    while time.perf_counter() - begun < seconds:
        between()
        loop.step()
        ran += 1
    last = loop.mark()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / ran


def measure(loop: DecodeLoop, rank: BenchRank, traffic: Traffic, windows: Windows) -> Row:
    """One row: windows of the loop with this traffic beside it, each between two without."""
    seconds = windows.seconds
    pages = prompt_pages(rank, traffic.pages.run)
    rank.clear()
    stored = rank.chains(RESTORABLE, pages, traffic.pages.run)
    rank.offer(stored)
    rank.await_acks(len(stored))
    daemon = psutil.Process(rank.status()["pid"])
    copier = psutil.Process(rank.status()["copiers"][0]["pid"])
    quiet = [steps(loop, seconds, lambda: None, WARM_UP_S + RUN_UP_S)]
    loaded, cores, moved, lasted = [], [0.0, 0.0], [0, 0], 0.0
    for _ in range(windows.count):
        before = rank.totals()
        cpu = [sum(process.cpu_times()[:2]) for process in (daemon, copier)]
        start = time.perf_counter()
        flow = Flow(rank, traffic, stored)
        loaded.append(steps(loop, seconds, flow.step))
        flow.drain()
        took = time.perf_counter() - start
        lasted += took
        now = rank.totals().since(before)
        moved = [moved[0] + now.backup_bytes, moved[1] + now.restore_bytes]
        for i, process in enumerate((daemon, copier)):
            cores[i] += sum(process.cpu_times()[:2]) - cpu[i]
        quiet.append(steps(loop, seconds, lambda: None))
    slowdowns = [
        busy / ((before + after) / 2) - 1
        for busy, before, after in zip(loaded, quiet, quiet[1:], strict=False)
    ]
    return Row(
        placement=traffic.pages.placement,
        path=", ".join(dict.fromkeys(p.split(":")[0] for p in rank.paths().values())),
        page_tokens=traffic.pages.page_tokens,
        run=traffic.pages.run,
        backups=traffic.backups,
        restores=traffic.restores,
        wanted_gbps=traffic.gbps,
        backup_gbps=moved[0] / lasted / 1e9,
        restore_gbps=moved[1] / lasted / 1e9,
        step_ms=median(quiet) * 1e3,
        quiet_ms=[step * 1e3 for step in quiet],
        slowdown=median(slowdowns),
        slowdowns=slowdowns,
        control_cores=cores[0] / lasted,
        copier_cores=cores[1] / lasted,
    )


def run(
    socket: str,
    device: torch.device,
    quick: bool,
    windows: Windows,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Measure everything. Says `done` and `text` as it goes, `machine`, and each `row` at once."""
    say({"machine": machine(device)})
    say({"done": 0.0, "text": "capturing the loop"})
    loop = DecodeLoop(device)
    todo = traffics(quick)
    total = sum(map(len, todo.values()))
    done = count()
    for placement in dict.fromkeys(kind.placement for kind in todo):
        memory = DeviceMemory(QWEN3_8B, placement, TOKENS, 0, device)
        for kind in (kind for kind in todo if kind.placement == placement):
            with BenchRank(socket, memory, kind.page_tokens, QWEN3_8B.name, loop.stream) as rank:
                rank.await_pinned()
                rank.settle(2 * RESTORABLE, prompt_pages(rank, kind.run))
                for traffic in todo[kind]:
                    say({"done": next(done) / total, "text": str(traffic)})
                    say({"rows": asdict(measure(loop, rank, traffic, windows))})
        del memory
        torch.cuda.empty_cache()


def prompt_pages(rank: BenchRank, run: int) -> int:
    """Pages of one prompt of the traffic, in whole runs."""
    return max(1, STREAM_BYTES // sum(rank.page_bytes.values()) // run) * run


def main() -> None:
    """The process of `tierd bench interference`."""
    parser = argparse.ArgumentParser(
        prog="python -m tierd_client.bench.interference", description=__doc__
    )
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", required=True, help="in torch's words")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=FULL.seconds, help="of a window")
    parser.add_argument("--windows", type=int, default=FULL.count)
    arguments = parser.parse_args()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    run(
        arguments.socket,
        torch.device(arguments.device),
        arguments.quick,
        Windows(arguments.seconds, arguments.windows),
        say,
    )
    say({"result": {}})


if __name__ == "__main__":
    main()
