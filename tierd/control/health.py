"""Does a copier's loop go round? It is asked every now and then, and its silence is counted.

Pure. A copier that says nothing sits in a driver call that does not return, or is stopped; the
backups and restores of its GPU wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass

ASK_S = 1.0
STEP_S = 2.0


@dataclass
class Pulse:
    """One copier, from the moment it is ready.

    Silence grows in steps of `STEP_S` at most: while control itself was stopped, nobody could be
    heard.

    Attributes:
        quiet_s: One that works is never silent for so long.
        silent_s: How long it has been.
    """

    quiet_s: float
    silent_s: float = 0.0
    _asked: bool = False
    _ask_at: float = 0.0
    _looked_at: float = 0.0
    _noted: bool = False

    def heard(self) -> None:
        """It has said something."""
        self.silent_s = 0.0
        self._asked = self._noted = False

    def look(self, now: float) -> bool:
        """Count the silence. True: ask it to say something."""
        step, self._looked_at = min(now - self._looked_at, STEP_S), now
        if self._asked:
            self.silent_s += step
            return False
        self._asked = now >= self._ask_at
        if self._asked:
            self._ask_at = now + ASK_S
        return self._asked

    @property
    def quiet(self) -> bool:
        """Has it said nothing for longer than one that works would?"""
        return self.silent_s >= self.quiet_s

    def fell_quiet(self) -> bool:
        """`quiet`, once for each time."""
        fell = self.quiet and not self._noted
        self._noted = self._noted or fell
        return fell
