"""Chunks that pools give up for others as soon as those who use their pages are done: which, for
whom, since when. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from tierd.control.pages import PagePool
from tierd.control.rows import Row


@dataclass
class Clearing:
    """What is cleared for one pool, and handed over together: a row of the pool's own may take
    several of others.

    `nbytes`: what the taker needs. `since`: when it began.
    """

    taker: PagePool
    nbytes: int
    since: float
    rows: list[Row] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Does nobody use a page of these rows any more?"""
        return all(row.pool.slots.is_vacant(row.ordinal) for row in self.rows)


class Clearings:
    """All rows that are being cleared."""

    def __init__(self) -> None:
        self._by_taker: dict[PagePool, Clearing] = {}

    @property
    def takers(self) -> Set[PagePool]:
        """The pools that something is being cleared for."""
        return self._by_taker.keys()

    def add(self, row: Row, taker: PagePool, nbytes: int, now: float) -> None:
        """A row is given up for a pool that needs so much in all."""
        self._by_taker.setdefault(taker, Clearing(taker, nbytes, now)).rows.append(row)

    def discard(self, row: Row) -> None:
        """A row has left its pool in another way, if it was being cleared."""
        for clearing in self._by_taker.values():
            if row in clearing.rows:
                clearing.rows.remove(row)

    def count_of(self, owner: PagePool) -> int:
        """How many rows a pool is giving up."""
        return sum(row.pool is owner for each in self._by_taker.values() for row in each.rows)

    def complete(self) -> list[Clearing]:
        """Take out what is ready to be handed over."""
        done = [each for each in self._by_taker.values() if each.is_done]
        for each in done:
            del self._by_taker[each.taker]
        return done
