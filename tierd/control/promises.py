"""What memory is meant for which pool, and for how long the others leave it alone: what has been
given back for one, room that it has still to use, and chunks that it has just got. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierd.control.pages import PagePool
from tierd.control.rows import Row

PROMISE_S = 2.0
"""Less than a backup waits for room."""


@dataclass
class _Owed:
    """Memory that others have given back for a pool, which has still to claim it."""

    nbytes: int
    since: float
    until: float


class Promises:
    """Of all pools. Times are the caller's, in seconds."""

    def __init__(self) -> None:
        self._owed: dict[PagePool, _Owed] = {}
        # Pools in which room has been made: their arrivals then, and until when that is left to
        # them. Two that took it from each other before either used it would do so for ever.
        self._unused: dict[PagePool, tuple[int, float]] = {}
        # Rows that were given up by others: until when they stay where they are.
        self._new: dict[Row, float] = {}

    def owe(self, pool: PagePool, nbytes: int, now: float, time_s: float = PROMISE_S) -> None:
        """Memory has been given back for a pool, which is to claim it within a time."""
        owed = self._owed.setdefault(pool, _Owed(0, now, now))
        owed.nbytes = max(owed.nbytes, nbytes)
        owed.since = now
        owed.until = max(owed.until, now + time_s)

    def is_one_fresh(self, now: float) -> bool:
        """Has a pool just been given something that it has not claimed yet?"""
        return any(now < owed.since + PROMISE_S for owed in self._owed.values())

    def owed_to_others(self, pool: PagePool) -> int:
        """Bytes that a pool must leave alone."""
        return sum(owed.nbytes for other, owed in self._owed.items() if other is not pool)

    def claim(self, row: Row, nbytes: int, now: float) -> None:
        """A row has been claimed. One that others have given up for its pool is that pool's own for
        a while: else two could take it from each other as fast as they use it, and neither would
        ever find again what it has kept."""
        owed = self._owed.get(row.pool)
        if owed is not None:
            self._new[row] = now + PROMISE_S
            owed.nbytes -= nbytes
            if owed.nbytes <= 0:
                del self._owed[row.pool]

    def make(self, pool: PagePool, now: float) -> None:
        """Room has been made in a pool: it stays until a page has come, for a while."""
        self._unused[pool] = (pool.arrivals, now + PROMISE_S)

    def is_unused(self, pool: PagePool, now: float) -> bool:
        """Is there room in a pool that was made for pages which have still to come?"""
        arrivals, until = self._unused.get(pool, (-1, 0.0))
        return pool.arrivals == arrivals and now < until

    def is_left_alone(self, pool: PagePool, now: float) -> bool:
        """Does a pool have room or chunks that are left to it now, and may be given up later?"""
        return self.is_unused(pool, now) or bool(self.new_rows(pool))

    def new_rows(self, pool: PagePool) -> set[int]:
        """The ordinals of a pool's rows that are to stay where they are."""
        return {row.ordinal for row in self._new if row.pool is pool}

    def expire(self, now: float, still: Callable[[PagePool], bool]) -> None:
        """End what has lasted long enough. `still`: whether what a pool is owed is to be kept
        all the same."""
        self._owed = {p: o for p, o in self._owed.items() if o.until > now or still(p)}
        self._new = {row: until for row, until in self._new.items() if until > now}

    def forget_row(self, row: Row) -> None:
        """A row has left its pool."""
        self._new.pop(row, None)

    def forget_pool(self, pool: PagePool) -> None:
        """A pool is no more."""
        self._owed.pop(pool, None)
        self._unused.pop(pool, None)
