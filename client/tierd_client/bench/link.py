"""What the link to a device gives at best: one contiguous copy between it and pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES = 512 << 20
ROUNDS = 4


@dataclass(frozen=True)
class LinkRates:
    """GB/s (1e9 bytes a second): to the host, to the device, both directions at once."""

    to_host: float
    to_device: float
    both: float


def measure(device: torch.device, nbytes: int = COPY_BYTES) -> LinkRates:
    """The best of some rounds of each. On a CPU, copies in memory stand in."""
    if device.type != "cuda":
        nbytes //= 8
        ours, theirs = (torch.empty(nbytes, dtype=torch.uint8) for _ in range(2))
        theirs.copy_(ours)
        rate = max(_timed(lambda: theirs.copy_(ours), nbytes) for _ in range(ROUNDS))
        return LinkRates(rate, rate, rate)
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(directions: tuple[int, ...]) -> None:
        for direction in directions:
            with torch.cuda.stream(streams[direction]):
                ours, theirs = here[direction], there[direction]
                (theirs if direction else ours).copy_(ours if direction else theirs, True)
        for direction in directions:
            streams[direction].synchronize()

    return LinkRates(
        *(
            max(_timed(lambda d=d: copy(d), nbytes * len(d)) for _ in range(ROUNDS))  # type: ignore[misc]
            for d in ((0,), (1,), (0, 1))
        )
    )


def _timed(copy: Callable[[], object], nbytes: int) -> float:
    start = time.perf_counter()
    copy()
    return nbytes / (time.perf_counter() - start) / 1e9
