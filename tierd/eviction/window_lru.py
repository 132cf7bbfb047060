"""Least recently used, for pages that serve the boundaries shortly after them: sliding windows
(SWA) and states.

Such a page has no use on its own: a request resumes at a boundary only if the whole window before
it is here. Pages are used, and therefore grow old, a window at a time; of one window the earliest
goes first, because it serves the earliest boundaries. What is left of a window that has lost a
page is as old as that page was, and is next in line.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from tierd.eviction.columns import column, grown
from tierd.eviction.policy import NO_PARENT, Drop, Evictable, Slots

_NEVER = 0


class WindowLru:
    """See `tierd.eviction.policy.EvictionPolicy`. Knows no chains: every page is a leaf.

    Amortised O(log n) a page.

    Args: `most`: how many slots to expect; more cost a copy of what is known of the others.
    """

    def __init__(self, most: int = 0) -> None:
        self.parent: npt.NDArray[np.int64] = column(np.int64, most)
        self.children: npt.NDArray[np.int32] = column(np.int32, most)
        self._last_use: npt.NDArray[np.int64] = column(np.int64, most)
        self._order: npt.NDArray[np.int64] = column(np.int64, most)
        self._present: npt.NDArray[np.bool_] = column(np.bool_, most)
        self._inserted = 0
        # Pages that were found not to be evictable: they have no entry until they are.
        self._parked: npt.NDArray[np.bool_] = column(np.bool_, most)
        # (last use when pushed, order of insertion, slot). May be outdated; `evict` checks.
        self._queue: list[tuple[int, int, int]] = []

    def grow(self, capacity: int) -> None:
        self.parent = grown(self.parent, capacity, NO_PARENT)
        self.children = grown(self.children, capacity)
        self._last_use = grown(self._last_use, capacity)
        self._order = grown(self._order, capacity)
        self._present = grown(self._present, capacity)
        self._parked = grown(self._parked, capacity)

    def insert(self, run: Slots, parent: int, now: int) -> None:
        self._present[run] = True
        self._last_use[run] = now
        for slot in run.tolist():
            self._inserted += 1
            self._order[slot] = self._inserted
            heapq.heappush(self._queue, (now, self._inserted, slot))

    def following(self, slot: int) -> list[int]:
        return []

    def link(self, slot: int, parent: int, now: int) -> None:
        """Chains mean nothing here."""

    def orphan(self, slot: int) -> None:
        self._last_use[slot] = _NEVER
        self._push(slot)

    def touch(self, slots: Slots, now: int) -> None:
        older = slots[self._last_use[slots] > now]
        self._last_use[slots] = now
        # A page that is demoted must be found again before its old entry comes up.
        for slot in older.tolist():
            self._push(slot)

    def allow(self, slots: Slots) -> None:
        again = slots[self._parked[slots]]
        self._parked[again] = False
        for slot in again.tolist():
            self._push(slot)

    def remove(self, run: Slots) -> None:
        self._present[run] = False
        self._parked[run] = False
        self._last_use[run] = _NEVER

    def evict(self, count: int, evictable: Evictable, drop: Drop) -> int:
        held: list[int] = []
        gone: list[int] = []
        while coldest := self._pop(count - len(gone)):
            may_go = evictable(np.array([slot for _, _, slot in coldest])).tolist()
            for (_, _, slot), goes in zip(coldest, may_go, strict=True):
                (gone if goes else held).append(slot)
        self._present[held] = self._parked[held] = True
        if gone:
            drop(np.array(gone))
        self._compact()
        return len(gone)

    def recency(self, slots: Slots | slice) -> int:
        return int(self._last_use[slots].max(initial=_NEVER))

    def _pop(self, most: int) -> list[tuple[int, int, int]]:
        """The entries of up to so many of the coldest pages, which are not present until further
        notice: an entry may be in the queue twice."""
        found: list[tuple[int, int, int]] = []
        while len(found) < most and self._queue:
            entry = heapq.heappop(self._queue)
            used, order, slot = entry
            if not self._present[slot] or self._order[slot] != order:
                continue
            if self._last_use[slot] == used:
                self._present[slot] = False
                found.append(entry)
            elif self._last_use[slot] > used:
                self._push(slot)  # else it was demoted, and pushed then
        return found

    def _push(self, slot: int) -> None:
        entry = (int(self._last_use[slot]), int(self._order[slot]), slot)
        heapq.heappush(self._queue, entry)

    def _compact(self) -> None:
        """Outdated entries must not outgrow the pool."""
        if len(self._queue) <= 64 + 4 * len(self._present):
            return
        slots = np.flatnonzero(self._present & ~self._parked).tolist()
        self._queue = [(int(self._last_use[s]), int(self._order[s]), s) for s in slots]
        heapq.heapify(self._queue)
