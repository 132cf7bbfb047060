"""The chunks of one pool: which of them was used least recently, whether its pages may go with all
that follow them, and how they do. Pure."""

from __future__ import annotations

from collections.abc import Set
from itertools import islice
from typing import Protocol

import numpy as np

from tierd.control.chunk_ages import ChunkAges
from tierd.control.slot_table import SlotTable
from tierd.eviction.policy import EvictionPolicy, Slots

CHUNKS_TRIED = 4
"""The coldest chunks of a pool that are looked at for one that nobody uses right now."""
MOST_FOLLOWERS = 4096
"""Pages elsewhere that may go with a chunk. One that more than these follow, as a prompt that all
requests share, is worth keeping, and would take long to give up."""
MOST_LOOSENED = 1024
"""Pages that go at a time where that stands in the way of everything."""


class Pages(Protocol):
    """What the chunks of a pool ask of its pages."""

    def grow(self, capacity: int) -> None:
        """Slots 0 .. capacity - 1 may be used from now on."""

    def evict_coldest(self, count: int) -> Slots:
        """Evict up to `count` pages; returns their slots."""

    def evict_all(self, doomed: set[int]) -> int:
        """Evict these pages, that nothing else follows and nobody holds. Returns how many."""

    def withdraw(self, slots: Slots) -> int:
        """Evict these pages, whoever holds them; what follows them waits for them. Returns how
        many there were."""


class PoolChunks:
    """All chunks of one pool, by ordinal.

    Args:
        slots: What is in them.
        policy: Knows what follows what, and when it was used.
        pages: Evicts.
    """

    def __init__(self, slots: SlotTable, policy: EvictionPolicy, pages: Pages) -> None:
        self._slots = slots
        self._policy = policy
        self._pages = pages
        self._ages = ChunkAges(lambda n: policy.recency(slice(*slots.span(n))))

    def add(self, ordinal: int) -> None:
        """The slots of a chunk may be used."""
        self._pages.grow(self._slots.span(ordinal)[1])
        self._slots.add_chunk(ordinal)
        self._ages.add(ordinal)

    def coldest(self, but: Set[int] = frozenset()) -> tuple[int, int] | None:
        """The chunk that was used least recently, of those whose pages and all that follow them
        may go; of a pool of many chunks, one of the coldest.

        Args: `but`: not these.
        Returns: its last use (0 if it is empty) and its ordinal; None if there is none such.
        """
        for age, ordinal in islice(self._ages.coldest(but), CHUNKS_TRIED):
            if self.may_remove(ordinal, MOST_FOLLOWERS):
                return age, ordinal
        return None

    def oldest(self, but: Set[int] = frozenset()) -> tuple[int, int] | None:
        """The same, whether or not its pages may go. None: there is no chunk."""
        return next(self._ages.coldest(but), None)

    def may_remove(self, ordinal: int, most: int | None = None) -> bool:
        """May the pages of a chunk go, with all that follow them? Not while one of them is held or
        being written, nor if more than `most` that lie elsewhere follow."""
        doomed = self._doomed(ordinal, most)
        if doomed is None:
            return False
        slots = np.array(list(doomed), np.int64)
        return bool(self._slots.are_evictable(slots).all())

    def remove(self, ordinal: int) -> int:
        """Evict every page of a chunk with all that follows them, and give its slots up.

        Returns the number of pages evicted. `may_remove`, or of one that was withdrawn
        `SlotTable.is_vacant`, says whether a chunk allows it.
        """
        evicted = self._pages.evict_all(self._doomed(ordinal) or set())
        self._slots.remove_chunk(ordinal)
        self._ages.remove(ordinal)
        return evicted

    def withdraw(self, ordinal: int) -> int:
        """Nobody finds the pages of a chunk from now on, and none come to it; those that are being
        written there go once they have come. Whoever holds a page may still load it. What comes
        after these pages elsewhere waits for them to be backed up again.

        Returns the number of pages evicted. `SlotTable.is_vacant` says when the last one has left.
        """
        self._ages.remove(ordinal)
        return self._pages.withdraw(self._slots.withdraw_chunk(ordinal))

    def loosen(self) -> bool:
        """So much follows the coldest chunks that none can be given up as it is: evict the coldest
        pages, the deepest first, a chunk's worth at most. Call it again and again.

        Returns: whether some went. None do while so many pages are held or being written that one
            could lie in every chunk: it might be in vain.
        """
        slots, chunk_slots = self._slots, self._slots.chunk_slots
        fixed = slots.capacity - slots.free - (slots.committed - slots.held)
        if fixed >= slots.capacity // chunk_slots:
            return False
        gone = self._pages.evict_coldest(min(chunk_slots, MOST_LOOSENED))
        for ordinal in set((gone // chunk_slots).tolist()):
            self._ages.look_again(ordinal)
        return len(gone) > 0

    def _doomed(self, ordinal: int, most: int | None = None) -> set[int] | None:
        """Slots with a page of a chunk, and of every page that follows one of them; None: more
        than `most` of those lie elsewhere."""
        doomed = set(self._slots.used(ordinal).tolist())
        enough = None if most is None else len(doomed) + most
        left = [slot for slot in doomed if self._policy.children[slot]]
        while left:
            new = [slot for slot in self._policy.following(left.pop()) if slot not in doomed]
            doomed.update(new)
            if enough is not None and len(doomed) > enough:
                return None
            left += new
        return doomed
