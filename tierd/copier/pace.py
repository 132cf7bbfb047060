"""When the next piece of a direction may be submitted, if its rate has a cap. Has no clock."""

from __future__ import annotations

BURST_S = 0.02
"""What a direction that was idle may copy at once: a small restore need not be slow under a cap."""


class Cap:
    """A token bucket over bytes.

    A piece may go while nothing is owed, and its bytes are then owed, however many they are: over
    a time t, what goes is at most t * rate, a burst and one piece.

    Args:
        bytes_per_s: The rate. Above 0.
        now: Monotonic seconds.
    """

    def __init__(self, bytes_per_s: float, now: float) -> None:
        self._rate = bytes_per_s
        self._burst = bytes_per_s * BURST_S
        self._left = self._burst
        self._seen = now

    def allows(self, now: float) -> bool:
        """Whether a piece may be submitted now."""
        self._left = min(self._burst, self._left + (now - self._seen) * self._rate)
        self._seen = now
        return self._left > 0

    def take(self, nbytes: int) -> None:
        """So many bytes have been submitted."""
        self._left -= nbytes
