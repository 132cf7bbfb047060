"""When each chunk of a pool was used last, as far as somebody has looked: to look at all of them
whenever one is to be given up would hold control up for tens of milliseconds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

import numpy as np
import numpy.typing as npt

from tierd.eviction.columns import column, grown

LOOKS = 16
"""Chunks that are looked at in turn at each question, and chunks that are looked at again because
they seem to be the coldest."""
_ABSENT = np.iinfo(np.int64).max


class ChunkAges:
    """The chunks of one pool by their last use.

    A chunk that was used since somebody has looked at it seems colder than it is, and is looked at
    again before it is named. One whose latest pages have gone since seems warmer; it is found out
    when its turn comes. Of up to LOOKS chunks everything is known at every question. Of more, all
    of which may have been used since, it is the coldest of those just looked at that are named:
    while there is a chunk there is an answer.

    Args: `look`: the last use of a chunk as it is now, 0 if it is empty.
    """

    def __init__(self, look: Callable[[int], int]) -> None:
        self._look = look
        self._ages: npt.NDArray[np.int64] = column(np.int64)
        self._next = 0

    def add(self, ordinal: int) -> None:
        """A chunk may be named from now on."""
        self._ages = grown(self._ages, ordinal + 1, _ABSENT)
        self._ages[ordinal] = self._look(ordinal)

    def look_again(self, ordinal: int) -> None:
        """Pages of a chunk have gone; it may be colder than it seems."""
        self._ages[ordinal] = self._look(ordinal)

    def remove(self, ordinal: int) -> None:
        """There is no such chunk any more."""
        self._ages[ordinal] = _ABSENT

    def coldest(self, but: Set[int] = frozenset()) -> Iterator[tuple[int, int]]:
        """(last use, ordinal) of the chunks that were used least recently, the coldest first; of
        many only a few."""
        here = np.flatnonzero(self._ages != _ABSENT)
        out = here[np.isin(here, list(but))]
        here = here[~np.isin(here, out)]
        seen: dict[int, int] = {}
        for ordinal in np.roll(here, -int(here.searchsorted(self._next)))[:LOOKS].tolist():
            self._ages[ordinal] = seen[ordinal] = self._look(ordinal)
            self._next = ordinal + 1
        left = self._ages.copy()
        left[out] = _ABSENT
        for _ in range(LOOKS):
            ordinal = int(left.argmin()) if len(left) else 0
            if not len(left) or left[ordinal] == _ABSENT:
                return
            age = self._look(ordinal)
            if age <= left[ordinal]:
                yield age, ordinal
                left[ordinal] = _ABSENT
                seen.pop(ordinal, None)
            else:
                left[ordinal] = self._ages[ordinal] = seen[ordinal] = age
        yield from sorted((age, ordinal) for ordinal, age in seen.items())
