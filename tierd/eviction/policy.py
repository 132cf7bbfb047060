"""The interface of an eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]

NO_PARENT = -1


class EvictionPolicy(Protocol):
    """Orders the pages of one pool for eviction.

    `now` is a count that only grows, passed in by the caller: recency without a clock.
    """

    parent: npt.NDArray[np.int64]
    """The slot of the page before each page, or NO_PARENT; all that if chains mean nothing."""
    children: npt.NDArray[np.int32]
    """How many pages that are here follow each page."""

    def grow(self, capacity: int) -> None:
        """Slots 0 .. capacity - 1 may be used from now on."""

    def insert(self, slot: int, parent: int, now: int) -> None:
        """A page takes a slot, after the page in slot `parent` (or NO_PARENT)."""

    def insert_orphan(self, slot: int) -> None:
        """A page takes a slot although the page before it is not here: worth nothing yet."""

    def link(self, slot: int, parent: int, now: int) -> None:
        """The page in `slot` turns out to follow the one in `parent`."""

    def orphan(self, slot: int) -> None:
        """The page before the one in `slot` is gone."""

    def touch(self, slots: Slots, now: int) -> None:
        """These pages were used. What comes before them in their chains counts as used too. 0:
        they have turned out to be of no use to anybody, and go first."""

    def remove(self, slot: int) -> None:
        """The page in `slot` is gone. It must have no successors here."""

    def evict(
        self, count: int, evictable: Callable[[int], bool], drop: Callable[[int], None]
    ) -> int:
        """Choose up to `count` victims, one after the other.

        Each is given to `drop`, which calls `remove`; that may make its predecessor the next
        candidate. Returns how many went: fewer only if no other page may go.
        """

    def recency(self, slots: Slots) -> int:
        """The latest use among these slots; 0 if there is no page in them."""
