"""A plan moves exactly the rows that it was asked for, whatever the geometry."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierd.copier import host, operations, plan, records
from tierd.copier.plan import Batch, Direction, Path, PlanError, PoolPlan, whole_pages
from tierd.wire.geometry import HostLayout, host_layout, pool_layout
from tierd.wire.messages import BufferSpec, PoolSpec

CANARY = 0xA5


@dataclass
class Memory:
    """A device's allocations and host chunks in one process, between canaries."""

    allocations: list[np.ndarray]
    chunks: list[np.ndarray]

    @classmethod
    def poisoned(cls, sizes: list[int], chunks: int, chunk_bytes: int) -> Memory:
        return cls(
            [np.full(size, CANARY, np.uint8) for size in sizes],
            [np.full(chunk_bytes, CANARY, np.uint8) for _ in range(chunks)],
        )

    def copy(self) -> Memory:
        return Memory([a.copy() for a in self.allocations], [c.copy() for c in self.chunks])

    @property
    def addresses(self) -> list[int]:
        return [a.ctypes.data for a in self.allocations]

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for array in (*self.allocations, *self.chunks):
            array[:] = rng.integers(0, 256, array.size, np.uint8)

    def equals(self, other: Memory) -> bool:
        ours, theirs = (m.allocations + m.chunks for m in (self, other))
        return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@dataclass
class Case:
    """A pool, how it lies in host memory, and the pages that a job names."""

    pool: PoolSpec
    sizes: list[int]
    layout: HostLayout
    pages: list[int]
    places: list[tuple[int, int]]
    """Of each page: the number of its chunk, the slot within it."""

    def naive(self, memory: Memory, direction: Direction) -> None:
        """One row at a time, straight from the definitions."""
        layout = self.layout
        for page, (chunk, slot) in zip(self.pages, self.places, strict=True):
            block = layout.data_offset + slot // layout.block_slots * (
                layout.block_slots * layout.slot_bytes
            )
            for number, buffer in enumerate(self.pool.buffers):
                row = buffer.row_bytes
                here = (
                    block
                    + layout.block_slots * layout.row_offsets[number]
                    + slot % layout.block_slots * row
                )
                there = buffer.offset + page * buffer.page_stride
                a = memory.chunks[chunk][here : here + row]
                b = memory.allocations[buffer.allocation][there : there + row]
                if direction is Direction.BACKUP:
                    a[:] = b
                else:
                    b[:] = a

    def arrays(self, memory: Memory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        chunks = [memory.chunks[chunk].ctypes.data for chunk, _ in self.places]
        return (
            np.array(self.pages, np.int64),
            np.array(chunks, np.uint64),
            np.array([slot for _, slot in self.places], np.uint64),
        )

    def planned(self, memory: Memory) -> PoolPlan:
        return PoolPlan(self.pool, memory.addresses, self.layout)


def layout_of(pool: PoolSpec, block_slots: int, blocks: int) -> HostLayout:
    """As `pool_layout`, with small blocks and chunks, so that runs cross their edges."""
    whole = pool_layout(pool)
    slots = block_slots * blocks
    return HostLayout(
        rows=whole.rows,
        row_offsets=whole.row_offsets,
        slot_bytes=whole.slot_bytes,
        block_slots=block_slots,
        chunk_slots=slots,
        chunk_bytes=64 + slots * whole.slot_bytes,
        data_offset=64,
    )


def stacked(
    shape: str, layers: int, pages: int, row: int, stride: int, gaps: list[int]
) -> tuple[list[BufferSpec], list[int]]:
    """K and V of each layer (two buffers), laid out as engines do it; also the allocations' sizes.

    `gaps`: bytes between neighbours, taken round robin: one constant gap keeps strides constant.
    """
    extent = pages * stride
    buffers, sizes = [], []
    if shape == "an allocation a layer":
        for layer in range(layers):
            for half in range(2):
                buffers.append((layer, half * (extent + gaps[0]), layer))
            sizes.append(2 * (extent + gaps[0]))
    elif shape == "page after page":
        wide = 2 * layers * row + gaps[0]
        for layer in range(layers):
            for half in range(2):
                buffers.append((0, (2 * layer + half) * row, layer))
        sizes.append(pages * wide)
        stride = wide
    else:
        order = [(layer, half) for layer in range(layers) for half in range(2)]
        if shape == "all K, then all V":
            order.sort(key=lambda place: place[1])
        places, at = {}, 0
        for number, place in enumerate(order):
            places[place] = at
            at += extent + gaps[number % len(gaps)]
        buffers = [(0, places[n, half], n) for n in range(layers) for half in range(2)]
        sizes.append(at)
    return [
        BufferSpec(allocation=a, offset=offset, page_stride=stride, row_bytes=row, layer=layer)
        for a, offset, layer in buffers
    ], sizes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, num_pages = draw(st.integers(1, 12)), draw(st.integers(1, 80))
    row = draw(st.sampled_from([1, 8, 24, 64]))
    buffers, sizes = stacked(
        draw(
            st.sampled_from(
                [
                    "an allocation a layer",
                    "K and V by turns",
                    "all K, then all V",
                    "page after page",
                ]
            )
        ),
        layers,
        num_pages,
        row,
        row + draw(st.sampled_from([0, 0, 5])),
        draw(st.sampled_from([[0], [13], [0, 40], [1, 2, 3]])),
    )
    if draw(st.booleans()):
        # A scale or an index beside K and V: another row width, an allocation of its own.
        extra = [
            BufferSpec(
                allocation=len(sizes),
                offset=layer * num_pages * 3,
                page_stride=3,
                row_bytes=3,
                layer=layer,
            )
            for layer in range(layers)
        ]
        buffers, sizes = buffers + extra, [*sizes, layers * num_pages * 3]
    order = draw(st.sampled_from(["by layer", "K first", "any"]))
    if order == "K first":
        buffers = buffers[::2] + buffers[1::2]
    elif order == "any":
        buffers = draw(st.permutations(buffers))
    pool = PoolSpec(name="kv", num_pages=num_pages, page_tokens=1, buffers=buffers)
    layout = layout_of(pool, draw(st.sampled_from([1, 2, 8, 64])), draw(st.integers(1, 3)))
    chunks = 2
    everywhere = [(c, s) for c in range(chunks) for s in range(layout.chunk_slots)]
    most = min(num_pages, len(everywhere))
    count = draw(st.integers(0, most))
    if draw(st.booleans()):
        # A prefill: consecutive pages and slots, broken in a few places.
        first, at = draw(st.integers(0, num_pages - count)), draw(st.integers(0, most - count))
        pages, places = list(range(first, first + count)), everywhere[at : at + count]
        for _ in range(draw(st.integers(0, 3)) if count else 0):
            a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
            pages[a], pages[b] = pages[b], pages[a]
    else:
        pages = draw(st.permutations(range(num_pages)))[:count]
        places = draw(st.permutations(everywhere))[:count]
    return Case(pool, sizes, layout, pages, places)


def execute_boxes(driver_records: np.ndarray) -> None:
    """What the GPU does with a 3D batch, in the words of its record."""
    for r in driver_records:
        assert r["height"] == 1
        for z in range(int(r["depth"])):
            source = int(r["src"]) + z * int(r["src_row_length"]) * int(r["src_layer_height"])
            to = int(r["dst"]) + z * int(r["dst_row_length"]) * int(r["dst_layer_height"])
            assert r["src_row_length"] >= r["width"]
            assert r["dst_row_length"] >= r["width"]
            ctypes.memmove(to, source, int(r["width"]))


def run(batch: Batch, direction: Direction, by: str) -> None:
    if by == "host backend":
        host.copy(direction, batch.boxes)
    else:
        execute_boxes(records.boxes(batch.boxes, direction))
    assert (batch.rows["depth"] == 1).all()
    host.copy(direction, batch.rows)


@settings(max_examples=150, deadline=None)
@given(
    case=cases(),
    direction=st.sampled_from(Direction),
    by=st.sampled_from(["host backend", "driver records"]),
    split=st.integers(1, 4),
)
def test_a_plan_moves_what_a_copy_row_by_row_moves_and_nothing_else(
    case: Case, direction: Direction, by: str, split: int
) -> None:
    memory = Memory.poisoned(case.sizes, 2, case.layout.chunk_bytes)
    memory.fill(len(case.pages))
    expected = memory.copy()
    case.naive(expected, direction)

    planned = case.planned(memory)
    runs = planned.runs(*case.arrays(memory))
    edges = [planned.layers * n // split for n in range(split + 1)]
    for first, end in pairwise(edges):
        for piece in planned.pieces(planned.group(first, end), runs, direction):
            run(piece, direction, by)

    assert memory.equals(expected)


@given(case=cases(), direction=st.sampled_from(Direction))
@settings(max_examples=100, deadline=None)
def test_no_box_leaves_the_allocation_and_the_block_it_begins_in(
    case: Case, direction: Direction
) -> None:
    memory = Memory.poisoned(case.sizes, 2, case.layout.chunk_bytes)
    planned = case.planned(memory)
    batch = planned.batch(
        planned.group(0, planned.layers), planned.runs(*case.arrays(memory)), direction
    )
    block = case.layout.block_slots * case.layout.slot_bytes
    for op in np.concatenate([batch.boxes, batch.rows]):
        device, at = int(op["device"]), int(op["host"])
        steps = int(op["depth"]) - 1
        device_end = device + steps * int(op["device_stride"]) + int(op["width"])
        host_end = at + steps * int(op["host_stride"]) + int(op["width"])
        assert any(
            a.ctypes.data <= device and device_end <= a.ctypes.data + a.size
            for a in memory.allocations
        )
        chunk = next(c for c in memory.chunks if 0 <= at - c.ctypes.data < c.size)
        start = at - chunk.ctypes.data - case.layout.data_offset
        end = host_end - chunk.ctypes.data - case.layout.data_offset
        assert start // block == (end - 1) // block


def pool_of(
    shape: str,
    *,
    layers: int,
    pages: int,
    row: int,
    gaps: list[int] | None = None,
    by_layer: bool = False,
) -> tuple[PoolSpec, list[int]]:
    """`by_layer`: in host memory K and V take turns, else all K come first."""
    buffers, _ = stacked(shape, layers, pages, row, row, gaps or [0])
    if not by_layer:
        buffers = buffers[::2] + buffers[1::2]
    pool = PoolSpec(name="kv", num_pages=pages, page_tokens=1, buffers=buffers)
    allocations = 1 + max(b.allocation for b in buffers)
    return pool, [1 << 40 | n << 36 for n in range(allocations)]


def plan_of(shape: str, **geometry: int) -> PoolPlan:
    pool, addresses = pool_of(shape, **geometry)  # type: ignore[arg-type]
    return PoolPlan(pool, addresses, pool_layout(pool))


def some_runs(planned: PoolPlan, pages: list[int], slots: list[int]) -> np.ndarray:
    """`slots` counts on from chunk to chunk."""
    number = np.array(slots, np.uint64)
    size, per_chunk = np.uint64(1 << 30), np.uint64(planned.host.chunk_slots)
    chunks = np.uint64(1 << 45) + number // per_chunk * size
    return planned.runs(np.array(pages, np.int64), chunks, number % per_chunk)


@pytest.mark.parametrize("shape", ["K and V by turns", "all K, then all V"])
def test_an_arena_needs_at_most_two_boxes_a_page(shape: str) -> None:
    planned = plan_of(shape, layers=36, pages=7000, row=65536)
    assert planned.path is Path.STRIDED
    batch = planned.batch(planned.group(0, 36), some_runs(planned, [5], [9]), Direction.BACKUP)
    assert len(batch.rows) == 0
    assert len(batch.boxes) <= 2
    assert batch.boxes["depth"].sum() == 72


@pytest.mark.parametrize("shape", ["an allocation a layer", "K and V by turns"])
def test_wide_rows_go_one_by_one(shape: str) -> None:
    planned = plan_of(shape, layers=36, pages=7000, row=98304, by_layer=True)
    for direction in Direction:
        batch = planned.batch(planned.group(0, 36), some_runs(planned, [5], [9]), direction)
        assert len(batch.boxes) == 0
        assert batch.rows["width"].tolist() == [98304] * 72


@pytest.mark.parametrize("row", [2048, 65536])
def test_an_arena_with_one_order_on_both_sides_needs_one_box_a_page(row: int) -> None:
    planned = plan_of("K and V by turns", layers=36, pages=7000, row=row, by_layer=True)
    batch = planned.batch(planned.group(0, 36), some_runs(planned, [5], [9]), Direction.BACKUP)
    assert batch.boxes["depth"].tolist() == [72]


def test_an_allocation_a_layer_goes_row_by_row() -> None:
    planned = plan_of("an allocation a layer", layers=36, pages=7000, row=131072)
    assert planned.path is Path.ROWS
    for direction in Direction:
        batch = planned.batch(planned.group(0, 36), some_runs(planned, [5], [9]), direction)
        assert len(batch.boxes) == 0
        assert len(batch.rows) == 72


@pytest.mark.parametrize("shape", ["an allocation a layer", "K and V by turns"])
def test_narrow_rows_are_never_restored_through_the_row_call(shape: str) -> None:
    planned = plan_of(shape, layers=36, pages=450_000, row=2048)
    runs = some_runs(planned, [5, 6, 7, 8, 100, 300], [0, 1, 2, 3, 9, 20])
    batch = planned.batch(planned.group(0, 36), runs, Direction.RESTORE)
    assert len(batch.rows) == 0
    assert int((batch.boxes["width"] * batch.boxes["depth"]).sum()) == 6 * 72 * 2048


def test_a_prefill_of_one_token_pages_copies_in_wide_rows() -> None:
    planned = plan_of("K and V by turns", layers=36, pages=450_000, row=2048)
    assert planned.host.block_slots == 64
    runs = some_runs(planned, list(range(1000, 1128)), list(range(64, 192)))
    assert runs["pages"].tolist() == [64, 64]
    for direction in Direction:
        batch = planned.batch(planned.group(0, 36), runs, direction)
        assert set(batch.rows["width"].tolist()) == {131072}
        assert len(batch.boxes) == 0


def test_pages_that_lie_whole_on_both_sides_are_one_row() -> None:
    buffers, _ = stacked("page after page", 8, 100, 4096, 4096, [0])
    pool = PoolSpec(name="kv", num_pages=100, page_tokens=64, buffers=buffers)
    planned = PoolPlan(pool, [1 << 40], layout_of(pool, 1, 16))
    batch = planned.batch(
        planned.group(0, 8), some_runs(planned, [3, 50], [0, 1]), Direction.RESTORE
    )
    assert len(batch.boxes) == 0
    assert batch.rows["width"].tolist() == [16 * 4096] * 2


def test_irregular_layers_fall_into_the_progressions_that_they_have() -> None:
    points = [(n * 1000, n * 10) for n in range(12)]
    points += [(100_000 + n * 700, 120 + n * 10) for n in range(9)]
    points += [(500_000, 210)]
    chains = list(operations.progressions(sorted(points), 10))
    assert sorted(len(chain) for chain in chains) == [1, 9, 12]
    assert sorted(point for chain in chains for point in chain) == sorted(points)


SLOT = st.integers(-(2**63), 2**63 - 1)


@example(first=128, span=63, tokens=64)
@example(first=-64, span=63, tokens=64)
@example(first=2**63 - 64, span=63, tokens=64)
@example(first=2**63 - 63, span=63, tokens=64)
@given(first=SLOT, span=st.integers(-2, 70) | SLOT, tokens=st.sampled_from([2, 3, 64, 256]))
def test_a_page_is_named_by_its_own_first_and_last_slot_alone(
    first: int, span: int, tokens: int
) -> None:
    last = (first + span + 2**63) % 2**64 - 2**63
    slots, ends = np.array([[first, last]]), np.array([0, tokens - 1])
    if first % tokens == 0 and last == first + tokens - 1:
        assert whole_pages(slots, ends).tolist() == [first // tokens]
        return
    with pytest.raises(PlanError, match=f"token slots {first} to {last} are no page of {tokens}"):
        whole_pages(slots, ends)


@pytest.mark.parametrize("page", [-1, 80, 2**40, -(2**63)])
def test_a_page_that_was_not_registered_is_refused_by_number(page: int) -> None:
    planned = plan_of("K and V by turns", layers=2, pages=80, row=64)
    with pytest.raises(PlanError, match=f"page number {page} is out of range"):
        some_runs(planned, [3, page], [0, 1])


def test_a_slot_beyond_its_chunk_is_refused() -> None:
    planned = plan_of("K and V by turns", layers=2, pages=80, row=64)
    slots = np.array([planned.host.chunk_slots], np.uint64)
    with pytest.raises(PlanError, match=f"slot {slots[0]} is out of range"):
        planned.runs(np.array([3]), np.zeros(1, np.uint64), slots)


@given(
    counts=st.lists(st.integers(1, 64), max_size=200),
    most=st.integers(1, 50),
    page_bytes=st.integers(1, 8 << 20),
)
def test_pieces_are_short_and_lose_nothing(counts: list[int], most: int, page_bytes: int) -> None:
    runs = np.zeros(len(counts), operations.RUNS)
    runs["pages"], runs["page"] = counts, np.arange(len(counts))
    limit = 64 << 20
    pieces = list(
        operations.cut(
            runs,
            np.cumsum(counts),
            page_bytes,
            most_runs=most,
            most_bytes=limit,
            first_bytes=limit,
        )
    )
    assert np.concatenate([runs[:0], *pieces])["page"].tolist() == list(range(len(counts)))
    for piece in pieces:
        assert 1 <= len(piece) <= most
        assert len(piece) == 1 or piece["pages"].sum() * page_bytes <= limit


def test_a_job_begins_with_short_pieces() -> None:
    planned = plan_of("an allocation a layer", layers=36, pages=300, row=131072)
    runs = some_runs(planned, list(range(0, 300, 2)), list(range(150)))
    group = planned.group(0, 4)
    sizes = [int(piece["pages"].sum()) * group.page_bytes for piece in planned.cut(group, runs)]
    begun = [
        int(piece["pages"].sum()) * group.page_bytes
        for piece in planned.cut(group, runs, begins=True)
    ]
    assert sum(begun) == sum(sizes)
    assert begun[0] <= plan.FIRST_PIECE_BYTES < sizes[0]
    assert all(later <= 2 * before + group.page_bytes for before, later in pairwise(begun))
    assert max(begun) == max(sizes)


@pytest.mark.parametrize("arrangement", ["an allocation a layer", "K and V by turns"])
def test_pages_in_order_of_their_slots_are_merged_wherever_their_chunks_lie(
    arrangement: str,
) -> None:
    planned = plan_of(arrangement, layers=2, pages=1024, row=2048)
    pages, slots = np.arange(256), np.arange(256, dtype=np.uint64)
    chunks = np.repeat(np.array([4 << 30, 1 << 30], np.uint64), 128)
    runs = planned.runs(pages, chunks, slots % np.uint64(128))
    assert runs["pages"].tolist() == [planned.host.block_slots] * (256 // planned.host.block_slots)


def groups_of(planned: PoolPlan, runs: np.ndarray, layers: int) -> list[tuple[int, int]]:
    nbytes = int(runs["pages"].sum()) * planned.host.slot_bytes
    return plan.layer_groups([(planned, runs)], layers, nbytes)


@given(
    layers=st.integers(1, 100),
    row=st.sampled_from([512, 2048, 32768, 131072]),
    pages=st.integers(0, 600),
    merged=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_layer_groups_cover_every_layer_once_in_order(
    layers: int, row: int, pages: int, merged: bool
) -> None:
    planned = plan_of("K and V by turns", layers=layers, pages=2000, row=row)
    step = 1 if merged else 3
    runs = some_runs(planned, [n * step for n in range(pages)], list(range(pages)))
    groups = groups_of(planned, runs, layers)
    assert groups[0][0] == 0
    assert groups[-1][1] == layers
    assert all(a[1] == b[0] and a[0] < a[1] for a, b in pairwise(groups))
    assert len(groups) <= 8
    total = pages * planned.group(0, layers).page_bytes
    assert len(groups) == 1 or total // len(groups) >= plan.GROUP_BYTES


@pytest.mark.parametrize(
    ("arrangement", "row", "groups"),
    [
        # Wide rows go one by one.
        ("K and V by turns", 131072, 8),
        # A page folds into one box of 72 rows, and every cut costs one more.
        ("K and V by turns", 61440, 3),
        ("K and V by turns", 32768, 2),
        ("K and V by turns", 2048, 1),
        # Boxes end at the layers anyway, or there are none.
        ("an allocation a layer", 131072, 8),
        ("an allocation a layer", 2048, 8),
    ],
)
def test_a_restore_is_cut_as_often_as_its_boxes_allow(
    arrangement: str, row: int, groups: int
) -> None:
    pages = 80 * 131072 // row
    planned = plan_of(arrangement, layers=36, pages=2 * pages, row=row, by_layer=True)
    runs = some_runs(planned, list(range(0, 2 * pages, 2)), list(range(pages)))
    found = groups_of(planned, runs, 36)
    assert len(found) == groups
    assert max(end - first for first, end in found) <= min(end - first for first, end in found) + 1


def test_a_run_of_small_pages_is_cut_like_a_large_page() -> None:
    planned = plan_of("K and V by turns", layers=36, pages=7000, row=2048, by_layer=True)
    runs = some_runs(planned, list(range(640)), list(range(640)))
    assert len(groups_of(planned, runs, 36)) == 8


def test_a_small_restore_is_not_cut() -> None:
    tiny = plan_of("K and V by turns", layers=36, pages=7000, row=2048)
    assert groups_of(tiny, some_runs(tiny, [7], [3]), 36) == [(0, 36)]


GIB = 1 << 30


@example(width=131072, factors=[14_063, 131072])  # 450k tokens of Qwen3-8B: 1.84 GB a layer
@example(width=64 * 2048, factors=[900_001, 2048])  # merged rows, no divisor but the row's own
@example(width=1, factors=[2_147_483_659])  # a prime over 2 GiB
@given(
    width=st.integers(1, 1 << 20),
    factors=st.lists(st.integers(1, 1 << 12), min_size=1, max_size=4),
)
def test_a_row_length_divides_the_stride_and_holds_the_row(width: int, factors: list[int]) -> None:
    stride = 1
    for factor in factors:
        stride *= factor
    (length,) = records.row_lengths(np.array([stride], np.uint64), np.array([width], np.uint64))
    if length:
        assert stride % int(length) == 0
        assert width <= int(length) <= max(width, records.LONGEST_ROW)


def test_strides_of_real_pools_have_a_row_length() -> None:
    for tokens in (450_000, 524_288, 600_013, 1_000_001):
        for row in (1024, 2048, 4096):
            for merged in (1, 3, 64):
                stride = np.array([tokens * row], np.uint64)
                assert records.row_lengths(stride, np.array([merged * row], np.uint64))[0]


def test_record_sizes_are_those_of_cuda_h() -> None:
    assert records.BOX.itemsize == 112
    assert records.ATTRIBUTES.itemsize == 24


def test_the_layout_of_a_one_token_pool_is_blocks_of_64() -> None:
    assert host_layout([2048] * 72).block_slots == 64
    assert host_layout([131072] * 72).block_slots == 1
