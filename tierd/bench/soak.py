"""The table of `tierd bench soak`: what grows in a process that works for long, and how fast."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

Floats = npt.NDArray[np.float64]
WARM_UP = 0.3
"""The part of a run that is left out: memory is claimed and caches fill until then."""
LATELY = 2 / 3
"""Where the last part of a run begins: what has come to its end by then has no slope there."""
UNITS = dict.fromkeys(("resident", "anonymous", "shared", "GPU memory", "host memory"), "MiB")
"""Of what is not a plain count."""


@dataclass(frozen=True)
class Sample:
    """One look at all processes.

    `values`: by (whose, what), bytes or counts. `backups`, `lookups`: how many there have been.
    """

    at_s: float
    backups: int
    lookups: int
    values: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Trend:
    """How one value has moved after the warm-up, in MiB or as a count."""

    whose: str
    what: str
    first: float
    last: float
    largest: float
    per_million: float
    """Slope of the least-squares line, for a million backups."""
    per_million_lately: float
    """The same over the last third of the run alone."""
    per_hour: float


def look(pid: int) -> dict[str, float]:
    """What a process has right now. Bytes: `resident`, and of that `anonymous` (heap and stacks)
    and `shared` (memfds and /dev/shm; the rest is code). Counts: `descriptors`, `threads`.

    Raises: OSError: it is gone, or another user's.
    """
    process = Path("/proc") / str(pid)
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )

    def kib(what: str) -> int:
        return int(status[what].split()[0])

    return {
        "resident": kib("VmRSS") * 1024,
        "anonymous": kib("RssAnon") * 1024,
        "shared": kib("RssShmem") * 1024,
        "descriptors": len(os.listdir(process / "fd")),
        "threads": int(status["Threads"]),
    }


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """One for each value that all samples after the warm-up have, in the order of the first.

    Raises: ValueError: fewer than three samples are left after the warm-up, or two in the last
        third.
    """
    warm, late = (list(_from(samples, part)) for part in (WARM_UP, LATELY))
    if len(warm) < 3 or len(late) < 2:
        raise ValueError(f"{len(samples)} samples are too few for a slope; run it for longer")
    millions = np.array([sample.backups for sample in warm]) / 1e6
    hours = np.array([sample.at_s for sample in warm]) / 3600
    found = []
    for key in warm[0].values:
        if not all(key in sample.values for sample in warm):
            continue
        whose, what = key
        scale = 2**20 if UNITS.get(what) == "MiB" else 1
        values = np.array([sample.values[key] for sample in warm]) / scale
        found.append(
            Trend(
                whose,
                what,
                float(values[0]),
                float(values[-1]),
                float(values.max()),
                _slope(millions, values),
                _slope(millions[-len(late) :], values[-len(late) :]),
                _slope(hours, values),
            )
        )
    return found


def as_table(found: Sequence[Trend]) -> Table:
    """A table that is Markdown as it stands."""
    table = Table(box=box.MARKDOWN)
    table.add_column("process", no_wrap=True)
    table.add_column("what", no_wrap=True)
    slopes = ("a million backups", "in the last third", "an hour")
    for title in ("after warm-up", "at the end", "largest", *slopes):
        table.add_column(title, justify="right", no_wrap=True)
    last = ""
    for trend in found:
        unit = UNITS.get(trend.what, "")
        digits = 1 if unit else 0
        table.add_row(
            trend.whose if trend.whose != last else "",
            f"{trend.what}, {unit}" if unit else trend.what,
            f"{trend.first:,.{digits}f}",
            f"{trend.last:,.{digits}f}",
            f"{trend.largest:,.{digits}f}",
            f"{trend.per_million:+,.2f}",
            f"{trend.per_million_lately:+,.2f}",
            f"{trend.per_hour:+,.2f}",
        )
        last = trend.whose
    return table


def _from(samples: Sequence[Sample], part: float) -> Iterator[Sample]:
    """Those after this part of the run."""
    if samples:
        start = samples[0].at_s + part * (samples[-1].at_s - samples[0].at_s)
        yield from (sample for sample in samples if sample.at_s >= start)


def _slope(x: Floats, y: Floats) -> float:
    spread = x - x.mean()
    square = float(spread @ spread)
    return float(spread @ (y - y.mean())) / square if square else 0.0
