"""Who is connected: sessions (one a rank), and the groups they form (one an engine)."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierd.channel import Channel, close_all
from tierd.control.backups import Backup, Backups, Piece, Placement
from tierd.control.catalog import Catalog
from tierd.control.copiers import Copier
from tierd.control.leases import Leases
from tierd.control.pages import PagePool
from tierd.control.ring import RingLedger
from tierd.control.sequencer import Offer, Sequencer
from tierd.eviction.policy import Slots
from tierd.wire.errors import ProtocolError
from tierd.wire.geometry import geometry_of, namespace_digest
from tierd.wire.layout import Segment, read_segment_spec
from tierd.wire.messages import Flush, FromLifeline, PoolSpec, Register, Supply

INBOX_BYTES = 64 << 20
"""Two million pages: more than a minute's work."""
ROW_BYTES = 256
"""Roughly what a backup takes beside its keys, and as much again for each of its parts."""


@dataclass
class Inbound:
    """A message whose backups are still to be noted, from backup `row` and part `part` on."""

    message: Flush | Supply
    row: int = 0
    part: int = 0

    @property
    def unseen(self) -> int:
        """Backups of the message that are still to be noted."""
        return len(self.message.seqs) - self.row if isinstance(self.message, Flush) else 1

    @property
    def nbytes(self) -> int:
        """Roughly what it takes up."""
        message = self.message
        if isinstance(message, Flush):
            rows = len(message.seqs) + len(message.pools)
            keys = len(message.keys) + len(message.digits)
        else:
            rows, keys = len(message.parts), len(message.keys)
        return keys + ROW_BYTES * (1 + rows)


class Inbox:
    """What one rank has reported and nobody has looked at, in the order of its ring."""

    def __init__(self) -> None:
        self._messages: deque[Inbound] = deque()
        self._nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._messages)

    @property
    def first(self) -> Inbound:
        """The message that is looked at next; there must be one."""
        return self._messages[0]

    @property
    def unseen(self) -> int:
        """Backups in it."""
        return sum(inbound.unseen for inbound in self._messages)

    def add(self, message: Flush | Supply) -> bool:
        """False: it is full; the rank has sent more than anybody has had time for."""
        if self._nbytes >= INBOX_BYTES:
            return False
        self._messages.append(Inbound(message))
        self._nbytes += self._messages[-1].nbytes
        return True

    def pop(self) -> None:
        """The first one has been looked at."""
        self._nbytes -= self._messages.popleft().nbytes


@dataclass(eq=False)
class Session:
    """One rank's connection.

    `fds`: what it exported, as received: the segment, its pidfd, its allocations. They are kept
    so that a new copier can map them again.
    """

    number: int
    channel: Channel[FromLifeline]
    info: Register
    fds: list[int]
    memory: mmap.mmap = field(repr=False)
    segment: Segment = field(repr=False)
    copier: Copier
    routing_id: bytes
    since: float
    epoch: str
    group: Group = field(repr=False)
    attached: bool = False
    lacks: set[int] = field(default_factory=set)
    """Chunks with pages in them that its copier has still to pin."""
    welcomed: bool = False
    paths: list[str] = field(default_factory=list)
    ring: RingLedger = field(default_factory=RingLedger)
    """Its backup ring."""
    inbox: Inbox = field(default_factory=Inbox)
    restore_ring_end: int = 0
    bad_messages: int = 0
    """How many of its messages have made no sense."""

    def pool_index(self, name: str) -> int:
        """The index of a registered pool, by its name."""
        return next(i for i, pool in enumerate(self.info.pools) if pool.name == name)

    def pool_name(self, index: int) -> str:
        """Raises: ProtocolError: the rank registered no such pool."""
        if index >= len(self.info.pools):
            raise ProtocolError(
                f"`pool` {index}; rank {self.info.rank} registered {len(self.info.pools)}"
            )
        return self.info.pools[index].name

    def fail_restore(self, entry: int, generation: int) -> None:
        """Let the streams that wait for a restore go, and report it as failed. Only for a
        restore of which nothing is on the wire any more."""
        # A rank that has seen its copier die by itself may be using the entry again.
        if int(self.segment.awaited[entry]) == generation:
            self.segment.release(entry)
            self.segment.set_verdict(entry, generation, False)

    def close(self) -> None:
        """End the lifeline and close what the rank exported. Idempotent."""
        self.channel.close()
        close_all(self.fds)
        self.fds = []


def map_segment(fd: int) -> tuple[mmap.mmap, Segment]:
    """Map the segment that a rank sent.

    Raises: ProtocolError: it is not one, or its size could change under us.
    """
    import fcntl

    try:
        size = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        memory = mmap.mmap(fd, size)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"the segment cannot be mapped: {error}") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the segment's size is not sealed (F_SEAL_SHRINK)")
    return memory, Segment(memory, read_segment_spec(memory))


@dataclass
class Heal:
    """A backup whose ack waits for the pages before it. `offers`: what ranks say of those."""

    backup: Backup
    since: float
    offers: dict[int, Offer] = field(default_factory=dict)


@dataclass
class Placing:
    """A backup, or what comes before one, that is getting its slots.

    `ring_name`: of its part of every rank's ring. `lacks_since`: since when there is no room.
    """

    placement: Placement
    catalog: Catalog
    offers: dict[int, Offer]
    ring_name: Hashable
    lacks_since: float | None = None


class Stripe(NamedTuple):
    """What one rank copies of a piece: where each page begins in the ring, and slots."""

    pool: PagePool
    ring: npt.NDArray[np.uint64]
    slots: Slots


@dataclass
class Batch:
    """What one rank's copier will be told in one job.

    `parts`: by the rank's pool index.
    """

    session: Session
    fence: int
    parts: dict[int, list[Stripe]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    tickets: dict[int, None] = field(default_factory=dict)
    consumed: int = 0
    pages: int = 0
    nbytes: int = 0


@dataclass(eq=False)
class Group:
    """The ranks of one engine, who must always get the same answers.

    `sequencer` exists while all ranks are here; without one, every backup is shed at once.
    """

    instance: str
    world_size: int
    namespace: dict[str, str]
    pools: list[PoolSpec]
    leases: Leases
    sessions: dict[int, Session] = field(default_factory=dict)
    sequencer: Sequencer | None = None
    backups: Backups | None = None
    placing: Placing | None = None
    acks: list[tuple[int, bool]] = field(default_factory=list)
    catalogs: dict[str, Catalog] = field(default_factory=dict)
    heals: dict[int, Heal] = field(default_factory=dict)
    """By sequence number, backups whose prefix the tier has lost."""

    @cached_property
    def page_bytes(self) -> int:
        """What a rank's page takes in all its pools."""
        return sum(buffer.row_bytes for pool in self.pools for buffer in pool.buffers)

    @property
    def complete(self) -> bool:
        """Is every rank registered, and has been told so?"""
        return len(self.sessions) == self.world_size and all(
            session.welcomed for session in self.sessions.values()
        )

    @property
    def serving(self) -> bool:
        """Complete, and every rank's copier can reach every page right now."""
        return self.complete and all(
            session.attached and not session.lacks and not session.copier.pulse.quiet
            for session in self.sessions.values()
        )

    @property
    def undecided(self) -> int:
        """Backups that have arrived and nobody has decided; those of a step count once a rank
        while nobody has looked at them."""
        unseen = sum(session.inbox.unseen for session in self.sessions.values())
        return unseen + (self.sequencer.waiting if self.sequencer else 0)

    @property
    def supplies(self) -> bool:
        """Can all ranks say what comes before a backup?"""
        return all(session.info.supplies for session in self.sessions.values())

    def settle_ring(self, name: Hashable) -> None:
        """A part of every rank's backup ring will not be read by later jobs."""
        for session in self.sessions.values():
            session.ring.settle(name)

    def give_up_placing(self) -> None:
        """The backup that is getting slots gets no more, and is not kept."""
        if self.placing is not None:
            backup = self.placing.placement.backup
            backup.owner.give_up(backup)
            self.settle_ring(self.placing.ring_name)
            self.placing = None

    def digest(self, epoch: str) -> bytes:
        """The name of this engine's namespace in an epoch (`geometry.namespace_digest`)."""
        return namespace_digest(self.namespace, self.world_size, self.pools, epoch)

    def check_epoch(self, epoch: str) -> None:
        """Raises: ProtocolError: an epoch that another engine could have too."""
        if epoch and not epoch.startswith(f"{self.instance}:"):
            raise ProtocolError(
                f"`epoch` {epoch!r}; it must be empty or begin with the instance and a colon"
            )

    def check_member(self, info: Register) -> None:
        """Raises: ProtocolError: the rank does not fit to those that are here."""
        for field_name in ("world_size", "namespace"):
            mine, theirs = getattr(self, field_name), getattr(info, field_name)
            if mine != theirs:
                raise ProtocolError(
                    f"rank {info.rank} of instance {self.instance} has `{field_name}` {theirs}; "
                    f"the ranks before it have {mine}"
                )
        mine_geometry, theirs_geometry = geometry_of(self.pools), geometry_of(info.pools)
        for name in mine_geometry.keys() | theirs_geometry.keys():
            if mine_geometry.get(name) != theirs_geometry.get(name):
                raise ProtocolError(
                    f"rank {info.rank} of instance {self.instance}: the geometry of pool "
                    f"{name!r} in `pools` differs from the ranks' before it: "
                    f"{_short(theirs_geometry.get(name))} and {_short(mine_geometry.get(name))}"
                )
        if info.rank in self.sessions:
            raise ProtocolError(
                f"rank {info.rank} of instance {self.instance} is registered already"
            )


def _short(geometry: tuple[int, int, Sequence[tuple[int, int]], bool] | None) -> str:
    if geometry is None:
        return "no such pool"
    tokens, window, rows, replicated = geometry
    sizes = sorted({row for row, _ in rows})
    held = "one copy for all ranks" if replicated else "a shard a rank"
    return f"{tokens} tokens a page, window {window}, {len(rows)} rows of {sizes} bytes, {held}"
