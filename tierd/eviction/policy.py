"""The interface of an eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
"""Slot numbers of one pool. Shape: (n,)."""

Evictable = Callable[[Slots], npt.NDArray[np.bool_]]
"""Which of some pages may go. Shapes: (n,) both. Of one that may not, the policy is told when it
may: until then it is not asked again."""
Drop = Callable[[Slots], None]
"""Gives a run of pages up, named from the last one upwards."""

NO_PARENT = -1


class EvictionPolicy(Protocol):
    """Orders the pages of one pool for eviction.

    Pages come and go in runs: pages of one chain that follow each other. `now` is a count that
    only grows, passed in by the caller: recency without a clock.
    """

    parent: npt.NDArray[np.int64]
    """The slot of the page before each page, or NO_PARENT; all that if chains mean nothing."""
    children: npt.NDArray[np.int32]
    """How many pages that are here follow each page."""

    def grow(self, capacity: int) -> None:
        """Slots 0 .. capacity - 1 may be used from now on."""

    def insert(self, run: Slots, parent: int, now: int) -> None:
        """A run of pages takes slots, after the page in slot `parent` (or NO_PARENT).

        `now` 0: although the page before them is not here, so that they are worth nothing yet.
        """

    def following(self, slot: int) -> list[int]:
        """The pages that come directly after the one in `slot`."""

    def link(self, slot: int, parent: int, now: int) -> None:
        """The page in `slot` turns out to follow the one in `parent`."""

    def orphan(self, slot: int) -> None:
        """The page before the one in `slot` is gone."""

    def touch(self, slots: Slots, now: int) -> None:
        """These pages were used. What comes before them in their chains counts as used too. 0:
        they have turned out to be of no use to anybody, and go first."""

    def allow(self, slots: Slots) -> None:
        """These pages may go from now on."""

    def remove(self, run: Slots) -> None:
        """A run of pages is gone, named from its last page upwards. That page must have no
        successors here, and the others none but the one named before them."""

    def evict(self, count: int, evictable: Evictable, drop: Drop) -> int:
        """Choose up to `count` victims.

        They are given to `drop` as runs, from the last page upwards, and it calls `remove`; that
        may make the page before them the next candidate. Returns how many went: fewer only if no
        other page may go. The work is in proportion to that, whatever part of the pool must stay.
        """

    def recency(self, slots: Slots | slice) -> int:
        """The latest use among these slots; 0 if there is no page in them."""
