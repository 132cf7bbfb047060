"""An attached rank and its jobs: what a job needs before it may copy, and what it copies."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from tierd.copier.backend import Attachment, Backend, BackendError, Chunk, SharedMemory
from tierd.copier.operations import I64, NO_OPS, U64, Records
from tierd.copier.plan import Batch, Direction, PlanError, PoolPlan, layer_groups, whole_pages
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
        return all((ready[t % layout.TICKETS] == t).all() for t in tickets)

    def wanted(self) -> bool:
        """Whether the rank's fence still stands where it stood when it asked."""
        return int(self.session.segment.fence[0]) == self.message.fence

    def start(self, chunks: Mapping[int, Chunk], now_s: float) -> None:
        """Read the ring, check every page and slot, and prepare the first piece.

        Raises: PlanError: the job names a pool, a page, a chunk or a slot that is not there.
        """
        self.started_s = now_s
        session = self.session
        parts: dict[int, list[tuple[I64, U64, U64]]] = {}
        used: set[int] = set()
        for number, part in enumerate(self.message.parts):
            if part.pool >= len(session.plans):
                raise PlanError(f"pool {part.pool} of a rank with {len(session.plans)} pools")
            plan = session.plans[part.pool]
            ids, addresses = _chunk_addresses(part, plan.host, chunks)
            pages = session.ring_pages(self.direction, part)
            slots = np.frombuffer(part.slots, "<u4").astype(np.uint64)
            self.places.append(Places(number, plan.host, addresses, slots))
            parts.setdefault(part.pool, []).append((pages, addresses, slots))
            used |= ids
            self.pages += len(pages)
            self.nbytes += len(pages) * plan.host.slot_bytes
        # The parts of one pool together: a step's many requests are few and large pieces.
        work: list[tuple[PoolPlan, Records]] = []
        for pool, columns in parts.items():
            pages, addresses, slots = map(np.concatenate, zip(*columns, strict=True))
            plan = session.plans[pool]
            work.append((plan, plan.runs(pages, addresses, slots)))
        self.chunks = frozenset(used)
        if self.direction is Direction.BACKUP:
            self._pieces = _backup_pieces(work)
        else:
            self._pieces = _restore_pieces(work, session.layers)
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

    def ring_pages(self, direction: Direction, part: CopyPart) -> I64:
        """A part's page numbers, of a copy of the token slots: what is checked must be what is
        used. Shape: (pages,).

        Raises: PlanError: first and last token slots that are not those of one page.
        """
        ring = self.segment.restore_ring if direction else self.segment.backup_ring
        size, first = np.uint64(len(ring)), np.frombuffer(part.ring, "<u8")
        tokens = self.plans[part.pool].pool.page_tokens
        slots: I64 = ring[first % size]
        if tokens == 1:
            return slots
        return whole_pages(slots, ring[(first + np.uint64(tokens - 1)) % size], tokens)

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
    return Session(message.session, memory, segment, attachment, plans, layers)


def _host(pool: PoolSpec, placed: HostPool) -> HostLayout:
    """The layout that control chose for a pool."""
    if placed.chunk_slots % placed.block_slots:
        raise BackendError(
            f"pool {pool.name!r}: `chunk_slots` {placed.chunk_slots} is no multiple of "
            f"`block_slots` {placed.block_slots}"
        )
    return placed_layout([buffer.row_bytes for buffer in pool.buffers], placed)


def _chunk_addresses(
    part: CopyPart, host: HostLayout, chunks: Mapping[int, Chunk]
) -> tuple[set[int], U64]:
    """The chunks that a part names, and the address of each page's."""
    numbers = np.frombuffer(part.chunks, "<u8")
    if not len(numbers):
        return set(), np.zeros(0, np.uint64)
    # Pages of a chain mostly lie in one chunk after the other.
    firsts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    edges = np.concatenate(([0], firsts, [len(numbers)]))
    named = numbers[edges[:-1]].tolist()
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
    return set(addresses), np.repeat(each, edges[1:] - edges[:-1])


def _backup_pieces(work: Sequence[tuple[PoolPlan, Records]]) -> Iterator[Piece]:
    begins = True
    for plan, runs in work:
        group = plan.group(0, plan.layers)
        for some in plan.cut(group, runs, begins=begins):
            yield Piece(plan.batch(group, some, Direction.BACKUP))
        begins = False


def _restore_pieces(work: Sequence[tuple[PoolPlan, Records]], layers: int) -> Iterator[Piece]:
    """Layer group by layer group; the last piece of a group completes its layers."""
    for first, end in layer_groups(work, layers):
        parts = [
            (plan, group, some)
            for plan, runs in work
            for group in [plan.group(first, end)]
            for some in plan.cut(group, runs, begins=not first)
        ]
        for left, (plan, group, some) in enumerate(parts, 1 - len(parts)):
            batch = plan.batch(group, some, Direction.RESTORE)
            yield Piece(batch, range(first, end) if not left else range(0))
        if not parts:
            yield Piece(_NOTHING, range(first, end))
