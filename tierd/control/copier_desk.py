"""What copiers say, and what their silence or their death means for everybody else."""

from __future__ import annotations

import logging

import numpy as np

from tierd.channel import ChannelClosed, close_all
from tierd.control.copiers import Copier, CopierState, describe_exit
from tierd.control.members import Members
from tierd.control.restore_desk import RestoreDesk
from tierd.control.state import State
from tierd.wire import messages
from tierd.wire.errors import ProtocolError

log = logging.getLogger("tierd.control")


class CopierDesk:
    """All copiers of one daemon."""

    def __init__(self, state: State, members: Members, restores: RestoreDesk) -> None:
        self._state = state
        self._members = members
        self._restores = restores

    def receive(self, copier: Copier, now: float) -> None:
        """Take in what a copier has sent, or that it is gone."""
        if copier.state is CopierState.ENDING:
            self._bury(copier, now)
        if copier.channel is None:
            return
        try:
            copier.channel.flush()
            for message, fds in copier.channel.receive():
                copier.pulse.heard()
                close_all(fds)
                self._on_copier(copier, message)
        except ChannelClosed:
            copier.end()
        except ProtocolError as error:
            log.error(
                "copier %s makes no sense (%s); starting it again: its copies fail, cached pages "
                "stay. Please report this",
                copier.device,
                error,
            )
            copier.end()

    def tend(self, now: float) -> None:
        """Start copiers again that have died, and end those that do not do what they must."""
        stuck = self._members.overdue(now)
        for copier in self._state.copiers.values():
            if copier.state is CopierState.DEAD:
                if now >= copier.restart_at:
                    copier.start(now)
                continue
            copier.look(now)
            late = "has not let go of a dead rank's memory" if copier in stuck else ""
            late = late or copier.overdue(now)
            if late and copier.state is not CopierState.ENDING:
                log.error(
                    "copier %s (pid %d, %s) %s in time; killing it so that nothing is written "
                    "late, and starting another. Copies under way fail, cached pages stay",
                    copier.device,
                    copier.pid,
                    copier.state.value,
                    late,
                )
                copier.end()

    def _on_copier(self, copier: Copier, message: messages.FromCopier) -> None:
        if isinstance(message, messages.JobDone):
            job = copier.retire(message)
            if job is not None:
                if not message.ok:
                    log.warning(
                        "a copy on %s failed, so %s: %s",
                        copier.device,
                        "its pages are not kept" if job.restore is None else "its load fails",
                        message.error,
                    )
                self._restores.spoiled(job, message.corrupt)
                job.done(message.ok, False)
        elif isinstance(message, messages.ChunkReady):
            if not message.error:
                self._forget_corrupt(copier, message)
                self._state.room.store.note_joined(message.chunk, message.joined_bytes)
            if self._state.room.rows.ready(copier, message.chunk, message.error):
                self._members.chunk_settled(copier, message.chunk)
            else:
                self._members.chunk_lost(copier, message.chunk)
        elif isinstance(message, messages.ChunkDropped):
            self._members.chunk_settled(copier, message.chunk)
            self._state.room.stock.dropped(copier, message.chunk)
        elif isinstance(message, messages.CopierReady):
            copier.ready(message.detail)
            log.info("copier %s is ready (pid %d)", copier.device, copier.pid)
            self._state.room.stock.fill(copier)
            for session in self._state.sessions.values():
                if session.copier is copier:
                    self._members.attach(session)
        elif isinstance(message, messages.Attached):
            joined = self._state.sessions.get(message.session)
            if joined is not None and not self._members.attached(joined, message):
                # The connection is dropped like any other that has ended.
                joined.channel.close()
        elif isinstance(message, messages.Detached):
            self._members.detached(message.session)

    def _forget_corrupt(self, copier: Copier, message: messages.ChunkReady) -> None:
        """A chunk of an earlier daemon is mapped, and compared with its checksums: what has
        changed goes before anybody is served from it."""
        slots = np.frombuffer(message.corrupt, "<u4").astype(np.int64)
        lost = self._state.room.rows.verified(message.chunk, slots)
        if lost:
            self._state.counters["pages_corrupt"] += lost
            log.error(
                "copier %s: %d pages that the last daemon has left have changed since (--verify): "
                "they are dropped, and are computed again when they are needed. If this comes "
                "back, have the machine's memory tested",
                copier.device,
                lost,
            )

    def _bury(self, copier: Copier, now: float) -> None:
        """See whether a copier is dead by now, and take note of all that went with it."""
        status = copier.reap(now)
        if status is None:
            return
        ended = describe_exit(status)
        log.error(
            "copier %s died (%s); its copies have failed, cached pages stay, it is started again "
            "in %.1f s. If nobody has killed it, its own lines above or `dmesg` say why",
            copier.device,
            ended,
            copier.restart_at - now,
        )
        self._members.copier_lost(copier)
        jobs, copier.jobs = copier.jobs, {}
        for job in jobs.values():
            job.done(False, True)
        self._state.room.rows.lost(copier)
