"""Registrations whose geometry is checked, and what is planned of it, as a target
(`fuzz_targets`)."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
from mutation import EDGES
from one_process import Bounds

from tierd.copier.plan import Direction, PlanError, PoolPlan
from tierd.wire.errors import ProtocolError
from tierd.wire.geometry import check_pools, pool_layout
from tierd.wire.messages import Allocation, BufferSpec, PoolSpec

LARGEST = 1 << 44
"""What a process can map; a larger allocation is refused where it would be mapped."""


class Geometry:
    """Registrations whose geometry is hostile: refused, or nothing outside is ever planned."""

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self._rng = rng
        self._np = np.random.default_rng(rng.randrange(2**32))
        self.accepted = 0

    def feed(self, count: int) -> None:
        for _ in range(count):
            allocations, pools = self._registration()
            try:
                encoded = msgspec.msgpack.encode([allocations, pools])
                allocations, pools = msgspec.msgpack.decode(
                    encoded, type=tuple[list[Allocation], list[PoolSpec]]
                )
                check_pools(allocations, pools)
            except (ProtocolError, msgspec.ValidationError, OverflowError):
                continue
            if sum(a.size for a in allocations) <= LARGEST:
                self.accepted += 1
                self._plan(allocations, pools)

    def _registration(self) -> tuple[list[Allocation], list[PoolSpec]]:
        rng = self._rng
        pages, row = rng.choice((1, 2, 7, 64)), rng.choice((1, 16, 256, 4096, 1 << 17))
        layers = rng.choice((1, 2, 5, 36))
        stride = row * rng.choice((1, 1, 2, layers * 2))
        extent = pages * stride
        count = rng.choice((1, 1, 2, layers))
        size = extent * 2 * layers + rng.choice((0, 0, 4096))
        allocations = [Allocation(size=size) for _ in range(count)]
        buffers = []
        for n in range(2 * layers):
            offset = n * row if stride == row * layers * 2 else n * extent
            buffers.append(
                BufferSpec(
                    allocation=n % count,
                    offset=offset,
                    page_stride=stride,
                    row_bytes=row,
                    layer=n % layers,
                )
            )
        pools = [PoolSpec(name="kv", num_pages=pages, page_tokens=1, buffers=buffers)]
        for _ in range(rng.choice((0, 1, 1, 2))):
            self._spoil(allocations, pools)
        return allocations, pools

    def _spoil(self, allocations: list[Allocation], pools: list[PoolSpec]) -> None:
        rng = self._rng
        pool = rng.choice(pools)
        at = rng.randrange(len(pool.buffers))
        buffer = pool.buffers[at]
        replace = msgspec.structs.replace
        near = rng.choice([*EDGES, buffer.offset + 1, buffer.row_bytes - 1, buffer.page_stride + 1])
        kind = rng.randrange(7)
        if kind < 4:
            field = ("offset", "page_stride", "row_bytes", "allocation")[kind]
            pool.buffers[at] = replace(buffer, **{field: near})
        elif kind == 4:
            pool.buffers.append(buffer)
        elif kind == 5:
            pools[0] = replace(pools[0], num_pages=near)
        else:
            number = rng.randrange(len(allocations))
            allocations[number] = replace(allocations[number], size=near)

    def _plan(self, allocations: list[Allocation], pools: list[PoolSpec]) -> None:
        """Have jobs planned in a made-up address space in which nothing is adjacent."""
        rng, np_rng = self._rng, self._np
        device, host = Bounds(), Bounds()
        addresses, at = [], 1 << 45
        for allocation in allocations:
            addresses.append(at)
            device.add(at, allocation.size)
            at += allocation.size + 4096
        for pool in pools:
            layout = pool_layout(pool)
            if layout.chunk_bytes > LARGEST or len(pool.buffers) > 200:
                continue
            chunk = 1 << 46
            host.add(chunk + layout.data_offset, layout.chunk_bytes - layout.data_offset)
            plan = PoolPlan(pool, addresses, layout)
            count = rng.randint(1, 8)
            pages = np_rng.integers(0, pool.num_pages, count, np.int64)
            slots = np_rng.permutation(min(layout.chunk_slots, 64))[:count].astype(np.uint64)
            pages = pages[: len(slots)]
            if rng.random() < 0.3:
                hostile = [pool.num_pages, -1, 2**62, -(2**63), 2**63 - 1]
                pages[rng.randrange(len(pages))] = rng.choice(hostile)
            chunks = np.full(len(pages), chunk, np.uint64)
            try:
                runs = plan.runs(pages, chunks, slots)
            except PlanError:
                assert pages.min() < 0 or pages.max() >= pool.num_pages
                continue
            moved = 0
            for direction in Direction:
                for batch in plan.pieces(plan.group(0, plan.layers), runs, direction):
                    for ops in (batch.boxes, batch.rows):
                        moved += int((ops["width"] * ops["depth"]).sum())
                        last = ops["depth"] - np.uint64(1)
                        for side, bounds in (("device", device), ("host", host)):
                            ends = ops[side] + last * ops[f"{side}_stride"] + ops["width"]
                            bounds.check(ops[side].tolist(), ends.tolist())
            assert moved == 2 * len(pages) * layout.slot_bytes

    def close(self) -> None:
        assert self.accepted
