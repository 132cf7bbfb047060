"""What each slot of a pool is used for, and how many leases and pins hold its page. Pure; knows
neither keys nor chains."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tierd.control.free_slots import FreeSlots
from tierd.control.keys import MISSING
from tierd.eviction.columns import column, grown
from tierd.eviction.policy import Slots
from tierd.wire.layout import COMMITTED, FREE, WRITING

SPAN = 4096
"""Slots whose pages are named at a time."""

_COMMITTED = bytes([COMMITTED])
_SPOILED, _WITHDRAWN = 3, 4
"""A slot whose page has gone, though somebody still holds it. Its bytes are wrong, and its header
says FREE; or they are right, and whoever holds it may load it."""


class SlotTable:
    """The slots of one pool.

    A slot is FREE, WRITING (reserved by one backup until all its shards have been copied, or have
    failed and retired) or COMMITTED. If its page goes while somebody holds it, it is free as soon
    as nobody does. A chunk that is being withdrawn loses its slots as they become free.

    Args: `most`: how many slots to expect; more cost a copy of what is known of the others.
    """

    def __init__(self, chunk_slots: int, most: int = 0) -> None:
        self.capacity = 0
        """Slots in chunks that the pool has now."""
        self.committed = 0
        """Pages that can be hit."""
        self.held = 0
        """Those under at least one lease or pin."""
        self.withdrawn = 0
        """Slots whose pages have gone, and that somebody holds still."""
        self.chunk_slots = chunk_slots
        self._state: npt.NDArray[np.uint8] = column(np.uint8, most)
        self._holds: npt.NDArray[np.int32] = column(np.int32, most)
        self._free = FreeSlots(most)
        # Chunks that are being withdrawn.
        self._leaving: set[int] = set()

    # --- chunks -------------------------------------------------------------------------------

    def add_chunk(self, ordinal: int) -> None:
        """The slots of a chunk are free."""
        first, end = self.span(ordinal)
        self._state = grown(self._state, end)
        self._holds = grown(self._holds, end)
        self._free.add_range(first, end)
        self.capacity += end - first

    def withdraw_chunk(self, ordinal: int) -> Slots:
        """No page comes to a chunk from now on.

        Returns: the slots of its committed pages, which have still to go.
        """
        first, end = self.span(ordinal)
        states = self._state[first:end]
        free = np.flatnonzero(states == FREE) + first
        self._leaving.add(ordinal)
        self._free.remove(free)
        self.capacity -= len(free)
        return np.flatnonzero(states == COMMITTED) + first

    def remove_chunk(self, ordinal: int) -> None:
        """A vacant chunk is not there any more."""
        if ordinal in self._leaving:
            self._leaving.discard(ordinal)
            return
        first, end = self.span(ordinal)
        self._free.remove_range(first, end)
        self.capacity -= end - first

    def is_vacant(self, ordinal: int) -> bool:
        """Is there no page in a chunk, nor one that is held or being written?"""
        return not self._state[slice(*self.span(ordinal))].any()

    def used(self, ordinal: int) -> Slots:
        """The slots of a chunk that are not free."""
        first, end = self.span(ordinal)
        return np.flatnonzero(self._state[first:end] != FREE) + first

    def leaving(self, slots: Slots) -> Slots:
        """Those of these slots that lie in chunks which are being withdrawn."""
        return slots[self._are_leaving(slots)] if self._leaving else slots[:0]

    def span(self, ordinal: int) -> tuple[int, int]:
        """The first slot of a chunk, and the one after its last."""
        return ordinal * self.chunk_slots, (ordinal + 1) * self.chunk_slots

    # --- what becomes of a slot ---------------------------------------------------------------

    @property
    def free(self) -> int:
        """Slots that can be given to pages now."""
        return len(self._free)

    def take(self, count: int) -> Slots:
        """Free slots become WRITING, see `FreeSlots.take`. Shape: (count,), ascending."""
        slots = self._free.take(count)
        self._state[slots] = WRITING
        return slots

    def commit(self, slots: Slots) -> None:
        """These WRITING pages can be hit."""
        self._state[slots] = COMMITTED
        self.committed += len(slots)

    def recover(self, slots: Slots) -> None:
        """There is a page in each of these free slots already."""
        self._free.remove(slots)
        self.commit(slots)

    def let_go(self, slots: Slots, visible: bool) -> Slots:
        """The pages in these slots go. Where somebody holds one, it stays as it is until they are
        done.

        Args: `visible`: they are COMMITTED; else WRITING.
        Returns: the slots that are free now, in their order.
        """
        self.committed -= len(slots) if visible else 0
        held = self._holds[slots] > 0
        if held.any():
            kept = slots[held]
            self._state[kept] = _WITHDRAWN
            self.held -= len(kept)
            self.withdrawn += len(kept)
            slots = slots[~held]
        self._set_free(slots)
        return slots

    def spoil(self, slots: Slots) -> Slots:
        """The bytes of these pages, which have gone, are not right any more.

        Returns: the slots of those that somebody holds still.
        """
        held: Slots = slots[self._state[slots] == _WITHDRAWN]
        self._state[held] = _SPOILED
        return held

    def hold(self, slots: Slots) -> None:
        """Keep committed pages until as many calls of `release`. One may be named twice."""
        holds = self._holds[slots]
        self.held += len(_distinct(slots[holds == 0]))
        self._holds[slots] = holds + 1

    def release(self, slots: Slots) -> tuple[Slots, Slots]:
        """Undo a `hold`.

        Returns: the slots that nobody holds any more, and those of them that are free now, because
            their pages had gone meanwhile. Ascending, each once.
        """
        self._holds[slots] -= 1
        left = _distinct(slots[self._holds[slots] == 0])
        gone = left[self._state[left] >= _SPOILED] if self.withdrawn else left[:0]
        self.held -= len(left) - len(gone)
        if len(gone):
            self.withdrawn -= len(gone)
            self._set_free(gone)
        return left, gone

    # --- questions ----------------------------------------------------------------------------

    def are_committed(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these can be hit. Shape: (len(slots),)."""
        committed: npt.NDArray[np.bool_] = self._state[slots] == COMMITTED
        return committed

    def are_held(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these are under a lease or pin. Shape: (len(slots),)."""
        return self._holds[slots] > 0

    def are_evictable(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these are committed, and held by nobody. Shape: (len(slots),)."""
        may_go: npt.NDArray[np.bool_] = self._holds[slots] == 0
        may_go &= self._state[slots] == COMMITTED
        return may_go

    def are_intact(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these have a page whose bytes are right, for whoever holds it. Shape:
        (len(slots),)."""
        states = self._state[slots]
        intact: npt.NDArray[np.bool_] = states == COMMITTED
        intact |= states == _WITHDRAWN
        return intact

    def is_any_withdrawn(self, slots: Slots) -> bool:
        """Is one of these held, though nobody else can find it any more?"""
        return self.withdrawn > 0 and bool((self._state[slots] >= _SPOILED).any())

    def is_any_spoiled(self, slots: Slots) -> bool:
        """Are the bytes of one of these, all of which are held, not right any more?"""
        return self.withdrawn > 0 and bool((self._state[slots] == _SPOILED).any())

    def being_written(self, slots: Slots) -> Slots:
        """Those of these slots that are WRITING, in their order; MISSING is none of them."""
        here = slots[slots != MISSING]
        writing: Slots = here[self._state[here] == WRITING]
        return writing

    def committed_prefix(self, slots: Slots) -> Slots:
        """These slots up to the first that is not COMMITTED."""
        states = self._state[slots].tobytes()
        run = len(states) - len(states.lstrip(_COMMITTED))
        return slots if run == len(states) else slots[:run]

    def all_committed(self) -> Iterator[Slots]:
        """The slots of all pages that can be hit, a span at a time."""
        for first in range(0, len(self._state), SPAN):
            slots = np.flatnonzero(self._state[first : first + SPAN] == COMMITTED) + first
            if len(slots):
                yield slots

    # --- inside -------------------------------------------------------------------------------

    def _set_free(self, slots: Slots) -> None:
        self._state[slots] = FREE
        if self._leaving:
            leaving = self._are_leaving(slots)
            self.capacity -= int(np.count_nonzero(leaving))
            slots = slots[~leaving]
        self._free.add(slots)

    def _are_leaving(self, slots: Slots) -> npt.NDArray[np.bool_]:
        return np.isin(slots // self.chunk_slots, list(self._leaving))


def _distinct(slots: Slots) -> Slots:
    """Each of them once, ascending. `numpy.unique` costs several times as much for few."""
    if (slots[1:] > slots[:-1]).all():
        return slots
    ordered = np.sort(slots)
    again = ordered[1:] == ordered[:-1]
    return np.delete(ordered, np.flatnonzero(again)) if again.any() else ordered
