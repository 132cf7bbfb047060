"""Least recently used, the deepest first: no page goes while one that follows it is here.

Only the leaves of the chains are candidates, so no hole is ever left behind. A page that was
last used later than its predecessor hands its recency on when it goes: a prefix is at least as
recent as whatever was built on it, without a walk up the chain at every use.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierd.eviction.policy import NO_PARENT, Slots

_NEVER = 0


class ChainLru:
    """See `tierd.eviction.policy.EvictionPolicy`. Amortised O(log n) a page."""

    def __init__(self) -> None:
        self.parent: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.children: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._last_use: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._present: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        # (last use when pushed, slot). An entry may be outdated; pop_victim checks.
        self._leaves: list[tuple[int, int]] = []

    def grow(self, capacity: int) -> None:
        more = capacity - len(self.parent)
        if more <= 0:
            return
        self.parent = np.concatenate([self.parent, np.full(more, NO_PARENT, np.int64)])
        self.children = np.concatenate([self.children, np.zeros(more, np.int32)])
        self._last_use = np.concatenate([self._last_use, np.zeros(more, np.int64)])
        self._present = np.concatenate([self._present, np.zeros(more, np.bool_)])

    def insert(self, slot: int, parent: int, now: int) -> None:
        self._present[slot] = True
        self.parent[slot] = parent
        self.children[slot] = 0
        self._last_use[slot] = now
        if parent != NO_PARENT:
            self.children[parent] += 1
        self._push(slot)

    def insert_orphan(self, slot: int) -> None:
        self.insert(slot, NO_PARENT, _NEVER)

    def link(self, slot: int, parent: int, now: int) -> None:
        self.parent[slot] = parent
        self.children[parent] += 1
        self._last_use[slot] = max(int(self._last_use[slot]), now)

    def orphan(self, slot: int) -> None:
        parent = int(self.parent[slot])
        if parent != NO_PARENT:
            self.parent[slot] = NO_PARENT
            self.children[parent] -= 1
        self._last_use[slot] = _NEVER
        self._push(slot)

    def touch(self, slots: Slots, now: int) -> None:
        self._last_use[slots] = now

    def remove(self, slot: int) -> None:
        parent = int(self.parent[slot])
        used = int(self._last_use[slot])
        self._present[slot] = False
        self._last_use[slot] = _NEVER
        self.parent[slot] = NO_PARENT
        if parent != NO_PARENT:
            self.children[parent] -= 1
            self._last_use[parent] = max(int(self._last_use[parent]), used)
            if self.children[parent] == 0:
                self._push(parent)

    def evict(
        self, count: int, evictable: Callable[[int], bool], drop: Callable[[int], None]
    ) -> int:
        held: list[tuple[int, int]] = []
        gone = 0
        while gone < count and self._leaves:
            used, slot = heapq.heappop(self._leaves)
            if not self._present[slot] or self.children[slot]:
                continue  # pushed again when it becomes a leaf
            if self._last_use[slot] != used:
                self._push(slot)
            elif evictable(slot):
                drop(slot)
                gone += 1
            else:
                held.append((used, slot))
        for entry in held:
            heapq.heappush(self._leaves, entry)
        self._compact()
        return gone

    def recency(self, slots: Slots) -> int:
        """The latest use among these slots."""
        return int(self._last_use[slots].max(initial=_NEVER))

    def _push(self, slot: int) -> None:
        heapq.heappush(self._leaves, (int(self._last_use[slot]), slot))

    def _compact(self) -> None:
        """Outdated entries must not outgrow the pool."""
        if len(self._leaves) <= 64 + 4 * len(self._present):
            return
        leaves = np.flatnonzero(self._present & (self.children == 0))
        self._leaves = [(int(self._last_use[s]), int(s)) for s in leaves]
        heapq.heapify(self._leaves)
