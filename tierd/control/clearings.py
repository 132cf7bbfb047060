"""Chunks that pools give up for others as soon as those who use their pages are done: which, for
whom, since when. Pure."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

Row = tuple[int, int]
"""A pool (its id) and an ordinal."""


@dataclass
class Clearing:
    """What is cleared for one pool, and handed over together: a row of the pool's own may take
    several of others.

    `taker`: the pool (its id). `nbytes`: what it needs. `since`: when it began.
    """

    taker: int
    nbytes: int
    since: float
    rows: list[Row] = field(default_factory=list)


class Clearings:
    """All rows that are being cleared."""

    def __init__(self) -> None:
        self._by_taker: dict[int, Clearing] = {}

    @property
    def takers(self) -> Set[int]:
        """The pools that something is being cleared for."""
        return self._by_taker.keys()

    def add(self, row: Row, taker: int, nbytes: int, now: float) -> None:
        """A row is given up for a pool that needs so much in all."""
        self._by_taker.setdefault(taker, Clearing(taker, nbytes, now)).rows.append(row)

    def discard(self, row: Row) -> None:
        """A row has left its pool in another way, if it was being cleared."""
        for clearing in self._by_taker.values():
            if row in clearing.rows:
                clearing.rows.remove(row)

    def count_of(self, owner: int) -> int:
        """How many rows a pool is giving up."""
        return sum(row[0] == owner for each in self._by_taker.values() for row in each.rows)

    def complete(self, is_vacant: Callable[[Row], bool]) -> list[Clearing]:
        """Take out what is ready to be handed over."""
        done = [each for each in self._by_taker.values() if all(map(is_vacant, each.rows))]
        for each in done:
            del self._by_taker[each.taker]
        return done
