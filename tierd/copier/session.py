"""An attached rank and its jobs: what a job needs before it may copy, and what it copies."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tierd.copier.backend import Attachment, Backend, BackendError, Chunk, SharedMemory
from tierd.copier.operations import I64, NO_OPS, U64, Records
from tierd.copier.plan import Batch, Direction, PlanError, PoolPlan, layer_groups
from tierd.copier.verify import Bad, Places
from tierd.wire import layout
from tierd.wire.geometry import HostLayout, check_pools, placed_layout
from tierd.wire.messages import Attach, BackupJob, CopyPart, HostPool, PoolSpec, RestoreJob

_NOTHING = Batch(boxes=NO_OPS, rows=NO_OPS)


@dataclass(frozen=True)
class Piece:
    """What is submitted at a time: copies, then the layers that are complete after them."""

    batch: Batch
    layers: range = range(0)


@dataclass(eq=False)
class Job:
    """A backup or a restore on its way.

    `upcoming` is the piece to submit next; `outstanding` counts those on the wire. The job is
    over when there is neither, and `error` then says whether it went well.
    """

    message: BackupJob | RestoreJob
    session: Session
    deadline_s: float
    started: bool = False
    upcoming: Piece | None = None
    outstanding: int = 0
    error: str = ""
    chunks: frozenset[int] = frozenset()
    places: list[Places] = field(default_factory=list, repr=False)
    """Where its pages lie in host memory."""
    checks: list[Future[Bad]] = field(default_factory=list, repr=False)
    """Checksums that are being computed; the job ends when they are done."""
    started_s: float = 0.0
    seconds: float = 0.0
    """From its start to its last copy, less what an earlier job of its direction took of that."""
    pages: int = 0
    nbytes: int = 0
    _pieces: Iterator[Piece] = field(default=iter(()), repr=False)

    @property
    def direction(self) -> Direction:
        """Which way its pages go."""
        restore = isinstance(self.message, RestoreJob)
        return Direction.RESTORE if restore else Direction.BACKUP

    @property
    def over(self) -> bool:
        """Is nothing of it on the wire, or to come?"""
        begun = self.started or bool(self.error)
        return begun and self.upcoming is None and not self.outstanding

    def fail(self, error: str) -> None:
        """Copy nothing more. What is on the wire still has to retire."""
        self.error = self.error or error
        self.upcoming = None

    def proceed(self) -> None:
        """Prepare the piece after the one that was submitted."""
        self.upcoming = next(self._pieces, None)

    def indices_ready(self) -> bool:
        """Whether the rank's streams have written the token slots and the KV."""
        message = self.message
        tickets = [message.ticket] if isinstance(message, RestoreJob) else message.tickets
        ready = self.session.segment.ready
        return all(ready[t % layout.TICKETS].tolist() == [t, t] for t in tickets)

    def wanted(self) -> bool:
        """Whether the rank's fence still stands where it stood when it asked."""
        return int(self.session.segment.fence[0]) == self.message.fence

    def start(self, chunks: Mapping[int, Chunk], now_s: float, *, idle: bool) -> None:
        """Read the ring, check every page and slot, and prepare the first piece.

        Args: `idle`: the wire stands still meanwhile, so that the first pieces are short.

        Raises: PlanError: the job names a pool, a page, a chunk or a slot that is not there.
        """
        self.started_s = now_s
        session = self.session
        parts: dict[int, list[tuple[int, CopyPart]]] = {}
        for number, part in enumerate(self.message.parts):
            if part.pool >= len(session.plans):
                raise PlanError(f"pool {part.pool} of a rank with {len(session.plans)} pools")
            parts.setdefault(part.pool, []).append((number, part))
        segment = session.segment
        ring = segment.restore_ring if self.direction else segment.backup_ring
        used: set[int] = set()
        # The parts of one pool together: a step's many requests are few and large pieces.
        work: list[tuple[PoolPlan, Records]] = []
        for pool, mine in parts.items():
            plan = session.plans[pool]
            firsts, numbers, slots = _columns([part for _, part in mine])
            ids, addresses = _chunk_addresses(numbers, plan.host, chunks)
            work.append((plan, plan.runs(plan.pages(ring, firsts), addresses, slots)))
            at = 0
            for number, part in mine:
                here = slice(at, at := at + len(part.slots) // 4)
                self.places.append(Places(number, plan.host, addresses[here], slots[here]))
            used |= ids
            self.pages += len(slots)
            self.nbytes += len(slots) * plan.host.slot_bytes
        self.chunks = frozenset(used)
        if self.direction is Direction.BACKUP:
            self._pieces = _backup_pieces(work, idle)
        else:
            self._pieces = _restore_pieces(work, session.layers, self.nbytes, idle)
        self.started = True
        self.proceed()


@dataclass(eq=False)
class Session:
    """A rank: its mapped segment and pools, and its jobs in the order they came."""

    number: int
    memory: SharedMemory
    segment: layout.Segment
    attachment: Attachment
    plans: list[PoolPlan]
    layers: int
    waiting: dict[Direction, deque[Job]] = field(
        default_factory=lambda: {direction: deque() for direction in Direction}
    )
    unfinished: int = 0
    """Jobs that control has not been told the end of."""
    detaching: bool = False

    def consume(self, job: Job) -> None:
        """Give the rank its ring back up to where the job's token slots end."""
        consumed = self.segment.consumed
        if job.message.consumed > int(consumed[job.direction]):
            consumed[job.direction] = job.message.consumed

    def close(self) -> None:
        """Unmap everything. No job may be left."""
        self.attachment.close()
        del self.segment
        self.memory.close()


def open_session(message: Attach, fds: list[int], backend: Backend) -> Session:
    """Map a rank's segment and pools.

    Args: `fds`: the segment's, then those of the allocations without a handle; they stay the
        caller's.

    Raises: BackendError, ProtocolError: what cannot be mapped, or makes no sense; nothing of it
        stays mapped.
    """
    if not fds:
        raise BackendError("no descriptor of the rank's segment came with it")
    check_pools(message.allocations, message.pools)
    if len(message.host_pools) != len(message.pools):
        raise BackendError(f"{len(message.pools)} pools, {len(message.host_pools)} host layouts")
    hosts = [_host(pool, p) for pool, p in zip(message.pools, message.host_pools, strict=True)]
    with ExitStack() as stack:
        memory = SharedMemory(fds[0], os.fstat(fds[0]).st_size)
        stack.callback(memory.close)
        segment = layout.Segment(memory.memory, layout.read_segment_spec(memory.memory))
        layers = 1 + max(buffer.layer for pool in message.pools for buffer in pool.buffers)
        if layers > segment.spec.max_layers:
            raise BackendError(
                f"{layers} layers in `pools`; the segment has words for {segment.spec.max_layers}"
            )
        attachment = backend.attach(message.allocations, fds[1:], memory)
        stack.pop_all()
    plans = [
        PoolPlan(pool, attachment.addresses, host)
        for pool, host in zip(message.pools, hosts, strict=True)
    ]
    for plan in plans:
        plan.prepare(layers)
    return Session(message.session, memory, segment, attachment, plans, layers)


def _host(pool: PoolSpec, placed: HostPool) -> HostLayout:
    """The layout that control chose for a pool."""
    if placed.chunk_slots % placed.block_slots:
        raise BackendError(
            f"pool {pool.name!r}: `chunk_slots` {placed.chunk_slots} is no multiple of "
            f"`block_slots` {placed.block_slots}"
        )
    return placed_layout([buffer.row_bytes for buffer in pool.buffers], placed)


def _columns(parts: Sequence[CopyPart]) -> tuple[I64, U64, U64]:
    """Of all pages of some parts: where each begins in the ring, its chunk, its slot there. Shapes:
    (pages,)."""
    firsts = np.frombuffer(b"".join([part.ring for part in parts]), "<i8")
    chunks = np.frombuffer(b"".join([part.chunks for part in parts]), "<u8")
    slots = np.frombuffer(b"".join([part.slots for part in parts]), "<u4")
    return firsts, chunks, slots.astype(np.uint64)


def _chunk_addresses(
    numbers: U64, host: HostLayout, chunks: Mapping[int, Chunk]
) -> tuple[set[int], U64]:
    """The chunks that a job names for its pages, and the address of each page's."""
    if not len(numbers):
        return set(), numbers
    # Pages of a chain mostly lie in one chunk after the other.
    lasts = (numbers[1:] != numbers[:-1]).nonzero()[0]
    named = [*numbers[lasts].tolist(), int(numbers[-1])]
    needed = host.data_offset + host.chunk_slots * host.slot_bytes
    addresses: dict[int, int] = {}
    for number in set(named):
        chunk = chunks.get(number)
        if chunk is None:
            raise PlanError(f"chunk {number} is not mapped here")
        if chunk.size < needed:
            raise PlanError(f"chunk {number} has {chunk.size} bytes; its pool needs {needed}")
        addresses[number] = chunk.address
    each = np.array([addresses[number] for number in named], np.uint64)
    edges = [-1, *lasts.tolist(), len(numbers) - 1]
    return set(addresses), each.repeat([last - before for before, last in pairwise(edges)])


def _backup_pieces(work: Sequence[tuple[PoolPlan, Records]], idle: bool) -> Iterator[Piece]:
    begins = idle
    for plan, runs in work:
        group = plan.group(0, plan.layers)
        for some in plan.cut(group, runs, begins=begins):
            yield Piece(plan.batch(group, some, Direction.BACKUP))
        begins = False


def _restore_pieces(
    work: Sequence[tuple[PoolPlan, Records]], layers: int, nbytes: int, idle: bool
) -> Iterator[Piece]:
    """Layer group by layer group; the last piece of a group completes its layers."""
    for first, end in layer_groups(work, layers, nbytes):
        parts = [
            (plan, group, some)
            for plan, runs in work
            for group in [plan.group(first, end)]
            for some in plan.cut(group, runs, begins=idle and not first)
        ]
        for left, (plan, group, some) in enumerate(parts, 1 - len(parts)):
            batch = plan.batch(group, some, Direction.RESTORE)
            yield Piece(batch, range(first, end) if not left else range(0))
        if not parts:
            yield Piece(_NOTHING, range(first, end))
