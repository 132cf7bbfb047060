"""What `tierd bench interference` measures, in which windows, and how long that takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

WARM_UP_S = 0.2
"""A GPU that was idle needs it to get to its clock."""
RUN_UP_S = 0.05
"""Between a window and the next the GPU hardly stands still; traffic gets going meanwhile."""
ROW_S = 0.5
"""Before a row's first window: pages that its restores bring back, and what is under way after."""
RANK_S = 4.0
"""For each kind of page: a rank that connects, and memory that is pinned for it."""
MEMORY_S = 2.0
"""For each placement: pools of 60 GiB."""
START_S = 12.0
"""Interpreters, torch, a daemon, the loop's weights and its graph."""


@dataclass(frozen=True)
class Pages:
    """Which pages flow. `run`: pages that lie side by side on the device."""

    placement: Literal["arena", "stock"]
    page_tokens: int
    run: int


@dataclass(frozen=True)
class Traffic:
    """What flows beside the loop. `gbps`: a direction; None: all that goes."""

    pages: Pages
    backups: bool
    restores: bool
    gbps: float | None

    def __str__(self) -> str:
        ways = [name for name in ("backups", "restores") if getattr(self, name)]
        rate = "flat out" if self.gbps is None else f"{self.gbps:g} GB/s"
        pages = f"{self.pages.placement}, pages of {self.pages.page_tokens}"
        return f"{pages}, {' and '.join(ways)}, {rate}"


@dataclass(frozen=True)
class Windows:
    """How a row is measured: `count` windows with traffic, each between two without, all of
    `seconds`."""

    seconds: float
    count: int

    @property
    def row_s(self) -> float:
        """What a row takes."""
        return ROW_S + WARM_UP_S + (2 * self.count + 1) * (RUN_UP_S + self.seconds)


FULL, QUICK = Windows(0.7, 3), Windows(0.3, 2)


def traffics(quick: bool) -> dict[Pages, list[Traffic]]:
    """By kind of page, what is to flow of it."""
    whole = Pages("arena", 64, 1)
    kinds = [whole, Pages("arena", 1, 64), Pages("arena", 1, 1)]
    kinds += [Pages("stock", 64, 1), Pages("stock", 1, 1)]
    rates: list[float | None] = [1.5, 10.0, None]
    if quick:
        kinds, rates = kinds[:2], rates[:2]
    found = {}
    for kind in kinds:
        ways = [(True, False), (False, True)] + [(True, True)] * (kind == whole and not quick)
        found[kind] = [Traffic(kind, *way, rate) for way in ways for rate in rates]
    return found


def expected_s(todo: Mapping[Pages, Sequence[Traffic]], windows: Windows) -> float:
    """How long all of it takes, about, from the command's start to its end."""
    placements = {kind.placement for kind in todo}
    rows = sum(map(len, todo.values()))
    return START_S + MEMORY_S * len(placements) + RANK_S * len(todo) + windows.row_s * rows
