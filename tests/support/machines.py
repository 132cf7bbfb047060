"""A room keeper and copiers without processes, and pages, for tests of who gets which memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from tierd.control.catalog import Catalog
from tierd.control.copiers import Copier, CopierState
from tierd.control.deadlines import Deadlines
from tierd.control.keys import MISSING, Keys
from tierd.control.pages import PagePool
from tierd.control.room import RoomKeeper
from tierd.control.stock import Stock
from tierd.memory.chunks import ChunkStore
from tierd.memory.source import AnonymousMemory
from tierd.wire.geometry import CHUNK_BYTES, HostLayout, host_layout
from tierd.wire.limits import KEY_BYTES
from tierd.wire.messages import AddChunk, DropChunk, Message

LARGE = host_layout([16 << 20])
"""Three slots a chunk: a pool is full soon."""
MISSING_ONE = np.array([MISSING])
CHUNK_FILE = "/memfd:tierd-chunk-"


@dataclass
class Told:
    """What a copier was told."""

    device: str
    message: Message


def chain_of(pool: PagePool, name: int, pages: int, now: int = 1) -> Keys:
    """A chain that is kept in a pool."""
    end = bytes(KEY_BYTES - 3)
    keys = Keys(b"".join(bytes([name]) + n.to_bytes(2, "little") + end for n in range(pages)))
    pool.commit(pool.reserve(keys, b"", np.full(pages, MISSING), now))
    return keys


class Machine:
    """A room keeper and its copiers, who answer when the test lets them."""

    def __init__(
        self,
        chunks: int,
        devices: int = 1,
        shares: dict[str, float] | None = None,
        ahead: int = 0,
        spare: int = 0,
    ) -> None:
        self.told: list[Told] = []
        self.copiers = [Copier(f"host:{n}", Deadlines()) for n in range(devices)]
        store = ChunkStore(chunks * CHUNK_BYTES, AnonymousMemory())
        names = [copier.device for copier in self.copiers]
        stock = Stock(
            store,
            self._tell,
            names,
            ahead_bytes=ahead * CHUNK_BYTES,
            spare_bytes=spare * CHUNK_BYTES,
        )
        self.room = RoomKeeper(stock, shares)
        for copier in self.copiers:
            copier.state = CopierState.READY
        self.catalogs: list[Catalog] = []
        self.tick = 0
        self.filled: dict[bytes, int] = {}

    def _tell(self, copier: Copier, message: Message, fd: int | None) -> None:
        assert copier.state is not CopierState.DEAD, "nobody hears this"
        if isinstance(message, AddChunk):
            assert fd is not None
            assert os.fstat(fd).st_size == message.size
        self.told.append(Told(copier.device, message))

    def pool(
        self, host: HostLayout = LARGE, *, private: bool = False, shards: int | None = None
    ) -> tuple[Catalog, PagePool]:
        """A namespace with one pool, a shard a copier or one for all of them."""
        number = len(self.catalogs)
        catalog = Catalog(bytes([number]) * 32, len(self.copiers), private)
        self.catalogs.append(catalog)
        self.room.rows.open_pool(catalog, "kv", 16, host, shards=shards)
        return catalog, catalog.pools["kv"]

    @property
    def sharers(self) -> list[tuple[int, Copier]]:
        return list(enumerate(self.copiers))

    def make_room(self, catalog: Catalog, missing: int = 1) -> bool | None:
        return self.room.make_room(catalog.pools["kv"], missing, self.sharers)

    def answer(self, device: str | None = None, error: str = "") -> None:
        """Let copiers do what they were told, and what they are told meanwhile; an error stands
        for those that pin."""
        while told := next((t for t in self.told if device in (None, t.device)), None):
            self.told.remove(told)
            self.told.insert(0, told)
            self.answer_first(error)

    def answer_first(self, error: str = "") -> None:
        """Let a copier do the first thing that was told; an error stands if it is to pin."""
        told = self.told.pop(0)
        copier = next(c for c in self.copiers if c.device == told.device)
        if isinstance(told.message, AddChunk):
            self.room.rows.ready(copier, told.message.chunk, error)
        elif isinstance(told.message, DropChunk):
            self.room.stock.dropped(copier, told.message.chunk)

    def take_told(self, kind: type[Message]) -> list[Told]:
        """What copiers were told of one kind; the test answers it itself."""
        found = [told for told in self.told if isinstance(told.message, kind)]
        self.told = [told for told in self.told if told not in found]
        return found

    def kill(self, copier: Copier) -> None:
        self.told = [t for t in self.told if t.device != copier.device]
        copier.state = CopierState.DEAD
        copier.chunks.clear()
        self.room.rows.lost(copier)

    def restart(self, copier: Copier) -> set[int]:
        """The copier is back and maps what its rank needs; returns what it lacks."""
        copier.state = CopierState.READY
        shard = self.copiers.index(copier)
        lacks: set[int] = set()
        for catalog in self.catalogs:
            lacks |= self.room.rows.share(catalog, shard, copier)
        return lacks

    def fill(self, catalog: Catalog, pages: int) -> None:
        pool = catalog.pools["kv"]
        first = self.filled.get(catalog.digest, 0)
        self.filled[catalog.digest] = first + pages
        for n in range(first, first + pages):
            name = catalog.digest[:1] + n.to_bytes(31, "little")
            self.tick += 1
            pool.commit(pool.reserve(Keys(name), b"", MISSING_ONE, self.tick))

    def grow(self, catalog: Catalog, chunks: int) -> None:
        """Give a pool so many chunks, and pages in every slot of them."""
        pool = catalog.pools["kv"]
        for _ in range(chunks):
            assert self.make_room(catalog) is None
            self.answer()
            self.fill(catalog, pool.free_slots)

    def told_to(self, kind: type[Message]) -> list[str]:
        return [told.device for told in self.told if isinstance(told.message, kind)]

    def close(self) -> None:
        self.room.close()


def make(machines: list[Machine], chunks: int, devices: int = 1) -> Machine:
    """One more machine, for the fixture of this name to close."""
    machines.append(Machine(chunks, devices))
    return machines[-1]
