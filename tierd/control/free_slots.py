"""Which slots of a pool are free, and which of them go to the next pages. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierd.eviction.columns import column, grown
from tierd.eviction.policy import Slots

SPAN = 4096
"""Slots that are searched at a time for free ones."""
_NO_SLOTS: Slots = np.empty(0, np.int64)


class FreeSlots:
    """The free slots of one pool. A free one is found without a look at every slot.

    Args: `most`: how many slots to expect.
    """

    def __init__(self, most: int = 0) -> None:
        self._free: npt.NDArray[np.bool_] = column(np.bool_, most)
        # How many are free in each SPAN of slots.
        self._in_span: npt.NDArray[np.int64] = column(np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add_range(self, first: int, end: int) -> None:
        """Slots `first` to `end` (exclusive), which were not there before, are free."""
        self._free = grown(self._free, end)
        self._free[first:end] = True
        self._count_range(first, end, 1)

    def remove_range(self, first: int, end: int) -> None:
        """Slots `first` to `end` (exclusive), all of them free, are not there any more."""
        self._free[first:end] = False
        self._count_range(first, end, -1)

    def add(self, slots: Slots) -> None:
        """These slots have become free. None may be named twice."""
        self._free[slots] = True
        self._count += len(slots)
        np.add.at(self._in_span, slots // SPAN, 1)

    def remove(self, slots: Slots) -> None:
        """These slots, all of them free, are in use."""
        self._free[slots] = False
        self._count -= len(slots)
        np.subtract.at(self._in_span, slots // SPAN, 1)

    def take(self, count: int) -> Slots:
        """The lowest free slots, ascending: a run of pages gets a run of slots wherever one is
        free. They are in use then. Shape: (count,). No more than there are may be wanted."""
        if count > self._count:
            raise AssertionError(f"{count} slots wanted of {self._count}")
        self._count -= count
        taken: list[Slots] = []
        for span in self._in_span.nonzero()[0].tolist():
            if not count:
                break
            first = span * SPAN
            found = self._free[first : first + SPAN].nonzero()[0][:count] + first
            self._free[found] = False
            self._in_span[span] -= len(found)
            count -= len(found)
            taken.append(found)
        return taken[0] if len(taken) == 1 else np.concatenate([_NO_SLOTS, *taken])

    def _count_range(self, first: int, end: int, sign: int) -> None:
        self._count += sign * (end - first)
        spans = np.bincount(np.arange(first, end) // SPAN)
        self._in_span = grown(self._in_span, len(spans))
        self._in_span[: len(spans)] += sign * spans
