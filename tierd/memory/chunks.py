"""Host memory in chunks: shared memory that control owns and copiers map and pin.

A chunk belongs to one shard of one pool, or to nobody yet. Its first pages are headers, which
control maps; the blocks after them are only ever touched by copiers.
"""

from __future__ import annotations

import heapq
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierd.eviction.columns import column, grown
from tierd.eviction.policy import Slots
from tierd.memory.source import ChunkFile, ChunkSource
from tierd.wire import layout
from tierd.wire.geometry import CHUNK_BYTES, HostLayout

_NONE = 2**64 - 1
"""The number of no chunk: who asks a copier for it is told that it is not there."""


@dataclass(eq=False)
class Chunk:
    """A piece of host memory.

    `number`: unique in this daemon's life. `home`: the device whose copier touches it first, so
    that it lies near that one. `headers`: of its slots, shape (slots,), once it is laid out.
    `unverified`: how its slots lie, if an earlier daemon has left it and nobody has compared its
    pages with their checksums yet. `joined_bytes`: how much of it, though made in ordinary pages,
    the kernel has joined to huge ones.
    """

    number: int
    size: int
    page_bytes: int
    home: str
    fd: int
    memory: mmap.mmap = field(repr=False)
    headers: npt.NDArray[np.void] = field(
        default_factory=lambda: np.empty(0, layout.SLOT_HEADER), repr=False
    )
    unverified: HostLayout | None = None
    joined_bytes: int = 0

    def lay_out(
        self,
        host: HostLayout,
        *,
        shard: int,
        shards: int,
        ordinal: int,
        namespace: bytes,
        pool: str,
    ) -> None:
        """Write the headers of a shard's chunk; every slot is FREE. Whatever was in it is gone.

        Touches memory: only once a copier has, which knows better where it should lie.
        """
        self.memory[: host.data_offset] = bytes(host.data_offset)
        header = layout.chunk_header(self.memory)
        header["version"] = layout.CHUNK_VERSION
        header["shard"] = shard
        header["world_size"] = shards
        header["slots"] = host.chunk_slots
        header["ordinal"] = ordinal
        header["block_slots"] = host.block_slots
        header["slot_bytes"] = host.slot_bytes
        header["data_offset"] = host.data_offset
        header["namespace"] = namespace
        header["pool"] = pool.encode()
        header["magic"] = layout.CHUNK_MAGIC
        self.headers = layout.slot_headers(self.memory, host.chunk_slots)

    def take_over(self, host: HostLayout, ordinal: int) -> None:
        """It is as another daemon has laid it out; its place in the pool may be another one."""
        layout.chunk_header(self.memory)["ordinal"] = ordinal
        self.headers = layout.slot_headers(self.memory, host.chunk_slots)
        self.unverified = host

    def wipe(self) -> None:
        """It belongs to nobody again."""
        if len(self.headers):
            layout.chunk_header(self.memory)["magic"] = 0
            self.unverified = None
            self.headers = np.empty(0, layout.SLOT_HEADER)

    def close(self) -> None:
        """Let go of it. The memory is free once the copiers have unmapped it too."""
        self.headers = np.empty(0, layout.SLOT_HEADER)
        self.memory.close()
        os.close(self.fd)


class ChunkRows:
    """The chunks of one pool: row i holds slots i * chunk_slots and on, one chunk a shard.

    Writes the slot headers of all shards (see `tierd.control.pages.SlotRecords`).
    """

    def __init__(self, host: HostLayout) -> None:
        self._host = host
        self.rows: dict[int, list[Chunk]] = {}
        # The number of each row's chunk, by shard. Shape of each: (rows + 1,). The last is none: a
        # slot that is not there (-1) gets it.
        self._numbers: list[npt.NDArray[np.uint64]] = []
        # Rows below the highest that are not taken, a heap.
        self._gaps: list[int] = []

    @property
    def next_ordinal(self) -> int:
        """The lowest row that is not taken."""
        return self._gaps[0] if self._gaps else len(self.rows)

    def add(self, chunks: list[Chunk]) -> int:
        """Take in the next row, a chunk a shard; returns its ordinal."""
        ordinal = self.next_ordinal
        if self._gaps:
            heapq.heappop(self._gaps)
        self.rows[ordinal] = chunks
        self._numbers = self._numbers or [column(np.uint64) for _ in chunks]
        for shard, chunk in enumerate(chunks):
            numbers = grown(self._numbers[shard], ordinal + 2, _NONE)
            numbers[ordinal] = chunk.number
            self._numbers[shard] = numbers
        return ordinal

    def remove(self, ordinal: int) -> list[Chunk]:
        """Take a row out; its slots may not be used any more."""
        heapq.heappush(self._gaps, ordinal)
        for numbers in self._numbers:
            numbers[ordinal] = _NONE
        return self.rows.pop(ordinal)

    def locate(
        self, slots: Slots, shard: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Where slots lie: chunk numbers, and slots within those chunks. Shapes: (len(slots),)."""
        ordinals, within = np.divmod(slots, self._host.chunk_slots)
        return self._numbers[shard][ordinals], within.astype(np.uint32)

    def writing(
        self, slots: Slots, keys: bytes, parents: bytes, flags: npt.NDArray[np.uint32]
    ) -> None:
        names, before = np.frombuffer(keys, "V32"), np.frombuffer(parents, "V32")
        for ordinal, here, where in self._by_chunk(slots):
            for chunk in self.rows[ordinal]:
                headers = chunk.headers
                headers["state"][where] = layout.WRITING
                headers["generation"][where] += np.uint32(1)
                headers["key"][where] = names[here]
                headers["parent"][where] = before[here]
                headers["flags"][where] = flags[here]
                headers["checksum"][where] = 0

    def committed(self, slots: Slots) -> None:
        self._set_state(slots, layout.COMMITTED)

    def freed(self, slots: Slots) -> None:
        self._set_state(slots, layout.FREE)

    def _set_state(self, slots: Slots, state: int) -> None:
        for ordinal, _, where in self._by_chunk(slots):
            for chunk in self.rows[ordinal]:
                chunk.headers["state"][where] = state

    def _by_chunk(self, slots: Slots) -> Iterator[tuple[int, slice, Slots | slice]]:
        """Ascending slots chunk by chunk: its row, which of them it has, and where in it. A run
        of slots is a slice, which costs a fraction."""
        size = self._host.chunk_slots
        numbers, at = slots.tolist(), 0
        while at < len(numbers):
            first = numbers[at]
            ordinal = first // size
            end = bisect_left(numbers, (ordinal + 1) * size, at)
            here = slice(at, end)
            start, run = first - ordinal * size, numbers[end - 1] - first == end - 1 - at
            yield ordinal, here, slice(start, start + end - at) if run else slots[here] % size
            at = end


class ChunkStore:
    """Creates chunks within one budget, and counts them.

    Args:
        budget_bytes: All chunks together never exceed it.
        source: Makes their files.
        chunk_bytes: The usual size. A pool whose pages need more has chunks of a multiple.
    """

    def __init__(
        self, budget_bytes: int, source: ChunkSource, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.budget_bytes = budget_bytes
        self.chunk_bytes = chunk_bytes
        self.created_bytes = 0
        self.claimed_bytes = 0
        """Of the created ones, those that pools have."""
        self.bytes_by_page: dict[int, int] = {}
        """What has been created, by the size of the pages it was asked for in."""
        self.joined_bytes = 0
        """Of what was asked for in ordinary pages, what the kernel has joined to huge ones, as far
        as copiers have seen when they pinned it."""
        self._source = source
        self._chunks: dict[int, Chunk] = {}
        self._number = 0

    def create(self, size: int, home: str) -> Chunk | None:
        """A new chunk, near a device; None: the budget does not allow it.

        Raises: OSError: no memory or no descriptor left.
        """
        if self.created_bytes + size > self.budget_bytes:
            return None
        self._number += 1
        return self._take_in(self._source.create(self._number, size), size, home)

    def adopt(self, open_file: Callable[[int], ChunkFile], size: int, home: str) -> Chunk:
        """A chunk that is there already, within the budget.

        Args: `open_file`: from the chunk's number to its file.
        """
        self._number += 1
        return self._take_in(open_file(self._number), size, home)

    def note_joined(self, number: int, nbytes: int) -> None:
        """A copier has found so much of a chunk in huge pages."""
        chunk = self._chunks.get(number)
        if chunk is not None and chunk.page_bytes == mmap.PAGESIZE:
            self.joined_bytes += nbytes - chunk.joined_bytes
            chunk.joined_bytes = nbytes

    def discard(self, chunk: Chunk) -> None:
        """Give a chunk's memory back for good. No copier may map it any more."""
        self._count(chunk.page_bytes, -chunk.size)
        self.joined_bytes -= chunk.joined_bytes
        del self._chunks[chunk.number]
        chunk.close()
        self._source.discard(chunk.number)

    def _take_in(self, file: ChunkFile, size: int, home: str) -> Chunk:
        memory = mmap.mmap(file.fd, size)
        self._count(file.page_bytes, size)
        chunk = Chunk(self._number, size, file.page_bytes, home, file.fd, memory)
        self._chunks[chunk.number] = chunk
        return chunk

    def _count(self, page_bytes: int, nbytes: int) -> None:
        self.created_bytes += nbytes
        self.bytes_by_page[page_bytes] = self.bytes_by_page.get(page_bytes, 0) + nbytes
