"""An engine that backs up, looks up and restores for minutes on end, as fast as it is served.

Started by `tierd bench soak`. Prints JSON lines: progress, then `result`.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass

import torch

from tierd.wire.limits import KEY_BYTES
from tierd_client import DeviceBuffer, DevicePool, PoolPages, TierClient

PAGE_TOKENS, LAYERS, ROW_BYTES = 16, 2, 64
PLACE_PAGES = 4
"""A backup's, and a restore's."""
PLACE_TOKENS = PLACE_PAGES * PAGE_TOKENS
PLACES = 4096
"""On the device: the first half is backed up, the second is restored to."""
BYTES = 251
"""Values that pages are filled with."""
STEP_BACKUPS, STEP_LOOKUPS = 32, 32
MAX_PENDING = 1024
"""Backups that have no ack yet, whose places are not written again."""
RESTORE_EVERY = 8
"""Steps between two restores."""
REMEMBERED = 8192
"""Backups made most recently, of which every other lookup asks for one."""
REPORT_S = 2.0


class WrongPageError(Exception):
    """A restored page is not what was backed up."""


@dataclass
class Counts:
    """What the engine did."""

    backups: int = 0
    kept: int = 0
    lookups: int = 0
    hits: int = 0
    restores: int = 0
    landed: int = 0
    connections: int = 0
    """More than one: it has lost the daemon on the way."""


class Soak:
    """One rank without an engine around it.

    Args:
        device: Where the pages lie.
    """

    def __init__(self, client_socket: str, device: torch.device) -> None:
        tokens = PLACES * PLACE_TOKENS
        self._layers = [
            torch.zeros(2, tokens, ROW_BYTES, dtype=torch.uint8, device=device)
            for _ in range(LAYERS)
        ]
        buffers = [
            DeviceBuffer(kv[half], n) for half in (0, 1) for n, kv in enumerate(self._layers)
        ]
        self.client = TierClient(
            client_socket,
            [DevicePool("kv", PAGE_TOKENS, buffers)],
            namespace={"model": "soak"},
            instance=f"soak {time.monotonic_ns()}",
            lookup_timeout_s=5.0,
        )
        self.counts = Counts()
        self._device = device
        self._numbers = torch.arange(tokens, device=device)
        # What a row of each page is filled with: no two pages of a place alike.
        bytes_of = torch.arange(BYTES)[:, None] + torch.arange(PLACE_PAGES) * 83
        self._bytes = (bytes_of % BYTES).to(torch.uint8)[:, :, None, None].to(device)
        self._pending: deque[int] = deque()
        self._recent: deque[int] = deque(maxlen=REMEMBERED)
        self._step = 0
        self._was_connected = False

    def step(self) -> None:
        """One iteration: backups, a flush, acks, as many lookups, and now and then a restore.

        While too many backups wait for their acks it only takes acks.
        """
        if self.client.connected is not self._was_connected:
            self._was_connected = self.client.connected
            self.counts.connections += self._was_connected
        more = len(self._pending) + STEP_BACKUPS <= MAX_PENDING
        if more:
            self._step += 1
            self._offer()
        self.client.flush()
        self._take_acks()
        if more:
            for n in range(STEP_LOOKUPS):
                self._look_up(n)

    def settle(self) -> None:
        """Wait for the acks that are still to come."""
        while self._pending:
            self.client.flush()
            self._take_acks()

    def _take_acks(self) -> None:
        for ack in self.client.acks():
            number = self._pending.popleft()
            if ack.kept:
                self.counts.kept += 1
                self._recent.append(number)

    def _offer(self) -> None:
        """What nobody has seen, in places that no backup is reading."""
        first = self.counts.backups
        self._fill(first % (PLACES // 2), first, STEP_BACKUPS)
        for number in range(first, first + STEP_BACKUPS):
            place = number % (PLACES // 2)
            pages = PoolPages("kv", _keys(number), self._slots(place))
            self.client.backup([pages], parent=b"")
            self._pending.append(number)
        self.counts.backups += STEP_BACKUPS

    def _look_up(self, n: int) -> None:
        self.counts.lookups += 1
        known = n % 2 == 0 and len(self._recent) > 0
        number = self._recent[self.counts.lookups % len(self._recent)] if known else -1
        keys = _keys(number if known else -self.counts.lookups)
        rid = f"request {self.counts.lookups}"
        lengths = self.client.lookup(rid, keys)
        if not lengths:
            return
        self.counts.hits += 1
        if n or self._step % RESTORE_EVERY:
            self.client.cancel(rid)
            return
        place = PLACES // 2 + self.counts.restores % (PLACES // 2)
        self.counts.restores += 1
        self._fill(place, -1, 1)
        # Eviction may have left its first pages only.
        count = lengths[-1]
        slots = self._slots(place)[: count * PAGE_TOKENS]
        restore = self.client.restore({rid: [PoolPages("kv", keys[: count * KEY_BYTES], slots)]})
        for layer in range(LAYERS):
            restore.wait_layer(layer)
        if restore.finish():
            self.counts.landed += 1
            self._check(place, number, count)

    def _rows(self, place: int, count: int) -> list[torch.Tensor]:
        """Of so many places. Each of shape (count, PLACE_PAGES, PAGE_TOKENS, ROW_BYTES)."""
        tokens = slice(place * PLACE_TOKENS, (place + count) * PLACE_TOKENS)
        shape = (count, PLACE_PAGES, PAGE_TOKENS, ROW_BYTES)
        return [kv[half, tokens].view(shape) for kv in self._layers for half in (0, 1)]

    def _fill(self, place: int, number: int, count: int) -> None:
        """So many places, for the backups from this one on."""
        for n, rows in enumerate(self._rows(place, count)):
            rows.copy_(self._wanted(number, n, count))

    def _check(self, place: int, number: int, pages: int) -> None:
        for n, rows in enumerate(self._rows(place, 1)):
            if not bool((rows == self._wanted(number, n, 1))[:, :pages].all()):
                raise WrongPageError(f"backup {number}, row {n}")

    def _wanted(self, number: int, row: int, count: int) -> torch.Tensor:
        """Shape (count, PLACE_PAGES, 1, 1)."""
        return self._bytes[((self._numbers[:count] + number) * 31 + row * 7) % BYTES]

    def _slots(self, place: int) -> torch.Tensor:
        return self._numbers[place * PLACE_TOKENS : (place + 1) * PLACE_TOKENS]


def _keys(number: int) -> bytes:
    return b"".join(struct.pack("<4q", number, page, 0, 0) for page in range(PLACE_PAGES))


def main() -> None:
    """The process of `tierd bench soak`."""
    parser = argparse.ArgumentParser(prog="python -m tierd_client.bench.soak", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", required=True, choices=("cpu", "cuda"))
    parser.add_argument("--minutes", required=True, type=float)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    soak = Soak(options.socket, torch.device(options.device))
    if not soak.client.connect(60.0):
        raise SystemExit(f"no daemon answers on {options.socket}")
    started = time.monotonic()
    end = started + options.minutes * 60
    report = started
    while (now := time.monotonic()) < end:
        soak.step()
        if now >= report:
            report = now + REPORT_S
            gpu = _gpu_bytes() if options.device == "cuda" else 0
            done = (now - started) / (end - started)
            _say(done=done, pid=os.getpid(), gpu_bytes=gpu, **asdict(soak.counts))
    soak.settle()
    soak.client.close()
    _say(result=asdict(soak.counts))
    sys.stdin.read()


def _gpu_bytes() -> int:
    """What all processes together use of the GPU."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
