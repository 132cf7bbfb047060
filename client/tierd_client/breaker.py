"""Turns lookups into misses while the daemon is in no state to answer. Pure."""

from __future__ import annotations

import math

STALE_S = 5.0
"""Control writes its heartbeat about once a second when it is idle, and more often when it works:
one that is so old belongs to a process that hangs or is stopped. Whoever waits longer than that for
an answer takes it for dead no sooner."""
MAX_MUTE_S = 10.0


class Breaker:
    """Decides whether control may be asked, so that a daemon that hangs costs one time-out and no
    second one.

    Args:
        timeout_s: What a question waits for its answer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._stale_s = max(STALE_S, timeout_s)
        self._mute_s = timeout_s
        self._muted_until = 0.0
        self._silent_at: float | None = None
        self._least_age_s = math.inf

    def connected(self, now: float, beat_s: float) -> None:
        """There is a daemon, which has just spoken."""
        self._least_age_s = now - beat_s
        self._silent_at = None
        self._muted_until = 0.0
        self._mute_s = self._timeout_s

    def is_open(self, now: float, beat_s: float) -> bool:
        """Must nothing be asked?

        Args:
            now: This process's monotonic clock, seconds.
            beat_s: The heartbeat word, seconds of control's monotonic clock. It may differ from
                ours, in another time namespace: the least age ever seen tells by how much.
        """
        age_s = now - beat_s
        self._least_age_s = min(self._least_age_s, age_s)
        if age_s - self._least_age_s > self._stale_s:
            return True
        return now < self._muted_until or beat_s == self._silent_at

    def timed_out(self, now: float, beat_s: float) -> float:
        """A question was not answered in time. None is asked for a while, and not before the heart
        has beaten again. Returns: the while, seconds."""
        self._mute_s = min(self._mute_s * 2, MAX_MUTE_S)
        self._muted_until = now + self._mute_s
        self._silent_at = beat_s
        return self._mute_s

    def answered(self) -> None:
        """A question was answered in time."""
        self._mute_s = self._timeout_s
        self._silent_at = None
