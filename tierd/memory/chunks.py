"""Host memory in chunks: anonymous shared memory that control owns and copiers map and pin.

A chunk belongs to one shard of one pool. Its first pages are headers, which control maps; the
blocks after them are only ever touched by copiers.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierd.eviction.policy import Slots
from tierd.wire import layout
from tierd.wire.geometry import HostLayout

_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4


@dataclass
class Chunk:
    """One shard's piece of host memory. `number` is unique in this daemon's life."""

    number: int
    size: int
    fd: int
    headers: npt.NDArray[np.void]
    memory: mmap.mmap = field(repr=False)

    def close(self) -> None:
        """Give the memory back once the copiers have unmapped it too."""
        self.headers = np.empty(0, layout.SLOT_HEADER)
        self.memory.close()
        os.close(self.fd)


class ChunkRows:
    """The chunks of one pool: row i holds slots i * chunk_slots and on, one chunk a shard.

    Writes the slot headers of all shards (see `tierd.control.catalog.SlotRecords`).
    """

    def __init__(self, host: HostLayout) -> None:
        self._host = host
        self.rows: dict[int, list[Chunk]] = {}

    def next_ordinal(self) -> int:
        """The lowest row that is not taken."""
        ordinal = 0
        while ordinal in self.rows:
            ordinal += 1
        return ordinal

    def locate(
        self, slots: Slots, shard: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Where slots lie: chunk numbers, and slots within those chunks. Shapes: (len(slots),)."""
        ordinals, within = np.divmod(slots, self._host.chunk_slots)
        numbers = np.empty(len(slots), np.uint64)
        for ordinal in np.unique(ordinals).tolist():
            numbers[ordinals == ordinal] = self.rows[ordinal][shard].number
        return numbers, within.astype(np.uint32)

    def writing(self, slot: int, key: bytes, parent: bytes | None) -> None:
        ordinal, within = divmod(slot, self._host.chunk_slots)
        flags = (parent is not None) | bool(parent) << 1
        for chunk in self.rows[ordinal]:
            generation = (int(chunk.headers["generation"][within]) + 1) % 2**32
            record = (layout.WRITING, generation, key, parent or bytes(32), flags, 0, b"")
            chunk.headers[within] = record

    def committed(self, slots: Slots) -> None:
        self._set_state(slots, layout.COMMITTED)

    def freed(self, slots: Slots) -> None:
        self._set_state(slots, layout.FREE)

    def _set_state(self, slots: Slots, state: int) -> None:
        ordinals, within = np.divmod(slots, self._host.chunk_slots)
        for ordinal in np.unique(ordinals).tolist():
            for chunk in self.rows[ordinal]:
                chunk.headers["state"][within[ordinals == ordinal]] = state


class ChunkStore:
    """Creates chunks within one budget.

    Args:
        budget_bytes: All chunks together never exceed it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.claimed_bytes = 0
        self._number = 0

    def fits(self, host: HostLayout, shards: int) -> bool:
        return self.claimed_bytes + host.chunk_bytes * shards <= self.budget_bytes

    def claim(
        self, host: HostLayout, *, shards: int, ordinal: int, namespace: bytes, pool: str
    ) -> list[Chunk]:
        """One row: a chunk for every shard. Call only if it `fits`."""
        return [
            self._create(host, shard, shards, ordinal, namespace, pool) for shard in range(shards)
        ]

    def give_back(self, chunk: Chunk) -> None:
        self.claimed_bytes -= chunk.size
        chunk.close()

    def _create(
        self,
        host: HostLayout,
        shard: int,
        shards: int,
        ordinal: int,
        namespace: bytes,
        pool: str,
    ) -> Chunk:
        self._number += 1
        fd = os.memfd_create(f"tierd-chunk-{self._number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, host.chunk_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        memory = mmap.mmap(fd, host.data_offset)
        header = layout.chunk_header(memory)
        header["magic"] = layout.CHUNK_MAGIC
        header["version"] = 1
        header["shard"] = shard
        header["world_size"] = shards
        header["slots"] = host.chunk_slots
        header["ordinal"] = ordinal
        header["namespace"] = namespace
        header["pool"] = pool.encode()
        self.claimed_bytes += host.chunk_bytes
        headers = layout.slot_headers(memory, host.chunk_slots)
        return Chunk(self._number, host.chunk_bytes, fd, headers, memory)
