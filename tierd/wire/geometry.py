"""What a pool's geometry decides: how its slots lie in host memory, and who may share pages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from tierd.wire import layout, limits
from tierd.wire.errors import ProtocolError
from tierd.wire.messages import (
    Allocation,
    ChunkLayout,
    HostPool,
    Name,
    OptionalName,
    PoolSpec,
    Size,
    Text,
)

CHUNK_BYTES = 64 << 20
"""The unit in which pools claim host memory, unless huge pages are larger."""
BLOCK_ROW_BYTES = 128 << 10
"""A block's row is at least this wide, so that adjacent one-token pages copy at wire speed."""


@dataclass(frozen=True)
class HostLayout:
    """How the slots of one shard of a pool lie in host chunks.

    Slot s lies in chunk s // chunk_slots, at position s % chunk_slots; inside a chunk, blocks of
    `block_slots` slots follow each other from `data_offset`, and inside a block the rows of one
    buffer stand side by side:
    address(buffer b, slot s) = block + block_slots * row_offsets[b] + (s % block_slots) * rows[b].
    """

    rows: tuple[int, ...]
    row_offsets: tuple[int, ...]
    slot_bytes: int
    block_slots: int
    chunk_slots: int
    chunk_bytes: int
    data_offset: int


def host_layout(row_bytes: Sequence[int], *, chunk_bytes: int = CHUNK_BYTES) -> HostLayout:
    """Choose block and chunk sizes for pages with these rows.

    The narrowest row decides the block. A pool whose block does not fit in a chunk (a large
    Mamba state) gets chunks of as many units as one block needs.
    """
    rows = tuple(row_bytes)
    slot_bytes = sum(rows)
    narrowest = min(rows)
    block_slots = 1
    while block_slots * narrowest < BLOCK_ROW_BYTES and block_slots < 64:
        block_slots *= 2
    while block_slots > 1 and block_slots * slot_bytes > chunk_bytes // 2:
        block_slots //= 2
    least = layout.chunk_data_offset(block_slots) + block_slots * slot_bytes
    size = -(-least // chunk_bytes) * chunk_bytes
    blocks = 1
    while (
        layout.chunk_data_offset((blocks + 1) * block_slots)
        + (blocks + 1) * block_slots * slot_bytes
        <= size
    ):
        blocks += 1
    slots = blocks * block_slots
    return HostLayout(
        rows=rows,
        row_offsets=(0, *accumulate(rows))[:-1],
        slot_bytes=slot_bytes,
        block_slots=block_slots,
        chunk_slots=slots,
        chunk_bytes=size,
        data_offset=layout.chunk_data_offset(slots),
    )


def pool_layout(pool: PoolSpec, chunk_bytes: int = CHUNK_BYTES) -> HostLayout:
    """`host_layout` of a registered pool's rows."""
    return host_layout([buffer.row_bytes for buffer in pool.buffers], chunk_bytes=chunk_bytes)


def placed_layout(row_bytes: Sequence[int], placed: HostPool) -> HostLayout:
    """The layout that somebody else chose for pages with these rows."""
    return replace(
        host_layout(row_bytes),
        block_slots=placed.block_slots,
        chunk_slots=placed.chunk_slots,
        data_offset=placed.data_offset,
    )


def shards(pool: PoolSpec, world_size: int) -> int:
    """How many shards each page of a pool has."""
    return 1 if pool.replicated else world_size


def chunk_layout(host: HostLayout) -> ChunkLayout:
    """A layout for the wire; `placed_layout` reads it."""
    return ChunkLayout(
        rows=list(host.rows),
        block_slots=host.block_slots,
        chunk_slots=host.chunk_slots,
        data_offset=host.data_offset,
    )


def check_pools(allocations: Sequence[Allocation], pools: Sequence[PoolSpec]) -> None:
    """Refuse geometry that could address a byte outside an allocation, or alias two pages.

    Raises: ProtocolError: naming the pool, the buffer and the field.
    """
    sizes = [allocation.size for allocation in allocations]
    # One loop, and no object but a tuple for each buffer: there may be very many.
    extents: list[list[_Extent]] = [[] for _ in sizes]
    for index, pool in enumerate(pools):
        last = pool.num_pages - 1
        for number, buffer in enumerate(pool.buffers):
            allocation, start, row_bytes = buffer.allocation, buffer.offset, buffer.row_bytes
            if allocation >= len(sizes):
                raise ProtocolError(
                    f"{_name(pools, index, number)}: `allocation` {allocation}; there are "
                    f"{len(sizes)}"
                )
            if buffer.page_stride < row_bytes:
                raise ProtocolError(
                    f"{_name(pools, index, number)}: `page_stride` {buffer.page_stride} is under "
                    f"its `row_bytes` {row_bytes}: pages would overlap"
                )
            end = start + last * buffer.page_stride + row_bytes
            if end > sizes[allocation]:
                raise ProtocolError(
                    f"{_name(pools, index, number)}: its last page ends at byte {end} of an "
                    f"allocation of {sizes[allocation]}"
                )
            extents[allocation].append((start, end, index, number))
    for some in extents:
        _check_overlap(pools, some)


_Extent = tuple[int, int, int, int]
"""The first byte of a buffer and the one past its last; its pool and its number there."""


def _name(pools: Sequence[PoolSpec], index: int, number: int) -> str:
    return f"pool {pools[index].name!r}, buffer {number}"


def _check_overlap(pools: Sequence[PoolSpec], extents: list[_Extent]) -> None:
    """Refuse buffers of one allocation that share a byte, within a pool or between two.

    Buffers whose extents cross must have one stride, and then rows that keep apart in it: the
    rows of a page side by side. That also refuses a few strange arrangements that share none.
    """
    extents.sort()
    first = group_end = 0
    for at, (start, end, _, _) in enumerate(extents):
        if start >= group_end:
            if at - first > 1:
                _check_interleaved(pools, extents[first:at])
            first, group_end = at, end
        elif end > group_end:
            group_end = end
    if len(extents) - first > 1:
        _check_interleaved(pools, extents[first:])


def _check_interleaved(pools: Sequence[PoolSpec], group: Sequence[_Extent]) -> None:
    """Refuse buffers with crossing extents unless their rows keep apart in one common stride."""
    _, _, index, number = group[0]
    stride = pools[index].buffers[number].page_stride
    # A page's rows as they follow each other, and the next page's first.
    rows = sorted((start % stride, index, number) for start, _, index, number in group)
    rows.append((rows[0][0] + stride, *rows[0][1:]))
    for (start, index, number), (following, *follower) in pairwise(rows):
        buffer = pools[index].buffers[number]
        gap = following - start
        if buffer.page_stride != stride or buffer.row_bytes > gap:
            raise ProtocolError(
                f"{_name(pools, index, number)} and {_name(pools, *follower)}: their pages overlap"
            )


def geometry_of(
    pools: Sequence[PoolSpec],
) -> dict[str, tuple[int, int, tuple[tuple[int, int], ...], bool]]:
    """What two ranks or engines must have in common to share pages: per pool, the tokens of a
    page, the window, (row bytes, layer) of each buffer in order, and whether it is replicated."""
    return {
        pool.name: (
            pool.page_tokens,
            pool.window,
            tuple((b.row_bytes, b.layer) for b in pool.buffers),
            pool.replicated,
        )
        for pool in pools
    }


def namespace_record(
    namespace: Mapping[str, str], world_size: int, pools: Sequence[PoolSpec], epoch: str
) -> bytes:
    """Everything that makes two pages interchangeable, as bytes."""
    record = [sorted(namespace.items()), world_size, sorted(geometry_of(pools).items()), epoch]
    return msgspec.msgpack.encode(record)


def namespace_digest(
    namespace: Mapping[str, str], world_size: int, pools: Sequence[PoolSpec], epoch: str
) -> bytes:
    """The 32-byte name of everything that makes two pages interchangeable."""
    return hashlib.sha256(namespace_record(namespace, world_size, pools, epoch)).digest()


_Row = tuple[Size, Annotated[int, Meta(ge=0, lt=limits.MAX_BUFFERS)]]
_Pool = tuple[
    Annotated[int, Meta(ge=1, le=2**20)],
    Annotated[int, Meta(ge=0, le=2**20)],
    Annotated[list[_Row], Meta(min_length=1, max_length=limits.MAX_BUFFERS)],
    bool,
]


class NamespaceRecord(msgspec.Struct, array_like=True, frozen=True):
    """What a `namespace_record` says. `pools`: by name, the tokens of a page, the window,
    (row bytes, layer) of each buffer, and whether it is replicated."""

    namespace: Annotated[list[tuple[Name, Text]], Meta(max_length=64)]
    world_size: Annotated[int, Meta(ge=1, le=limits.MAX_WORLD_SIZE)]
    pools: Annotated[list[tuple[Name, _Pool]], Meta(min_length=1, max_length=limits.MAX_POOLS)]
    epoch: OptionalName


_RECORD = msgspec.msgpack.Decoder(NamespaceRecord)


def read_namespace_record(data: bytes, digest: bytes) -> NamespaceRecord:
    """Read a record that somebody has kept under its digest.

    Raises: ProtocolError: the digest is another one's, or it is no record.
    """
    if hashlib.sha256(data).digest() != digest:
        raise ProtocolError("a namespace's record has changed since it was written")
    try:
        return _RECORD.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"no record of a namespace: {error}") from None
