"""A rank's shared memory as a copier sees it, without a client: K and V that a test writes, and the
jobs that control would send for them."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from tierd.wire import layout
from tierd.wire.geometry import HostLayout, pool_layout
from tierd.wire.messages import (
    Allocation,
    Attach,
    BackupJob,
    BufferSpec,
    CopyPart,
    HostPool,
    PoolSpec,
    RestoreJob,
)

LAYERS, PAGES, ROW = 3, 64, 4096
PAGE_TOKENS = 16
RING = 64 * PAGE_TOKENS


class SharedFile:
    """A memfd and this process's mapping of it."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.fd = os.memfd_create(f"tierd-test-{name}")
        os.ftruncate(self.fd, nbytes)
        self.memory = mmap.mmap(self.fd, nbytes)
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def close(self) -> None:
        os.close(self.fd)
        del self.bytes
        with contextlib.suppress(BufferError):
            self.memory.close()


class Rank:
    """A rank's end of shared memory: K and V of a few layers, one allocation a layer."""

    def __init__(self, session: int, *, layers: int = LAYERS, max_layers: int = 8) -> None:
        self.session = session
        spec = layout.SegmentSpec(backup_ring=RING, restore_ring=RING, max_layers=max_layers)
        self.file = SharedFile("segment", spec.nbytes)
        self.segment = layout.Segment(self.file.memory, spec)
        self.segment.format()
        extent = 2 * PAGES * ROW
        self.tensors = [SharedFile(f"layer{n}", extent) for n in range(layers)]
        rng = np.random.default_rng(session)
        for tensor in self.tensors:
            tensor.bytes[:] = rng.integers(0, 256, extent, np.uint8)
        self.pool = PoolSpec(
            name="kv",
            num_pages=PAGES,
            page_tokens=PAGE_TOKENS,
            buffers=[
                BufferSpec(
                    allocation=layer,
                    offset=half * PAGES * ROW,
                    page_stride=ROW,
                    row_bytes=ROW,
                    layer=layer,
                )
                for half in range(2)
                for layer in range(layers)
            ],
        )
        self.layout: HostLayout = pool_layout(self.pool)
        self.ticket = 0
        self.ring = {"backup": 0, "restore": 0}

    @property
    def fds(self) -> list[int]:
        return [self.file.fd, *(tensor.fd for tensor in self.tensors)]

    def attach(self) -> Attach:
        return Attach(
            session=self.session,
            allocations=[Allocation(size=tensor.bytes.size) for tensor in self.tensors],
            pools=[self.pool],
            host_pools=[
                HostPool(
                    block_slots=self.layout.block_slots,
                    chunk_slots=self.layout.chunk_slots,
                    data_offset=self.layout.data_offset,
                )
            ],
        )

    def page(self, number: int) -> list[bytes]:
        """The rows of a page, in the order of the pool's buffers."""
        return [
            self.tensors[b.allocation].bytes[b.offset + number * ROW :][:ROW].tobytes()
            for b in self.pool.buffers
        ]

    def slot(self, chunk: SharedFile, number: int) -> list[bytes]:
        """The rows of a slot."""
        per_block, where = self.layout.block_slots, number % self.layout.block_slots
        block = self.layout.data_offset + (number - where) * self.layout.slot_bytes
        starts = [block + per_block * offset + where * ROW for offset in self.layout.row_offsets]
        return [chunk.bytes[start : start + ROW].tobytes() for start in starts]

    def _part(self, ring: str, pages: list[int], chunk: int, slots: list[int]) -> CopyPart:
        array = self.segment.backup_ring if ring == "backup" else self.segment.restore_ring
        end = self.ring[ring] + len(pages) * PAGE_TOKENS
        positions = np.arange(self.ring[ring], end, PAGE_TOKENS, dtype="<u8")
        tokens = np.arange(PAGE_TOKENS)
        for page, position in zip(pages, positions, strict=True):
            array[(int(position) + tokens) % len(array)] = page * PAGE_TOKENS + tokens
        self.ring[ring] = end
        return CopyPart(
            pool=0,
            ring=positions.tobytes(),
            chunks=np.full(len(pages), chunk, "<u8").tobytes(),
            slots=np.array(slots, "<u4").tobytes(),
        )

    def backup(
        self, job: int, pages: list[int], slots: list[int], *, chunk: int = 0, ready: bool = True
    ) -> BackupJob:
        part = self._part("backup", pages, chunk, slots)
        return BackupJob(
            job=job,
            session=self.session,
            tickets=[self._take_ticket(ready)],
            fence=int(self.segment.fence[0]),
            consumed=self.ring["backup"],
            parts=[part],
        )

    def restore(
        self,
        job: int,
        pages: list[int],
        slots: list[int],
        *,
        chunk: int = 0,
        ready: bool = True,
        entry: int = 0,
        generation: int = 1,
    ) -> RestoreJob:
        part = self._part("restore", pages, chunk, slots)
        self.segment.awaited[entry] = generation
        return RestoreJob(
            job=job,
            session=self.session,
            ticket=self._take_ticket(ready),
            fence=int(self.segment.fence[0]),
            consumed=self.ring["restore"],
            entry=entry,
            generation=generation,
            parts=[part],
        )

    def _take_ticket(self, ready: bool) -> int:
        self.ticket += 1
        if ready:
            self.mark_ready(self.ticket)
        return self.ticket

    def mark_ready(self, ticket: int) -> None:
        self.segment.ready[ticket % layout.TICKETS] = ticket

    def close(self) -> None:
        del self.segment
        for file in (self.file, *self.tensors):
            file.close()


def small_layout(rank: Rank, slots: int = 16) -> Rank:
    """A chunk of a few slots instead of 64 MiB of them."""
    whole = rank.layout
    rank.layout = HostLayout(
        rows=whole.rows,
        row_offsets=whole.row_offsets,
        slot_bytes=whole.slot_bytes,
        block_slots=4,
        chunk_slots=slots,
        chunk_bytes=4 << 20,
        data_offset=layout.chunk_data_offset(slots),
    )
    return rank
