"""How long control waits for ranks and copiers before it goes on without them. Seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tierd.wire.limits import READY_TIMEOUT_S


@dataclass(frozen=True)
class Deadlines:
    """One daemon's deadlines.

    Attributes:
        lease_s: A lease lasts so long if nothing happens.
        ranks_s: A backup waits so long for the last rank's report before it is shed for all.
        heal_s: The ack of a backup waits so long for what comes before it.
        room_s: A backup waits so long for a chunk to be pinned before it is shed: it locks GPU
            pages.
        ready_s: A job waits so long for its ready words; then it fails.
        backup_s: A backup that has not retired by then costs its copier its life: its slots must
            come back.
        restore_s: So does a restore: only then is it safe to say that nothing writes the pages
            any more.
        detach_s: And a copier that has not let go of a dead rank's memory: it is the next
            engine's.
        start_s: And one that is started and does not get ready.
        stranger_s: Somebody who connects may take so long for a first message.
        drain_s: A daemon that was told to stop may take so long to finish what it has accepted.
        loads_s: And so long for leased pages to be loaded: an engine that was told of a hit fails
            the request if its load then fails.
        stop_s: Then a copier may take so long to finish.
        last_s: Copiers of a daemon that is gone may take so long to end by themselves, before a
            new one on the same `--persist` kills them.
        quiet_s: A copier that does not answer for so long gets no more work.
        silent_s: And for so long, it is killed and started again.
    """

    lease_s: float = 30.0
    ranks_s: float = 2.0
    heal_s: float = 2.0
    room_s: float = 5.0
    ready_s: float = READY_TIMEOUT_S
    backup_s: float = 60.0
    restore_s: float = READY_TIMEOUT_S + 10.0
    detach_s: float = 5.0
    start_s: float = 60.0
    stranger_s: float = 30.0
    drain_s: float = 15.0
    loads_s: float = 2.0
    stop_s: float = 5.0
    last_s: float = 30.0
    quiet_s: float = 5.0
    silent_s: float = 40.0

    def times(self, patience: float) -> Deadlines:
        """All of them so many times as long."""
        return Deadlines(**{f.name: getattr(self, f.name) * patience for f in fields(self)})
