"""The picture of `tierd bench interference`: how much slower the loop is, over what is copied."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from tierd.bench import targets
from tierd.bench.plots.picture import Band, Limit, Line, Lines, Picture
from tierd.bench.plots.results import INCOMPLETE, Machine, NothingMeasuredError, page_words

Rate = Annotated[float, msgspec.Meta(ge=0)]

PLACEMENTS = {"arena": "one allocation", "stock": "one a layer"}
WAYS = {
    (True, False): ("backups (D2H)", "GB/s to the host"),
    (False, True): ("restores (H2D)", "GB/s to the device"),
    (True, True): ("both at once", "GB/s each way, on average"),
}


class Row(msgspec.Struct):
    """One kind of traffic; as `tierd_client.bench.interference.Row`, as far as it is drawn."""

    placement: Literal["arena", "stock"]
    page_tokens: int
    run: int
    backups: bool
    restores: bool
    backup_gbps: Rate
    restore_gbps: Rate
    step_ms: float
    slowdown: float
    slowdowns: Annotated[list[float], msgspec.Meta(min_length=1)]

    @property
    def gbps(self) -> float:
        """What flowed, of the directions that it was to flow in."""
        return (self.backup_gbps + self.restore_gbps) / (self.backups + self.restores)


class Result(msgspec.Struct):
    """What the command prints."""

    rows: list[Row]
    machine: Machine | None = None
    complete: bool = False


def picture(result: Result) -> Picture:
    """Raises: NothingMeasuredError: it was cut off before its first row."""
    rows = [row for row in result.rows if (row.backups, row.restores) in WAYS]
    if result.machine is None or not rows:
        raise NothingMeasuredError("interference")
    kinds = list(dict.fromkeys((row.placement, row.page_tokens, row.run) for row in rows))
    panels = []
    for (backups, restores), (title, x) in WAYS.items():
        mine = [row for row in rows if (row.backups, row.restores) == (backups, restores)]
        lines = []
        for style, kind in enumerate(kinds):
            found = [row for row in mine if (row.placement, row.page_tokens, row.run) == kind]
            found.sort(key=lambda row: row.gbps)
            if found:
                lines.append(
                    Line(
                        f"{page_words(*kind[1:])}, {PLACEMENTS[kind[0]]}",
                        style,
                        [(row.gbps, row.slowdown * 100) for row in found],
                        [(min(row.slowdowns) * 100, max(row.slowdowns) * 100) for row in found],
                    )
                )
        if lines:
            y = "loop slower by, %"
            panels.append(Lines(title, x, y, lines, limits=[_limit()]))
    quiet = sorted(row.step_ms for row in rows)
    return Picture(
        "interference",
        f"tierd bench interference: {result.machine.words()}",
        [
            Band(
                "How much slower a decode-like loop is beside copies: median, least and most of "
                f"the windows (a step alone takes {quiet[0]:.3f} to {quiet[-1]:.3f} ms)",
                panels,
                "promised on an H200: at most",
                "xy",
            )
        ],
        [] if result.complete else [INCOMPLETE],
    )


def _limit() -> Limit:
    """Up to each rate, what is promised at it: less traffic costs no more."""
    points, start = [], 0.0
    for gbps, slowdown in targets.SLOWDOWNS:
        points += [(start, slowdown * 100), (gbps, slowdown * 100)]
        start = gbps
    return Limit(points)
