"""The deepest first like `ChainLru`, and of two leaves the one with the smaller chance of another
use: pages that nobody comes back to make way for those that somebody does.

Pages are of three classes, and for each the policy measures which part of its pages is used again
before it goes. A page that has waited for a while is the less likely to be used the longer it has
waited already, about as one over that time; so the leaf with the largest (age / chance of its
class) goes. The idea is that of LHD (Beckmann, Chen, Cidon: "LHD: Improving Cache Hit Rate by
Maximizing Hit Density", NSDI 2018), with the chain as what tells pages apart and no more of the
age distribution than its tail's shape. Where the classes fare alike it is `ChainLru`.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import numpy.typing as npt

from tierd.eviction.chain_lru import ChainLru, heap_of, packed, unpacked
from tierd.eviction.columns import column, grown
from tierd.eviction.policy import NO_PARENT, Drop, Evictable, Slots

NEW, CONTINUED, REUSED = range(3)
"""NEW: the beginning of a branch, such as a first prompt or a document that is read once.
CONTINUED: follows a page that had been a leaf for a while, as a conversation's next turn does.
REUSED: used again since it came."""
CLASSES = 3

BURST = 8
"""Uses closer together than this part of a victim's age are one: a request is looked up, pinned
and backed up, its prompt in pieces."""
PRIOR, LEAST_PRIOR = 0.03, 64
"""As many observations as this part of the pool, or this many, speak for all classes alike."""
TELLING = 0.5
"""Classes whose chances differ by less are not told apart: requests overlap, and one that is looked
up long before it is backed up counts twice."""
MEMORY = 16
"""Observations count half after so many poolfuls."""
LEAST_CHANCE = 2.0**-4
"""Beside the best class's. It bounds how long habits that have gone hold the pool against new ones,
which are not seen before they have been kept from one use to the next: 16 times as long as that."""


class ChainReuse(ChainLru):
    """See `tierd.eviction.policy.EvictionPolicy`. Amortised O(log n) a run.

    Args: `most`: as `ChainLru`.
    """

    def __init__(self, most: int = 0) -> None:
        super().__init__(most)
        self._class: npt.NDArray[np.int8] = column(np.int8, most)
        # One a class, each as ChainLru's.
        self._heaps: list[list[int]] = [[] for _ in range(CLASSES)]
        self._hits = [0.0] * CLASSES
        self._losses = [0.0] * CLASSES
        self._now = 0
        self._victim_use = 0

    def grow(self, capacity: int) -> None:
        self._class = grown(self._class, capacity)
        super().grow(capacity)

    def insert(self, run: Slots, parent: int, now: int) -> None:
        self._now = max(self._now, now)
        self._class[run] = self._class_after(parent)
        super().insert(run, parent, now)

    def touch(self, slots: Slots, now: int) -> None:
        if now:
            self._now = max(self._now, now)
            self._observe(slots, now)
        super().touch(slots, now)

    def evict(self, count: int, evictable: Evictable, drop: Drop) -> int:
        chances = self._chances()
        gone = 0
        while gone < count:
            coldest = self._coldest(chances)
            if coldest is None:
                break
            used, slot = unpacked(heapq.heappop(self._heaps[coldest]))
            run = self._victims(slot, count - gone, evictable)
            if not len(run):
                self._parked[slot] = True
                continue
            if used:
                self._losses[coldest] += len(run)
                self._victim_use = used
            drop(run)
            gone += len(run)
        self._age_observations()
        self._compact()
        return gone

    def _alike(self, slots: Slots, other: int) -> npt.NDArray[np.bool_]:
        alike: npt.NDArray[np.bool_] = self._class[slots] == self._class[other]
        return alike

    def _class_after(self, parent: int) -> int:
        """The class of a page that comes after the one in slot `parent`."""
        if parent == NO_PARENT or self.children[parent]:
            return NEW
        if self._class[parent] == NEW and self._in_burst(int(self._last_use[parent])):
            return NEW
        return CONTINUED

    def _in_burst(self, used: int) -> bool:
        return self._now - used <= self._burst()

    def _burst(self) -> int:
        return max(2, (self._now - self._victim_use) // BURST)

    def _observe(self, slots: Slots, now: int) -> None:
        """Count a use of a chain's pages, and make them REUSED."""
        again = now - self._last_use[slots] > self._burst()
        if not again.any():
            return
        # What comes before a fork is used for the sake of several chains. It is hardly ever a
        # leaf, and would make every page of its class look used.
        forks = np.flatnonzero(self.children[slots] > 1)
        own = np.arange(len(slots)) > (forks[-1] if len(forks) else -1)
        counts = np.bincount(self._class[slots[again & own]], minlength=CLASSES).tolist()
        self._hits = [hits + more for hits, more in zip(self._hits, counts, strict=True)]
        changed = slots[again & (self._class[slots] != REUSED)]
        self._class[changed] = REUSED
        self._last_use[changed] = now
        for slot in changed[self.children[changed] == 0].tolist():
            self._push(slot)

    def _chances(self) -> list[float]:
        """Per class, the chance that a page is used again, beside the best class's."""
        prior = max(LEAST_PRIOR, PRIOR * len(self._present))
        hits, seen = sum(self._hits), sum(self._hits) + sum(self._losses)
        overall = (hits + 1) / (seen + 1)
        chances = [
            (hits + prior * overall) / (hits + losses + prior)
            for hits, losses in zip(self._hits, self._losses, strict=True)
        ]
        best = max(chances)
        return [max(_told(chance / best), LEAST_CHANCE) for chance in chances]

    def _coldest(self, chances: list[float]) -> int | None:
        """The class whose oldest leaf is to go; None if there is no leaf."""
        best: tuple[float, int] | None = None
        for which in range(CLASSES):
            used = self._oldest(which)
            if used is None:
                continue
            age = (self._now - used + 1) / chances[which] if used else math.inf
            if best is None or age > best[0]:
                best = (age, which)
        return best[1] if best else None

    def _oldest(self, which: int) -> int | None:
        """The last use of a class's oldest leaf, which is then the first of its heap."""
        heap = self._heaps[which]
        while heap:
            used, slot = unpacked(heap[0])
            leaf = self._present[slot] and not self.children[slot]
            if leaf and self._last_use[slot] == used and self._class[slot] == which:
                return used
            heapq.heappop(heap)
            if leaf and self._class[slot] == which:
                self._push(slot)
        return None

    def _age_observations(self) -> None:
        if sum(self._hits) + sum(self._losses) > MEMORY * len(self._present):
            self._hits = [hits / 2 for hits in self._hits]
            self._losses = [losses / 2 for losses in self._losses]

    def _push(self, slot: int) -> None:
        entry = packed(self._last_use.item(slot), slot)
        heapq.heappush(self._heaps[self._class.item(slot)], entry)

    def _compact(self) -> None:
        """Outdated entries must not outgrow the pool."""
        if sum(map(len, self._heaps)) <= 64 + 2 * len(self._present):
            return
        leaves = np.flatnonzero(self._present & (self.children == 0) & ~self._parked)
        for which in range(CLASSES):
            mine = leaves[self._class[leaves] == which]
            self._heaps[which] = heap_of(self._last_use[mine], mine)


def _told(relative: float) -> float:
    """A chance beside the best class's, in powers of two: the order of pages must not hang on
    noise."""
    return 2.0 ** round(math.log2(relative)) if relative < TELLING else 1.0
