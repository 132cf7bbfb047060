"""The picture of `tierd bench control`: pages taken in, what lookups wait, and what that costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tierd.bench import targets
from tierd.bench.control import LOOKUP_PAGES, Load, Result
from tierd.bench.plots.picture import Band, Bar, Bars, Group, Picture
from tierd.bench.plots.results import NothingMeasuredError


def picture(results: Sequence[Result]) -> Picture:
    """Raises: NothingMeasuredError: it was cut off before its first row."""
    if not results:
        raise NothingMeasuredError("control")
    panels = [
        Bars("Pages taken in", "thousands a second and rank", _groups(results, _pages)),
        Bars(f"A lookup of {LOOKUP_PAGES} pages", "ms, there and back", _groups(results, _lookups)),
        Bars("CPU", "cores", _groups(results, _cores)),
    ]
    limits = "promised on an H200's host (pages: at least, p99: at most)"
    return Picture("control", "tierd bench control", [Band("", panels, limits, "y")])


def _groups(results: Sequence[Result], bars: Callable[[Result], list[Bar]]) -> list[Group]:
    groups = []
    for size, alike in itertools.groupby(results, lambda result: result.load.world_size):
        heading = f"{size} rank" + "s" * (size > 1)
        for result in alike:
            groups.append(Group(_words(result.load), bars(result), heading))
            heading = ""
    return groups


def _words(load: Load) -> str:
    if load.rate == 0:
        return load.name
    rate = "all it takes" if load.rate is None else f"{load.rate:,}/s"
    return f"{load.name} of {load.item_pages:,}, {rate}"


def _is_promised(load: Load) -> bool:
    return load.rate == targets.PAGES_S


def _pages(result: Result) -> list[Bar]:
    limit = targets.PAGES_S / 1e3 if _is_promised(result.load) else None
    return [Bar("kept", 0, result.pages_s / 1e3, limit)]


def _lookups(result: Result) -> list[Bar]:
    if not result.lookups:
        return []
    limit = targets.LOOKUP_US / 1e3 if _is_promised(result.load) else None
    return [
        Bar("lookup, p50", 1, result.lookup_p50_us / 1e3),
        Bar("lookup, p99", 2, result.lookup_p99_us / 1e3, limit),
    ]


def _cores(result: Result) -> list[Bar]:
    return [Bar("control", 3, result.control_cores), Bar("copiers", 4, result.copier_cores)]
