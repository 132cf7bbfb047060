"""The ready words of a segment: a pair for each flush and restore, in turn. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tierd.wire.layout import TICKETS

FOR_RESTORES = 64
"""Pairs that flushes leave: a backup that is shed is a miss later, a load that fails an error."""
FOR_LOADS = 32
"""With fewer left a lookup misses: what is loaded on account of its answer must find one."""


class Tickets:
    """Which pair comes next. Tickets count up for ever; t's pair is number t % TICKETS.

    Attributes:
        last: The ticket that was taken last.
    """

    def __init__(self) -> None:
        self.last = 0

    def take(self) -> int:
        """The next ticket. Only if there is one `left`."""
        self.last = (self.last + 1) % 2**32 or 1
        return self.last

    def left(self, in_use: Iterable[int]) -> int:
        """How many may be taken before one would have the words of one that is in use."""
        return TICKETS - 1 - max(((self.last - ticket) % 2**32 for ticket in in_use), default=-1)
