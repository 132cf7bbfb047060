"""Copier processes: started, watched, ended and started again.

Thin: it knows processes and conversations. Which chunks and jobs a copier has is kept here as plain
fields; what their loss means is decided in `tierd.control.copier_desk`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tierd.channel import Channel, ChannelClosed
from tierd.control.deadlines import Deadlines
from tierd.control.health import Pulse
from tierd.control.pages import PagePool
from tierd.eviction.policy import Slots
from tierd.memory.placement import PIN_THREADS
from tierd.wire import codec
from tierd.wire.messages import FromCopier, JobDone, Message, Ping, Shutdown

log = logging.getLogger("tierd.control")

RESTART_S = 0.2
"""Pause before a copier is started again; doubled at each failure in a row, up to MAX_RESTART_S."""
MAX_RESTART_S = 10.0
MOST_DOUBLINGS = 16
DEATH_S = 30.0
"""How long the end of the daemon waits for a killed copier."""


class CopierState(enum.Enum):
    """ENDING: it has been killed, or has closed its end; until its process is gone its copies may
    still be on the wire. That can take long where much memory is pinned, and nobody waits."""

    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"
    DEAD = "restarting"


@dataclass
class Job:
    """Copies that a copier has been told to make, until they have retired.

    `done(ok, lost)` is called once: `lost` says that the copier died with it. `restore` is the
    step's number if it is a restore, and `held` what each part of it loads. A copier that has not
    retired it by `kills_at` is killed.
    """

    number: int
    session: int
    kills_at: float
    done: Callable[[bool, bool], None]
    restore: int | None = None
    held: Sequence[tuple[PagePool, Slots]] = ()


@dataclass
class Moved:
    """What the copies of one direction have moved since the daemon started, and how long a copier
    was at it."""

    pages: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, done: JobDone) -> None:
        """Another job is over; one that has failed has moved nothing."""
        self.pages += done.pages
        self.nbytes += done.copied_bytes
        self.seconds += done.seconds


class Copier:
    """One device's copier, across restarts.

    Args:
        device: The GPU's UUID, or "host:<n>".
        deadlines: The daemon's.
        max_gbps: Cap of either direction in GB/s; None for none.
        pin_threads: How many chunks it touches and pins at a time.
        verify: Which pages get checksums (`tierd serve --verify`).
        hold_fd: A descriptor that it keeps open until it ends, or -1.
    """

    def __init__(
        self,
        device: str,
        deadlines: Deadlines,
        *,
        max_gbps: float | None = None,
        pin_threads: int = PIN_THREADS,
        verify: str = "off",
        hold_fd: int = -1,
    ) -> None:
        self.device = device
        self._pin_threads = pin_threads
        self._deadlines = deadlines
        self._max_gbps = max_gbps
        self._verify = verify
        self._hold_fd = hold_fd
        self.pulse = Pulse(deadlines.quiet_s)
        self.state = CopierState.DEAD
        self.restarts = 0
        self.restart_at = 0.0
        self.detail: dict[str, Any] = {}
        self.backups, self.restores = Moved(), Moved()
        self.jobs: dict[int, Job] = {}
        self.chunks: dict[int, bool] = {}
        """Chunks it was told of; True once they are mapped and pinned."""
        self.channel: Channel[FromCopier] | None = None
        self.pidfd = -1
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_by = 0.0
        self._failures = 0

    def start(self, now: float) -> None:
        """Start the process; `CopierReady` says when it can work. Where none can be made, it stays
        DEAD and is due again at `restart_at`."""
        try:
            self._launch()
        except OSError as error:
            self._fail(now)
            log.error(
                "copier %s cannot be started (%s), trying again in %.1f s: until then its engines "
                "go without a host tier; cached pages stay",
                self.device,
                error,
                self.restart_at - now,
            )
            return
        self.state = CopierState.STARTING
        self._ready_by = now + self._deadlines.start_s

    def _launch(self) -> None:
        """Raises: OSError: no process or no descriptor left, or no such interpreter any more."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            command = [
                sys.executable,
                "-m",
                "tierd.copier",
                "--device",
                self.device,
                "--channel-fd",
                str(theirs.fileno()),
                "--ready-timeout-s",
                str(self._deadlines.ready_s),
                "--pin-threads",
                str(self._pin_threads),
                "--verify",
                self._verify,
            ]
            if self._max_gbps is not None:
                command += ["--max-gbps", str(self._max_gbps)]
            inherited = [theirs.fileno()]
            if self._hold_fd >= 0:
                command += ["--hold-fd", str(self._hold_fd)]
                inherited.append(self._hold_fd)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
            undo.callback(process.wait)
            undo.callback(process.kill)
            self.pidfd = os.pidfd_open(process.pid)
            undo.pop_all()
        self._process, self.pid = process, process.pid
        self.channel = Channel(ours, codec.FROM_COPIER)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Tell the copier something. A dead one is noticed by its end of file, not here."""
        if self.channel is None:
            return
        try:
            self.channel.send(message, fds)
        except ChannelClosed:
            self.end()

    def overdue(self, now: float) -> str:
        """What it has not done in time, in words; empty: nothing."""
        if self.state is CopierState.STARTING:
            return "is not ready to work" if now >= self._ready_by else ""
        if any(job.kills_at <= now for job in self.jobs.values()):
            return "has not finished its copies"
        if self.pulse.silent_s >= self._deadlines.silent_s:
            return "has not answered"
        return ""

    def look(self, now: float) -> None:
        """See whether it still answers. Call every now and then."""
        if self.state is not CopierState.READY:
            return
        if self.pulse.look(now):
            self.send(Ping())
        if self.pulse.fell_quiet():
            log.warning(
                "copier %s (pid %d) does not answer, for %.0f s so far: until it does, lookups of "
                "its engines miss and their backups are shed. It is killed and started again at "
                "%.0f s, or when a copy is overdue; cached pages stay. If somebody has stopped it, "
                "`kill -CONT %d` lets it go on",
                self.device,
                self.pid,
                self.pulse.silent_s,
                self._deadlines.silent_s,
                self.pid,
            )

    @property
    def killed_at_s(self) -> float:
        """Silent for so long, it is killed."""
        return self._deadlines.silent_s

    def ready(self, detail: dict[str, Any]) -> None:
        """The process can work. `detail`: facts about its device, for `tierd status`."""
        self.state = CopierState.READY
        self.pulse = Pulse(self._deadlines.quiet_s)
        self.detail = detail
        self._failures = 0

    def is_loading(self, session: int, step: int) -> bool:
        """Has it been told of a session's restore, which is not over?"""
        return any(job.session == session and job.restore == step for job in self.jobs.values())

    def retire(self, message: JobDone) -> Job | None:
        """A job's copies are off the wire. None: it was not known, or ended already."""
        job = self.jobs.pop(message.job, None)
        if job is not None:
            (self.backups if job.restore is None else self.restores).add(message)
        return job

    def end(self) -> None:
        """End the process now, and hear nothing more of it. Does not wait: see `reap`."""
        if self._process is None:
            return
        self._process.kill()
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self.state = CopierState.ENDING

    def reap(self, now: float) -> int | None:
        """If the process is gone, none of its copies is on the wire any more.

        Returns its exit status; it is due to start again at `restart_at`. None: it still ends.
        """
        assert self._process is not None
        status = self._process.poll()
        if status is None:
            return None
        os.close(self.pidfd)
        self.pidfd, self.pid, self._process = -1, 0, None
        self.state = CopierState.DEAD
        self.chunks.clear()
        self.restarts += 1
        self._fail(now)
        return status

    def _fail(self, now: float) -> None:
        self.restart_at = now + min(RESTART_S * 2**self._failures, MAX_RESTART_S)
        # Not without end: a copier that cannot start for hours would make a number of it that no
        # float holds.
        self._failures = min(self._failures + 1, MOST_DOUBLINGS)

    def stop(self, timeout_s: float) -> None:
        """Ask the process to finish and exit; kill it when the time is up."""
        if self._process is None:
            return
        self.send(Shutdown())
        if self.channel is not None:
            self.channel.drain(timeout_s)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            log.warning(
                "copier %s (pid %d) did not finish within %.0f s; killing it, so that nothing is "
                "written late",
                self.device,
                self.pid,
                timeout_s,
            )
        self.end()
        try:
            self._process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            log.error(
                "copier %s (pid %d) was killed and does not die: its driver does not let go. Its "
                "memory stays in use until it does; `dmesg` may say why",
                self.device,
                self.pid,
            )
        self.reap(0.0)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
