"""The copier's loop: messages from control in, copies submitted, retirements reported.

One thread decides and copies; a few more pin chunks (see `pinner`), which takes tens of
milliseconds each.
It never waits for one rank: a job whose token slots are not there yet is looked at again on the
next turn, and at most two pieces of work a direction are on the wire.
"""

from __future__ import annotations

import enum
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tierd.channel import Channel, ChannelClosed, close_all
from tierd.copier.backend import Backend, BackendError, DeviceLostError, Marker
from tierd.copier.pace import Cap
from tierd.copier.pinner import Pinner
from tierd.copier.plan import Direction, PlanError
from tierd.copier.session import Job, Piece, Session, open_session
from tierd.copier.verify import Verifier
from tierd.memory.placement import PIN_THREADS
from tierd.wire import layout, messages
from tierd.wire.errors import TierdError
from tierd.wire.limits import READY_TIMEOUT_S
from tierd.wire.messages import BackupJob, RestoreJob, ToCopier

DRAIN_TIMEOUT_S = 10.0
"""Copies that have not retired by then never will: the process ends and takes them with it."""
IN_FLIGHT = 2
"""Pieces a direction on the wire: one is copied while the next one is prepared."""
PAUSE_S = 20e-6
"""Between two looks at markers and ready words. The kernel adds its timer slack of 50 us."""
_ERROR_CHARS = 4096
_UNWANTED = "the rank has moved its fence: nobody wants this any more"


class Pace(enum.Enum):
    """What a turn of the loop leaves to do: more at once, look again soon, nothing at all."""

    BUSY = enum.auto()
    WAITING = enum.auto()
    IDLE = enum.auto()


@dataclass
class _Lane:
    """One direction: what is on the wire, whose turn it is, and how fast it may go."""

    direction: Direction
    cap: Cap | None = None
    retired_s: float = 0.0
    """When a job's last copy retired last."""
    wire: deque[tuple[Marker, Job]] = field(default_factory=deque)
    turns: deque[int] = field(default_factory=deque)


class Worker:
    """Serves one device until control says so or goes away.

    Args:
        channel: The conversation with control.
        backend: The device.
        device: Its name, as control knows it.
        ready_timeout_s: How long a job waits for its ready words.
        max_bytes_per_s: What either direction may copy; None for all that it can.
        pin_threads: How many chunks are touched and pinned at a time.
        clock: Monotonic seconds.
        verifier: Computes the checksums of pages.
    """

    def __init__(
        self,
        channel: Channel[ToCopier],
        backend: Backend,
        device: str,
        *,
        ready_timeout_s: float = READY_TIMEOUT_S,
        max_bytes_per_s: float | None = None,
        pin_threads: int = PIN_THREADS,
        clock: Callable[[], float] = time.monotonic,
        verifier: Verifier | None = None,
    ) -> None:
        self._channel = channel
        self._backend = backend
        self._ready_timeout_s = ready_timeout_s
        self._clock = clock
        self._verifier = verifier or Verifier("off")
        self._pinner = Pinner(backend, self._verifier, self._say, pin_threads)
        self._checking: list[Job] = []
        self._sessions: dict[int, Session] = {}
        self._leaving: list[Session] = []
        self._lanes = {
            direction: _Lane(direction, Cap(max_bytes_per_s, clock()) if max_bytes_per_s else None)
            for direction in Direction
        }
        self._stopping = False
        self._say(messages.CopierReady(device=device, detail=backend.detail()))

    def run(self) -> None:
        """Work until control ends the conversation; then let what is on the wire retire and close
        every mapping.

        Raises:
            DeviceLostError: the device is unusable, or copies do not retire. The process must end
                at once: only its death stops the copies.
            ProtocolError: control said something that makes no sense.
        """
        poller = select.poll()
        poller.register(self._pinner, select.POLLIN)
        try:
            while not self._stopping:
                pace = self.turn()
                if pace is Pace.WAITING:
                    time.sleep(PAUSE_S)
                elif pace is Pace.IDLE:
                    out = select.POLLOUT if self._channel.wants_write else 0
                    poller.register(self._channel, select.POLLIN | out)
                    if any(fd == self._pinner.fileno() for fd, _ in poller.poll()):
                        self._pinner.awake()
        except ChannelClosed:
            pass
        self.stop()

    def turn(self) -> Pace:
        """Do what can be done now, without waiting for anything.

        Raises: ChannelClosed: control is gone. DeviceLostError, ProtocolError: as `run`.
        """
        received = self._channel.receive()
        self._channel.flush()
        for message, fds in received:
            self._handle(message, fds)
        moved = bool(received) | self._pinner.poll()
        restores, backups = self._lanes[Direction.RESTORE], self._lanes[Direction.BACKUP]
        for lane in (restores, backups):
            moved |= self._retire(lane)
        moved |= self._note_checked()
        self._let_go()
        while self._submit(restores):
            moved = True
        # One at a time: the next restore's turn comes before the next backup's.
        moved |= self._submit(backups)
        if moved:
            return Pace.BUSY
        waiting = any(s.unfinished for s in self._sessions.values())
        return Pace.WAITING if waiting else Pace.IDLE

    def stop(self) -> None:
        """Drop what has not been submitted, wait for what has, and close every mapping.

        Raises: DeviceLostError: copies did not retire in DRAIN_TIMEOUT_S.
        """
        self._stopping = True
        deadline = self._clock() + DRAIN_TIMEOUT_S
        for session in list(self._sessions.values()):
            self._detach(session, "the copier is shutting down")
        while True:
            for lane in self._lanes.values():
                self._retire(lane)
            self._note_checked()
            self._let_go()
            if not self._sessions:
                break
            if self._clock() > deadline:
                raise DeviceLostError("copies on the wire do not retire")
            time.sleep(PAUSE_S)
        self._pinner.close()
        self._verifier.close()
        self._backend.close()
        self._channel.drain(1.0)
        self._channel.close()

    # --- messages -----------------------------------------------------------------------------

    def _say(self, message: messages.FromCopier) -> None:
        # Control's end is noticed where the channel is read; what was to be said to it is moot.
        if not self._channel.closed:
            try:
                self._channel.send(message)
            except ChannelClosed:
                return

    def _handle(self, message: ToCopier, fds: list[int]) -> None:
        if isinstance(message, messages.AddChunk):
            self._pinner.add(message, fds)
            return
        try:
            if isinstance(message, BackupJob | RestoreJob):
                self._accept(message)
            elif isinstance(message, messages.Attach):
                self._attach(message, fds)
            elif isinstance(message, messages.Detach):
                session = self._sessions.get(message.session)
                if session is None:
                    self._say(messages.Detached(session=message.session))
                else:
                    self._detach(session, "the rank is gone")
            elif isinstance(message, messages.DropChunk):
                self._pinner.drop(message.chunk)
            elif isinstance(message, messages.Ping):
                self._say(messages.Pong())
            else:
                self._stopping = True
        finally:
            close_all(fds)

    def _attach(self, message: messages.Attach, fds: list[int]) -> None:
        error, paths = "", []
        try:
            if message.session in self._sessions:
                raise BackendError(f"session {message.session} is attached already")
            session = open_session(message, fds, self._backend)
        except DeviceLostError:
            raise
        except TierdError as failure:
            error = str(failure)
        else:
            self._sessions[session.number] = session
            for lane in self._lanes.values():
                lane.turns.append(session.number)
            paths = [plan.path_text for plan in session.plans]
        self._say(
            messages.Attached(session=message.session, paths=paths, error=error[:_ERROR_CHARS])
        )

    def _detach(self, session: Session, reason: str) -> None:
        if session.detaching:
            return
        session.detaching = True
        self._leaving.append(session)
        for queue in session.waiting.values():
            for job in queue:
                job.fail(reason)
                if job.over:
                    self._end(job)
            queue.clear()

    def _let_go(self) -> None:
        """Close the mappings of detached ranks whose last copy has retired."""
        for session in [s for s in self._leaving if not s.unfinished]:
            self._leaving.remove(session)
            del self._sessions[session.number]
            for lane in self._lanes.values():
                lane.turns.remove(session.number)
            session.close()
            self._say(messages.Detached(session=session.number))

    def _accept(self, message: BackupJob | RestoreJob) -> None:
        session = self._sessions.get(message.session)
        if session is None or session.detaching:
            error = f"session {message.session} is not attached"
        elif isinstance(message, RestoreJob) and message.entry >= layout.RESTORE_ENTRIES:
            error = f"`entry` {message.entry}; a segment has {layout.RESTORE_ENTRIES}"
        else:
            job = Job(message, session, deadline_s=self._clock() + self._ready_timeout_s)
            session.waiting[job.direction].append(job)
            session.unfinished += 1
            return
        self._say(messages.JobDone(job=message.job, ok=False, error=error))

    # --- copies -------------------------------------------------------------------------------

    def _submit(self, lane: _Lane) -> bool:
        """Submit one piece, end one job that cannot have any, or have the next one ready. False:
        nothing to do now."""
        if len(lane.wire) >= IN_FLIGHT:
            return self._prepare(lane)
        if lane.cap is not None and not lane.cap.allows(self._clock()):
            return False
        for _ in range(len(lane.turns)):
            session = self._sessions[lane.turns[0]]
            lane.turns.rotate(-1)
            queue = session.waiting[lane.direction]
            if queue and self._advance(lane, queue):
                return True
        return False

    def _prepare(self, lane: _Lane) -> bool:
        """Plan a job while the wire is busy, so that it need not stand still for that later. False:
        there is none that could begin."""
        for number in lane.turns:
            queue = self._sessions[number].waiting[lane.direction]
            if queue and not queue[0].started and not queue[0].error:
                self._start(lane, queue[0])
                if queue[0].started:
                    return True
        return False

    def _advance(self, lane: _Lane, queue: deque[Job]) -> bool:
        job = queue[0]
        if not job.started and not job.error:
            self._start(lane, job)
        if job.upcoming is not None:
            if job.wanted():
                self._submit_piece(lane, job, job.upcoming)
            else:
                job.fail(_UNWANTED)
        elif not job.started and not job.error:
            return False
        if job.upcoming is None:
            queue.popleft()
            if job.over:
                self._end(job)
        return True

    def _submit_piece(self, lane: _Lane, job: Job, piece: Piece) -> None:
        session, message = job.session, job.message
        try:
            self._backend.submit(lane.direction, piece.batch)
            if isinstance(message, RestoreJob):
                words = [session.segment.layer_offset(message.entry, n) for n in piece.layers]
                self._backend.write_words(session.attachment, words, message.generation)
        except BackendError as failure:
            job.fail(str(failure))
        if lane.cap is not None:
            lane.cap.take(piece.batch.nbytes)
        # After an error too: some of the piece may be on the wire.
        lane.wire.append((self._backend.record(lane.direction), job))
        job.outstanding += 1
        if not job.error:
            job.proceed()

    def _start(self, lane: _Lane, job: Job) -> None:
        """Let a job begin if its token slots are there, or fail it."""
        try:
            if not job.indices_ready():
                if self._clock() < job.deadline_s:
                    return
                raise PlanError(
                    f"the rank's ready words were not set within {self._ready_timeout_s:g} s"
                )
            if not job.wanted():
                raise PlanError(_UNWANTED)
            job.start(self._pinner.chunks, self._clock(), idle=not lane.wire)
        except PlanError as failure:
            job.fail(str(failure))
            return
        job.session.consume(job)
        if job.direction is Direction.RESTORE:
            job.checks = self._verifier.check(job.places)
        self._pinner.use(job.chunks)

    def _retire(self, lane: _Lane) -> bool:
        moved = False
        while lane.wire and self._backend.retired(lane.wire[0][0]):
            _, job = lane.wire.popleft()
            job.outstanding -= 1
            moved = True
            if job.over:
                self._end(job)
        return moved

    def _end(self, job: Job) -> None:
        """Nothing of the job is on the wire. It ends now, or when its checksums are there."""
        lane, now = self._lanes[job.direction], self._clock()
        job.seconds = now - max(job.started_s, lane.retired_s)
        lane.retired_s = now
        if job.direction is Direction.BACKUP and not job.error:
            job.checks = self._verifier.seal(job.places)
        self._checking.append(job)
        self._note_checked()

    def _note_checked(self) -> bool:
        """End the jobs whose checksums are there."""
        done = [job for job in self._checking if all(check.done() for check in job.checks)]
        for job in done:
            self._checking.remove(job)
            self._finish(job)
        return bool(done)

    def _finish(self, job: Job) -> None:
        """Judge a job, tell the rank and control."""
        session, message = job.session, job.message
        corrupt = [page for check in job.checks for page in check.result()]
        if corrupt:
            job.fail(
                f"{len(corrupt)} pages have changed in host memory since they were backed up "
                "(--verify): they are dropped, and what needs them is computed again. If this "
                "comes back, have the machine's memory tested"
            )
        if not job.error and not job.wanted():
            job.error = _UNWANTED
        ok = not job.error
        session.consume(job)
        if isinstance(message, RestoreJob):
            if not ok:
                session.segment.release(message.entry)
            session.segment.set_verdict(message.entry, message.generation, ok)
        self._say(
            messages.JobDone(
                job=message.job,
                ok=ok,
                error=job.error[:_ERROR_CHARS],
                corrupt=np.array(corrupt, "<u4").tobytes(),
                pages=job.pages if ok else 0,
                copied_bytes=job.nbytes if ok else 0,
                seconds=job.seconds if ok else 0.0,
            )
        )
        session.unfinished -= 1
        self._pinner.release(job.chunks)
