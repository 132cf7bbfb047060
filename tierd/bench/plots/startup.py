"""The picture of `tierd bench startup`: memory pinned over time, and what a kill leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from tierd.bench.plots.picture import Band, Bar, Bars, Group, Line, Lines, Mark, Picture
from tierd.bench.plots.results import NothingMeasuredError
from tierd.memory.limits import format_size

GONE, FREE = "no process is left", "the memory is free"


class Start(msgspec.Struct):
    """One daemon's life; as `tierd.bench.startup.Start`, as far as it is drawn."""

    memory_bytes: Annotated[int, msgspec.Meta(ge=1)]
    devices: int
    hugepages: str
    threads: int
    ready_s: float
    pinned_s: dict[int, float]
    all_pinned_s: float
    rate_gibps: float | None
    gone_s: float
    free_s: float | None


def picture(starts: Sequence[Start]) -> Picture:
    """Raises: NothingMeasuredError: it was cut off before its first row."""
    if not starts:
        raise NothingMeasuredError("startup")
    threads = sorted({start.threads for start in starts})
    kinds = list(dict.fromkeys(start.hugepages for start in starts))
    lines, marks, groups = [], [], []
    for start in sorted(starts, key=lambda start: (kinds.index(start.hugepages), start.threads)):
        label = f"{start.threads} thread" + "s" * (start.threads > 1)
        if len(kinds) > 1:
            label += f", hugepages {start.hugepages}"
        reached = sorted((at, float(gib)) for gib, at in start.pinned_s.items())
        style = threads.index(start.threads)
        rate = "" if start.rate_gibps is None else f": {start.rate_gibps:.1f} GiB/s"
        end = (start.all_pinned_s, start.memory_bytes / 2**30)
        lines.append(
            Line(
                label + rate,
                style,
                [*(point for point in reached if point < end), end],
                dash=kinds.index(start.hugepages),
            )
        )
        marks.append(Mark("ready to serve", style, (start.ready_s, 0.0)))
        bars = [Bar(GONE, len(threads), start.gone_s)]
        if start.free_s is not None:
            bars.append(Bar(FREE, len(threads) + 1, start.free_s))
        groups.append(Group(label, bars))
    sizes = " and ".join(dict.fromkeys(format_size(start.memory_bytes) for start in starts))
    devices = max(start.devices for start in starts)
    return Picture(
        "startup",
        f"tierd bench startup: {sizes} of host memory, {devices} device" + "s" * (devices > 1),
        [
            Band(
                "",
                [
                    Lines(
                        "Memory pinned",
                        "seconds from the start on",
                        "GiB, all devices",
                        lines,
                        marks,
                    ),
                    Bars("After a kill (SIGKILL)", "seconds from the kill on", groups),
                ],
            )
        ],
    )
