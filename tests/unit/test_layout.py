"""The shared memory of a rank, the headers of a chunk, and where slots lie in it."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.wire import geometry, layout
from tierd.wire.errors import ProtocolError
from tierd.wire.layout import FAILED, LANDED, PENDING, Segment, SegmentSpec, read_segment_spec
from tierd.wire.messages import Allocation, BufferSpec, PoolSpec

specs = st.builds(
    SegmentSpec,
    backup_ring=st.integers(1, 3000),
    restore_ring=st.integers(1, 3000),
    max_layers=st.integers(1, 300),
)


def formatted(spec: SegmentSpec) -> tuple[bytearray, Segment]:
    memory = bytearray(spec.nbytes)
    segment = Segment(memory, spec)
    segment.format()
    return memory, segment


# --- segment ----------------------------------------------------------------------------------

FIELDS = (
    "fence",
    "consumed",
    "verdict",
    "awaited",
    "ready",
    "layers",
    "backup_ring",
    "restore_ring",
)


@given(specs)
def test_no_field_of_a_segment_shares_a_byte_with_another(spec: SegmentSpec) -> None:
    memory, segment = formatted(spec)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    extents = [(0, 64)]
    for name in FIELDS:
        field = getattr(segment, name)
        start = field.ctypes.data - base
        assert start % field.itemsize == 0
        extents.append((start, start + field.nbytes))
    extents.sort()
    for (_, end), (start, _) in itertools.pairwise(extents):
        assert end <= start
    assert extents[-1][1] <= spec.nbytes
    assert spec.nbytes % layout.PAGE == 0


@given(specs, st.integers(0, 2**40), st.integers(0, 1), st.data())
def test_the_offsets_that_streams_use_are_those_of_the_fields(
    spec: SegmentSpec, ticket: int, word: int, data: st.DataObject
) -> None:
    memory, segment = formatted(spec)
    words = np.frombuffer(memory, np.uint32)
    entry = data.draw(st.integers(0, layout.RESTORE_ENTRIES - 1))
    layer = data.draw(st.integers(0, spec.max_layers - 1))
    segment.ready[ticket % layout.TICKETS, word] = 11
    segment.layers[entry, layer] = 12
    assert words[segment.ready_offset(ticket, word) // 4] == 11
    assert words[segment.layer_offset(entry, layer) // 4] == 12
    numbers = np.frombuffer(memory, np.int64)
    segment.backup_ring[-1], segment.restore_ring[0] = 13, 14
    assert numbers[segment.offsets["backup_ring"] // 8 + spec.backup_ring - 1] == 13
    assert numbers[segment.offsets["restore_ring"] // 8] == 14


@given(specs)
def test_a_reader_learns_the_sizes_from_the_segment_itself(spec: SegmentSpec) -> None:
    memory, _ = formatted(spec)
    assert read_segment_spec(memory) == spec
    assert read_segment_spec(memory + bytes(100)) == spec


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m[:100], "shorter than its header"),
        (lambda m: m[: layout.PAGE], "claims"),
        (lambda m: m[:-1], "claims"),
        (lambda m: b"x" + m[1:], "not a tierd segment"),
        (lambda m: m[:8] + bytes(8) + m[16:], "out of range"),
        (lambda m: m[:8] + b"\xff" * 8 + m[16:], "out of range"),
        (lambda m: m[:24] + b"\xff" * 8 + m[32:], "out of range"),
        (lambda m: m[:8] + (1 << 26).to_bytes(8, "little") + m[16:], "claims"),
    ],
)
def test_a_segment_that_is_not_what_it_claims_is_refused(change, reason) -> None:  # type: ignore[no-untyped-def]
    memory, _ = formatted(SegmentSpec(100, 100, 10))
    with pytest.raises(ProtocolError, match=reason):
        read_segment_spec(change(bytes(memory)))


def test_fields_over_less_memory_than_they_need_are_refused() -> None:
    spec = SegmentSpec(100, 100, 10)
    with pytest.raises(ProtocolError, match=f"needs {spec.nbytes}"):
        Segment(bytearray(spec.nbytes - 1), spec)


def test_a_release_stores_the_awaited_generation_in_one_entry_only() -> None:
    _, segment = formatted(SegmentSpec(8, 8, 5))
    segment.awaited[:] = range(100, 100 + layout.RESTORE_ENTRIES)
    segment.layers[:] = 1
    segment.release(3)
    assert (segment.layers[3] == 103).all()
    assert (np.delete(segment.layers, 3, axis=0) == 1).all()


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_verdict_is_of_one_generation(generation: int, landed: bool) -> None:
    _, segment = formatted(SegmentSpec(8, 8, 5))
    # Generations come out of the segment as numpy integers, too.
    for value in (generation, np.uint32(generation)):
        segment.set_verdict(2, value, landed)
        assert segment.get_verdict(2, generation) == (LANDED if landed else FAILED)
        assert segment.get_verdict(2, (generation + 1) % 2**32) == PENDING


def test_before_its_first_verdict_an_entry_is_pending() -> None:
    _, segment = formatted(SegmentSpec(8, 8, 5))
    assert [segment.get_verdict(e, 0) for e in range(layout.RESTORE_ENTRIES)] == [PENDING] * 8


# --- chunks -----------------------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_the_headers_of_a_chunk_end_before_its_data(slots: int) -> None:
    data = layout.chunk_data_offset(slots)
    memory = bytearray(data)
    headers = layout.slot_headers(memory, slots)
    own = layout.chunk_header(memory)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    assert own.ctypes.data == base
    assert own.nbytes <= headers.ctypes.data - base
    assert headers.ctypes.data + headers.nbytes <= base + data
    assert data % layout.PAGE == 0
    assert layout.SLOT_HEADER.itemsize == 128


def test_a_slot_header_holds_what_was_written() -> None:
    memory = bytearray(layout.chunk_data_offset(4))
    slot = layout.slot_headers(memory, 4)[2]
    slot["key"], slot["state"], slot["generation"] = b"k" * 31 + b"\0", layout.COMMITTED, 7
    again = layout.slot_headers(memory, 4)
    assert again["state"].tolist() == [layout.FREE, layout.FREE, layout.COMMITTED, layout.FREE]
    assert bytes(again[2]["key"]) == b"k" * 31 + b"\0"


row_bytes = st.lists(
    st.integers(1, 600).map(lambda n: n * 64) | st.integers(1, 9000), min_size=1, max_size=8
)


@given(row_bytes, st.sampled_from([64 << 10, 1 << 20]), st.data())
def test_no_two_rows_in_a_chunk_overlap(
    rows: list[int], chunk_bytes: int, data: st.DataObject
) -> None:
    host = geometry.host_layout(rows, chunk_bytes=chunk_bytes)
    assert host.chunk_bytes % chunk_bytes == 0
    assert host.slot_bytes == sum(rows)
    assert host.chunk_slots % host.block_slots == 0
    assert host.data_offset >= layout.chunk_data_offset(host.chunk_slots)
    blocks = host.chunk_slots // host.block_slots
    # Blocks repeat, so the first, the last and one between stand for all.
    chosen = {0, blocks - 1, data.draw(st.integers(0, blocks - 1))}
    extents = []
    for block in chosen:
        start = host.data_offset + block * host.block_slots * host.slot_bytes
        for slot in range(host.block_slots):
            for buffer, row in enumerate(rows):
                at = start + host.block_slots * host.row_offsets[buffer] + slot * row
                extents.append((at, at + row))
    extents.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(extents))
    assert extents[0][0] == host.data_offset
    assert extents[-1][1] <= host.chunk_bytes
    # No room for another block is wasted.
    slots = host.chunk_slots + host.block_slots
    assert layout.chunk_data_offset(slots) + slots * host.slot_bytes > host.chunk_bytes


def test_narrow_rows_get_wide_blocks_and_wide_rows_need_none() -> None:
    one_token = geometry.host_layout([2048] * 72)
    assert one_token.block_slots * 2048 >= 64 << 10
    assert geometry.host_layout([128 << 10] * 72).block_slots == 1
    state = geometry.host_layout([100 << 20])
    assert (state.chunk_bytes, state.chunk_slots) == (128 << 20, 1)


# --- geometry ---------------------------------------------------------------------------------

MIB = 1 << 20


def buffer(**changes: int) -> BufferSpec:
    fields = {"allocation": 0, "offset": 0, "page_stride": 512, "row_bytes": 512, "layer": 0}
    return BufferSpec(**(fields | changes))


def pool(*buffers: BufferSpec, name: str = "kv", num_pages: int = 16, page_tokens: int = 4):  # type: ignore[no-untyped-def]
    return PoolSpec(name=name, num_pages=num_pages, page_tokens=page_tokens, buffers=list(buffers))


def check(*pools: PoolSpec, sizes: tuple[int, ...] = (MIB,)) -> None:
    geometry.check_pools([Allocation(size=size) for size in sizes], pools)


def test_ordinary_pools_pass() -> None:
    # K and V as halves of an allocation a layer; then all rows of a page side by side.
    check(
        pool(
            buffer(),
            buffer(offset=8192),
            buffer(allocation=1, layer=1),
            buffer(allocation=1, layer=1, offset=8192),
        ),
        sizes=(16384, 16384),
    )
    check(pool(*(buffer(offset=i * 64, page_stride=256, row_bytes=64) for i in range(4))))
    check(pool(buffer()), pool(buffer(offset=8192), name="swa"))


@pytest.mark.parametrize(
    ("bad", "sizes", "reason"),
    [
        (buffer(allocation=1), (MIB,), r"`allocation` 1; there are 1"),
        (buffer(page_stride=511), (MIB,), r"`page_stride` 511 is under its `row_bytes` 512"),
        (buffer(), (16 * 512 - 1,), r"ends at byte 8192 of an allocation of 8191"),
        (buffer(offset=1), (16 * 512,), r"ends at byte 8193"),
        (buffer(offset=2**62), (2**62,), r"ends at byte"),
        (buffer(page_stride=2**62), (2**62,), r"ends at byte 69175290276410819072"),
        (buffer(page_stride=2**62, row_bytes=2**62), (2**62,), r"ends at byte"),
    ],
)
def test_a_buffer_that_leaves_its_allocation_is_refused(
    bad: BufferSpec, sizes: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason) as refused:
        check(pool(buffer(), bad) if bad.allocation else pool(bad), sizes=sizes)
    assert "pool 'kv', buffer" in str(refused.value)


@pytest.mark.parametrize(
    "other",
    [
        buffer(),
        buffer(offset=256),
        buffer(offset=512 * 16 - 1),
        buffer(offset=64, page_stride=1024, row_bytes=64),
        buffer(offset=512 * 15 + 511, page_stride=4096, row_bytes=1),
    ],
)
def test_two_buffers_that_share_a_byte_are_refused(other: BufferSpec) -> None:
    with pytest.raises(ProtocolError, match="overlap"):
        check(pool(buffer(), other))
    with pytest.raises(ProtocolError, match="overlap"):
        check(pool(buffer()), pool(other, name="swa"))


def test_a_row_that_runs_into_the_next_pages_first_row_is_refused() -> None:
    first = buffer(offset=0, page_stride=1024, row_bytes=100)
    check(pool(first, buffer(offset=1000, page_stride=1024, row_bytes=24)))
    with pytest.raises(ProtocolError, match="overlap"):
        check(pool(first, buffer(offset=1000, page_stride=1024, row_bytes=25)))


@st.composite
def small_pools(draw: st.DrawFn) -> list[PoolSpec]:
    stride = draw(st.sampled_from([8, 12]))
    drawn = draw(
        st.lists(
            st.tuples(
                st.integers(0, 1),
                st.integers(0, 90),
                st.integers(1, 6),
                st.just(stride) | st.sampled_from([8, 12]),
                st.integers(1, 3),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return [
        pool(
            buffer(allocation=a, offset=o, row_bytes=r, page_stride=s),
            name=f"p{i}",
            num_pages=n,
        )
        for i, (a, o, r, s, n) in enumerate(drawn)
    ]


@given(small_pools())
def test_pools_that_pass_name_no_byte_twice_and_none_outside(pools: list[PoolSpec]) -> None:
    sizes = (100, 100)
    try:
        check(*pools, sizes=sizes)
    except ProtocolError:
        return
    used = [np.zeros(size, int) for size in sizes]
    for spec in pools:
        for b in spec.buffers:
            for page in range(spec.num_pages):
                at = b.offset + page * b.page_stride
                assert at + b.row_bytes <= sizes[b.allocation]
                used[b.allocation][at : at + b.row_bytes] += 1
    assert all((count <= 1).all() for count in used)


# --- namespace --------------------------------------------------------------------------------


def digest(
    namespace: dict[str, str] | None = None,
    world_size: int = 2,
    pools: list[PoolSpec] | None = None,
    epoch: str = "",
) -> bytes:
    return geometry.namespace_digest(
        {"model": "m", "dtype": "bf16"} if namespace is None else namespace,
        world_size,
        [pool(buffer(), buffer(offset=8192, layer=1))] if pools is None else pools,
        epoch,
    )


def test_where_the_tensors_lie_does_not_part_two_engines() -> None:
    moved = pool(buffer(offset=4096, allocation=3, page_stride=1024), buffer(layer=1), num_pages=99)
    assert digest(pools=[moved]) == digest()
    assert digest({"dtype": "bf16", "model": "m"}) == digest()
    two = [pool(buffer()), pool(buffer(offset=8192), name="swa")]
    assert digest(pools=two[::-1]) == digest(pools=two)


def test_another_client_can_make_the_digest_from_what_the_protocol_says() -> None:
    pools = [pool(buffer(row_bytes=512), buffer(row_bytes=512, layer=1), page_tokens=16)]
    record = (
        b"\x94"  # an array of 4: names, world size, pools, epoch
        b"\x92\x92\xa1a\xa11\x92\xa1b\xa12"
        b"\x02"
        b"\x91\x92\xa2kv\x94\x10\x00\x92\x92\xcd\x02\x00\x00\x92\xcd\x02\x00\x01\xc2"
        b"\xa1e"
    )
    assert digest({"b": "2", "a": "1"}, 2, pools, "e") == hashlib.sha256(record).digest()


def test_anything_else_that_differs_parts_them() -> None:
    layers = (buffer(), buffer(offset=8192, layer=1))
    digests = [
        digest(),
        digest({"model": "m"}),
        digest({"model": "m", "dtype": "fp8"}),
        digest({"model": "mdtype", "": "bf16"}),
        digest({}),
        digest(world_size=1),
        digest(epoch="e"),
        digest(pools=[pool(*layers, page_tokens=8)]),
        digest(pools=[pool(*layers, name="swa")]),
        digest(pools=[pool(*layers[::-1])]),
        digest(pools=[pool(layers[0])]),
        digest(pools=[pool(*layers, buffer(offset=16384, layer=2))]),
        digest(pools=[pool(buffer(row_bytes=256), layers[1])]),
        digest(pools=[pool(*layers), pool(buffer(), name="swa")]),
    ]
    assert len(set(digests)) == len(digests)
    assert {len(d) for d in digests} == {32}
