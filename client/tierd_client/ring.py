"""The places of an index ring as its one writer sees them."""

from __future__ import annotations


class RingSpace:
    """Which positions of a ring are free. Positions count up for ever; p is element p % size.

    Attributes:
        head: The next position to write.
    """

    def __init__(self, size: int) -> None:
        self.head = 0
        self._size = size
        self._free_from = 0

    def room(self) -> int:
        """Free places."""
        return self._size - (self.head - self._free_from)

    def free_up_to(self, position: int) -> None:
        """The mark never moves back, nor past the head, whatever a late reader stores."""
        if self._free_from < position <= self.head:
            self._free_from = position

    def free_all(self) -> None:
        """Nobody reads what has been written so far."""
        self._free_from = self.head
