"""Least recently used, the deepest first: no page goes while one that follows it is here.

Only the leaves of the chains are candidates, so no hole is ever left behind. A page that was
last used later than its predecessor hands its recency on when it goes: a prefix is at least as
recent as whatever was built on it, without a walk up the chain at every use.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from tierd.eviction.columns import column, grown
from tierd.eviction.policy import NO_PARENT, Drop, Evictable, Slots

_NEVER = 0
_NONE = -1
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class ChainLru:
    """See `tierd.eviction.policy.EvictionPolicy`. Amortised O(log n) a run.

    Args: `most`: how many slots to expect; more cost a copy of what is known of the others.
    """

    def __init__(self, most: int = 0) -> None:
        self.parent: npt.NDArray[np.int64] = column(np.int64, most)
        self.children: npt.NDArray[np.int32] = column(np.int32, most)
        self._last_use: npt.NDArray[np.int64] = column(np.int64, most)
        self._present: npt.NDArray[np.bool_] = column(np.bool_, most)
        # The first page that follows each page, and the pages beside it that follow the same one:
        # what follows a page is found without a look at all.
        self._child: npt.NDArray[np.int64] = column(np.int64, most)
        self._next: npt.NDArray[np.int64] = column(np.int64, most)
        self._previous: npt.NDArray[np.int64] = column(np.int64, most)
        # Entries may be outdated; `evict` checks.
        self._leaves: list[int] = []
        # Leaves that were found not to be evictable: they have no entry until they are.
        self._parked: npt.NDArray[np.bool_] = column(np.bool_, most)

    def grow(self, capacity: int) -> None:
        self.parent = grown(self.parent, capacity, NO_PARENT)
        self.children = grown(self.children, capacity)
        self._last_use = grown(self._last_use, capacity)
        self._present = grown(self._present, capacity)
        self._child = grown(self._child, capacity, _NONE)
        self._next = grown(self._next, capacity, _NONE)
        self._previous = grown(self._previous, capacity, _NONE)
        self._parked = grown(self._parked, capacity)

    def insert(self, run: Slots, parent: int, now: int) -> None:
        first, last = int(run[0]), int(run[-1])
        self._present[run] = True
        self._last_use[run] = now
        self.parent[run[1:]] = run[:-1]
        self._child[run[:-1]] = run[1:]
        self.children[run] = 1
        self.children[last] = 0
        if parent != NO_PARENT:
            self._attach(first, parent)
        self._push(last)

    def following(self, slot: int) -> list[int]:
        found = []
        child = self._child.item(slot)
        while child != _NONE:
            found.append(child)
            child = self._next.item(child)
        return found

    def link(self, slot: int, parent: int, now: int) -> None:
        self._attach(slot, parent)
        self._last_use[slot] = max(int(self._last_use[slot]), now)

    def orphan(self, slot: int) -> None:
        if self.parent[slot] != NO_PARENT:
            self._detach(slot)
        self._last_use[slot] = _NEVER
        self._push(slot)

    def touch(self, slots: Slots, now: int) -> None:
        self._last_use[slots] = now

    def allow(self, slots: Slots) -> None:
        again = slots[self._parked[slots]]
        self._parked[again] = False
        for slot in again.tolist():
            self._push(slot)

    def remove(self, run: Slots) -> None:
        parent = int(self.parent[run[-1]])
        used = int(self._last_use[run].max())
        if parent != NO_PARENT:
            self._detach(int(run[-1]))
        self._present[run] = False
        self._parked[run] = False
        self._last_use[run] = _NEVER
        self.parent[run] = NO_PARENT
        self.children[run] = 0
        self._child[run] = _NONE
        if parent != NO_PARENT:
            self._last_use[parent] = max(int(self._last_use[parent]), used)
            if self.children[parent] == 0:
                self._push(parent)

    def evict(self, count: int, evictable: Evictable, drop: Drop) -> int:
        gone = 0
        while gone < count and self._leaves:
            used, slot = unpacked(heapq.heappop(self._leaves))
            if not self._present[slot] or self.children[slot]:
                continue  # pushed again when it becomes a leaf
            if self._last_use[slot] != used:
                self._push(slot)
                continue
            run = self._victims(slot, count - gone, evictable)
            if len(run):
                drop(run)
                gone += len(run)
            else:
                self._parked[slot] = True
        self._compact()
        return gone

    def recency(self, slots: Slots | slice) -> int:
        return int(self._last_use[slots].max(initial=_NEVER))

    def _victims(self, leaf: int, most: int, evictable: Evictable) -> Slots:
        """The coldest leaf and those before it that are the coldest in their turn, from the leaf
        upwards: nothing else follows them, and they were used no later. None if the leaf may not
        go."""
        if not evictable(np.array([leaf])).all():
            return np.empty(0, np.int64)
        parent, children = self.parent.item, self.children.item
        run = [leaf]
        above = parent(leaf)
        while len(run) < most and above != NO_PARENT and children(above) == 1:
            run.append(above)
            above = parent(above)
        slots = np.array(run)
        go = evictable(slots) & (self._last_use[slots] <= self._last_use[leaf])
        go &= self._alike(slots, leaf)
        return slots if go.all() else slots[: int(go.argmin())]

    def _attach(self, slot: int, parent: int) -> None:
        beside = self._child.item(parent)
        self._next[slot] = beside
        if beside != _NONE:
            self._previous[beside] = slot
        self._child[parent] = slot
        self.parent[slot] = parent
        self.children[parent] += 1

    def _detach(self, slot: int) -> None:
        parent = self.parent.item(slot)
        before, after = self._previous.item(slot), self._next.item(slot)
        if before == _NONE:
            self._child[parent] = after
        else:
            self._next[before] = after
        if after != _NONE:
            self._previous[after] = before
        self._next[slot] = self._previous[slot] = _NONE
        self.parent[slot] = NO_PARENT
        self.children[parent] -= 1

    def _alike(self, slots: Slots, other: int) -> npt.NDArray[np.bool_]:
        """Does recency alone decide between each of these and the other?"""
        return np.ones(len(slots), np.bool_)

    def _push(self, slot: int) -> None:
        heapq.heappush(self._leaves, packed(self._last_use.item(slot), slot))

    def _compact(self) -> None:
        """Outdated entries must not outgrow the pool."""
        if len(self._leaves) > 64 + 2 * len(self._present):
            leaves = np.flatnonzero(self._present & (self.children == 0) & ~self._parked)
            self._leaves = heap_of(self._last_use[leaves], leaves)


def packed(used: int, slot: int) -> int:
    """A leaf and its last use when it was pushed, as one number that sorts by the latter. It takes
    a third of what a pair takes, and gives the garbage collector nothing to look at."""
    return used << _SLOT_BITS | slot


def unpacked(entry: int) -> tuple[int, int]:
    """The last use and the slot of an entry."""
    return entry >> _SLOT_BITS, entry & _SLOT_MASK


def heap_of(used: npt.NDArray[np.int64], slots: Slots) -> list[int]:
    """A heap of entries. Shapes: (n,) both."""
    entries = list(map(packed, used.tolist(), slots.tolist()))
    heapq.heapify(entries)
    return entries
