"""Why backups are decided against: counted by reason, and said in the log where nothing else is."""

from __future__ import annotations

import enum
import logging

log = logging.getLogger("tierd.control")


class Shed(enum.Enum):
    """A reason. The value is its name in `tierd status`."""

    PAUSED = "paused"
    RANKS = "ranks"
    COPIER = "copier"
    EPOCH = "epoch"
    NO_ROOM = "no_room"
    LATE_ROOM = "late_room"
    REPEATED_KEY = "repeated_key"


_SAID = {
    Shed.RANKS: (
        "a rank of its engine is not there, has come to it too late, has reported other pages, or "
        "none, as it does when it has offered more than the daemon keeps up with"
    ),
    Shed.NO_ROOM: (
        "no room can be made for its pages: all that there is is leased or on its way. More "
        "--memory helps"
    ),
    Shed.LATE_ROOM: (
        "room for its pages has not come in time: memory is pinned too slowly, or others have it "
        "every time. More --memory helps, or --pin-ahead"
    ),
}
"""The others have lines of their own in the log."""


class Sheds:
    """How many backups have been decided against, and why. Failed copies are not among them."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(Shed, 0)

    def note(self, reason: Shed, instance: str, count: int = 1) -> None:
        """More have been shed. The log has the first of a reason, and again whenever twice as many
        have been: an engine that is shed for hours must not fill it."""
        before = self._counts[reason]
        after = self._counts[reason] = before + count
        if reason in _SAID and before.bit_length() < after.bit_length():
            log.warning(
                "a backup of engine %s is not kept (%d so far for this reason): %s",
                instance,
                after,
                _SAID[reason],
            )

    def counts(self) -> dict[str, int]:
        """By the reason's name."""
        return {reason.value: count for reason, count in self._counts.items()}
