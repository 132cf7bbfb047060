"""The CUDA backend against the memory of another process: every byte, both directions, at rate.

The exporter is a process of its own with torch in it, as a rank is: CUDA does not open a handle
in the process that made it. Rates are printed as fractions of a contiguous pinned copy taken in
the same run.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from tierd.channel import Channel
from tierd.copier.backend import BackendError, Chunk, DeviceLostError, SharedMemory
from tierd.copier.operations import OPS
from tierd.copier.plan import WIDE_ROW_BYTES, Batch, Direction, Path, PoolPlan
from tierd.wire import codec, layout
from tierd.wire.geometry import HostLayout, pool_layout
from tierd.wire.messages import Allocation, BufferSpec, CopierReady, PoolSpec, Shutdown

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

GIB = 1 << 30
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Shape:
    """K and V of some layers: as one tensor a layer, or as one tensor for all.

    `gap`: bytes left between two halves of an arena, so that strides are no powers of two.
    """

    kind: str
    layers: int
    pages: int
    row: int
    gap: int = 0

    @property
    def extent(self) -> int:
        return self.pages * self.row + self.gap

    def tensors(self) -> list[int]:
        """Bytes of each tensor."""
        if self.kind == "stock":
            return [2 * self.extent] * self.layers
        return [2 * self.layers * self.extent]

    def place(self, layer: int, half: int) -> tuple[int, int]:
        """Tensor and byte offset of a buffer."""
        if self.kind == "stock":
            return layer, half * self.extent
        if self.kind == "arena":
            return 0, (2 * layer + half) * self.extent
        return 0, (half * self.layers + layer) * self.extent


def exporter(pipe: Connection) -> None:
    """A rank: makes tensors, hands out their handles, and shows what they hold."""
    from cuda.bindings import driver

    torch.cuda.set_device(0)
    tensors: list[Any] = []
    before: list[Any] = []
    shape = Shape("stock", 0, 0, 0)

    def rows(source: list[Any], page: int) -> list[Any]:
        places = [shape.place(layer, half) for layer in range(shape.layers) for half in range(2)]
        return [source[n][at + page * shape.row :][: shape.row] for n, at in places]

    while True:
        what, argument = pipe.recv()
        if what == "make":
            shape = argument
            tensors = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in shape.tensors()]
            for tensor in tensors:
                for part in tensor.split(1 << 30):
                    part.random_(0, 256)
            torch.cuda.synchronize()
            exports = []
            for tensor in tensors:
                error, base, size = driver.cuMemGetAddressRange(tensor.data_ptr())
                assert not int(error)
                error, handle = driver.cuIpcGetMemHandle(base)
                assert not int(error)
                exports.append(
                    (
                        ctypes.string_at(handle.getPtr(), 64),
                        int(size),
                        tensor.data_ptr() - int(base),
                    )
                )
            pipe.send(exports)
        elif what == "page":
            pipe.send([row.cpu().numpy().tobytes() for row in rows(tensors, argument)])
        elif what == "remember":
            before = [tensor.clone() for tensor in tensors]
            pipe.send(None)
        elif what == "changed":
            # Pages with a byte that differs; -1 stands for bytes that are in no page.
            changed = set()
            for page in range(shape.pages):
                for now, then in zip(rows(tensors, page), rows(before, page), strict=True):
                    if not torch.equal(now, then):
                        changed.add(page)
                        then.copy_(now)
            if not all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True)):
                changed.add(-1)
            pipe.send(changed)
        elif what == "free":
            tensors, before = [], []
            torch.cuda.empty_cache()
            pipe.send(None)
        else:
            return


class Exporter:
    """This process's end of one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=exporter, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, what: str, argument: Any = None) -> Any:
        self.pipe.send((what, argument))
        assert self.pipe.poll(PATIENCE_S), f"the exporter does not answer {what!r}"
        return self.pipe.recv()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(("stop", None))
        self.process.join(PATIENCE_S)
        self.process.kill()


class Host:
    """Chunks of shared memory, mapped by the backend and by this test."""

    def __init__(self, backend: Any, chunks: int, nbytes: int) -> None:
        self.views, self.chunks = [], list[Chunk]()
        for _ in range(chunks):
            fd = os.memfd_create("tierd-test-chunk")
            os.ftruncate(fd, nbytes)
            self.views.append(np.frombuffer(mmap.mmap(fd, nbytes), np.uint8))
            self.chunks.append(backend.map_chunk(fd, nbytes, touch=True))
            os.close(fd)

    def slot(self, plan: HostLayout, chunk: int, slot: int) -> list[bytes]:
        where = slot % plan.block_slots
        block = plan.data_offset + (slot - where) * plan.slot_bytes
        return [
            self.views[chunk][block + plan.block_slots * at + where * row :][:row].tobytes()
            for at, row in zip(plan.row_offsets, plan.rows, strict=True)
        ]

    def close(self) -> None:
        for chunk in self.chunks:
            chunk.close()


def uuid_of(device: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    from tierd.copier.cuda import CudaBackend

    opened = CudaBackend(uuid_of(0))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def rank() -> Iterator[Exporter]:
    process = Exporter()
    yield process
    process.close()


@pytest.fixture
def segment() -> tuple[SharedMemory, layout.Segment]:
    spec = layout.SegmentSpec(backup_ring=64, restore_ring=64, max_layers=64)
    fd = os.memfd_create("tierd-test-segment")
    os.ftruncate(fd, spec.nbytes)
    memory = SharedMemory(fd, spec.nbytes)
    os.close(fd)
    return memory, layout.Segment(memory.memory, spec)


class Attached:
    """A rank's pool of a shape, attached, with chunks for its slots."""

    def __init__(
        self, backend: Any, rank: Exporter, segment: SharedMemory, shape: Shape, host_bytes: int
    ) -> None:
        self.backend, self.rank, self.shape = backend, rank, shape
        exports = rank.ask("make", shape)
        buffers = []
        for layer in range(shape.layers):
            for half in range(2):
                tensor, offset = shape.place(layer, half)
                buffers.append(
                    BufferSpec(
                        allocation=tensor,
                        offset=exports[tensor][2] + offset,
                        page_stride=shape.row,
                        row_bytes=shape.row,
                        layer=layer,
                    )
                )
        pool = PoolSpec(name="kv", num_pages=shape.pages, page_tokens=1, buffers=buffers)
        self.attachment = backend.attach(
            [Allocation(size=size, handle=handle) for handle, size, _ in exports], [], segment
        )
        self.layout = pool_layout(pool)
        self.plan = PoolPlan(pool, self.attachment.addresses, self.layout)
        chunks = max(1, -(-host_bytes // self.layout.chunk_bytes))
        self.host = Host(backend, chunks, self.layout.chunk_bytes)
        self.slots = chunks * self.layout.chunk_slots

    def move(self, direction: Direction, pages: list[int], slots: list[int]) -> int:
        """As the worker does it: pieces, two on the wire. Returns the bytes moved."""
        number = np.array(slots, np.uint64)
        per_chunk = np.uint64(self.layout.chunk_slots)
        addresses = np.array([chunk.address for chunk in self.host.chunks], np.uint64)
        runs = self.plan.runs(
            np.array(pages, np.int64), addresses[number // per_chunk], number % per_chunk
        )
        wire = deque[Any]()
        for piece in self.plan.pieces(self.plan.group(0, self.plan.layers), runs, direction):
            if len(wire) == 2:
                wait(self.backend, wire.popleft())
            self.backend.submit(direction, piece)
            wire.append(self.backend.record(direction))
        for marker in wire:
            wait(self.backend, marker)
        return len(pages) * self.layout.slot_bytes

    def slot(self, number: int) -> list[bytes]:
        return self.host.slot(self.layout, *divmod(number, self.layout.chunk_slots))

    def close(self) -> None:
        self.attachment.close()
        self.host.close()
        self.rank.ask("free")


def wait(backend: Any, marker: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not backend.retired(marker):
        assert time.monotonic() < deadline, "copies do not retire"


@pytest.fixture
def attach(
    backend: Any, rank: Exporter, segment: tuple[SharedMemory, layout.Segment]
) -> Iterator[Callable[..., Attached]]:
    with contextlib.ExitStack() as stack:

        def make(shape: Shape, host_bytes: int = 128 << 20) -> Attached:
            needed = sum(shape.tensors())
            if torch.cuda.mem_get_info()[0] < needed + 2 * GIB:
                pytest.skip(f"needs {needed / GIB:.0f} GiB of free GPU memory")
            attached = Attached(backend, rank, segment[0], shape, host_bytes)
            stack.callback(attached.close)
            return attached

        yield make


@pytest.mark.parametrize("row", [2048, 32768, 131072])
@pytest.mark.parametrize(
    ("kind", "gap", "path"),
    [
        ("stock", 0, Path.ROWS),
        ("arena", 0, Path.STRIDED),
        ("arena", 4096 + 16, Path.STRIDED),
        ("all K, then all V", 512, Path.STRIDED),
    ],
)
def test_pages_are_backed_up_and_restored_byte_for_byte(
    attach: Callable[..., Attached], kind: str, gap: int, path: Path, row: int
) -> None:
    pool = attach(Shape(kind, layers=9, pages=200, row=row, gap=gap))
    assert pool.plan.path is (path if row < WIDE_ROW_BYTES else Path.ROWS)
    rng = np.random.default_rng(row)
    # A run that merges, then pages from everywhere.
    slots = [*range(20), *(int(n) for n in 20 + rng.permutation(pool.slots - 20)[:40])]
    apart = len(slots) - 20
    pages = [*range(40, 60), *(int(n) for n in rng.permutation(40)[:apart])]
    pool.move(Direction.BACKUP, pages, slots)
    for page, slot in zip(pages, slots, strict=True):
        assert pool.slot(slot) == pool.rank.ask("page", page)

    targets = [*range(100, 120), *(int(n) for n in 120 + rng.permutation(80)[:apart])]
    pool.rank.ask("remember")
    pool.move(Direction.RESTORE, targets, slots)
    for target, page in zip(targets, pages, strict=True):
        assert pool.rank.ask("page", target) == pool.rank.ask("page", page)
    assert pool.rank.ask("changed") == set(targets)


def test_words_are_written_behind_the_copies(
    attach: Callable[..., Attached], segment: tuple[SharedMemory, layout.Segment], backend: Any
) -> None:
    pool = attach(Shape("arena", layers=9, pages=200, row=131072))
    words = segment[1]
    offsets = [words.layer_offset(2, layer) for layer in range(9)]
    pages = list(range(100))
    number = np.array(pages[: pool.slots], np.uint64)
    runs = pool.plan.runs(
        np.array(pages[: pool.slots], np.int64),
        np.array([c.address for c in pool.host.chunks], np.uint64)[
            number // np.uint64(pool.layout.chunk_slots)
        ],
        number % np.uint64(pool.layout.chunk_slots),
    )
    backend.submit(
        Direction.RESTORE, pool.plan.batch(pool.plan.group(0, 9), runs, Direction.RESTORE)
    )
    copied = backend.record(Direction.RESTORE)
    backend.write_words(pool.attachment, offsets, 77)
    written = backend.record(Direction.RESTORE)
    while not (words.layers[2, :9] == 77).all():
        assert not words.layers[2, 9:].any()
    assert backend.retired(copied)
    wait(backend, written)
    assert int(words.layers.sum()) == 9 * 77


def test_a_refused_call_fails_alone(attach: Callable[..., Attached], backend: Any) -> None:
    pool = attach(Shape("stock", layers=9, pages=200, row=131072))
    # From one allocation far into whatever lies behind it.
    box = np.zeros(1, OPS)
    box["device"], box["host"] = pool.attachment.addresses[0], pool.host.chunks[0].address
    box["width"], box["depth"] = 131072, 2
    box["device_stride"], box["host_stride"] = 1 << 30, 131072
    row = box.copy()
    row["width"], row["depth"] = 60 << 20, 1
    nothing = np.zeros(0, OPS)
    for batch in (Batch(boxes=box, rows=nothing), Batch(boxes=nothing, rows=row)):
        with pytest.raises(BackendError, match=r"cuMemcpy.*CUDA_ERROR") as refused:
            backend.submit(Direction.BACKUP, batch)
        assert not isinstance(refused.value, DeviceLostError)
        wait(backend, backend.record(Direction.BACKUP))
    pool.move(Direction.BACKUP, [1], [0])
    assert pool.slot(0) == pool.rank.ask("page", 1)


def test_a_handle_that_opens_nothing_is_refused(
    backend: Any, segment: tuple[SharedMemory, layout.Segment]
) -> None:
    with pytest.raises(BackendError, match="cuIpcOpenMemHandle"):
        backend.attach([Allocation(size=4096, handle=bytes(64))], [], segment[0])


def test_memory_of_a_killed_rank_can_still_be_let_go(
    backend: Any, segment: tuple[SharedMemory, layout.Segment]
) -> None:
    rank = Exporter()
    pool = Attached(backend, rank, segment[0], Shape("stock", 9, 2000, 131072), 64 << 20)
    held = torch.cuda.mem_get_info()[0]
    rank.process.kill()
    rank.process.join(PATIENCE_S)
    pool.move(Direction.BACKUP, [3], [0])
    pool.attachment.close()
    pool.host.close()
    # All of it: the dead process's context alone is a tenth of that.
    deadline = time.monotonic() + PATIENCE_S
    while torch.cuda.mem_get_info()[0] < held + sum(pool.shape.tensors()):
        assert time.monotonic() < deadline, "the dead rank's GPU memory stays allocated"


def test_a_copier_process_says_what_its_context_costs() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tierd.copier", "--device", uuid_of(0), "--channel-fd"]
    process = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    channel = Channel(ours, codec.FROM_COPIER)
    ((ready, _),) = channel.wait(PATIENCE_S)
    assert isinstance(ready, CopierReady)
    assert ready.detail["backend"] == "cuda"
    print(f"\n{ready.detail}")
    assert 0 < ready.detail.get("gpu_memory_bytes", 1) < 2 * GIB
    channel.send(Shutdown())
    assert process.wait(PATIENCE_S) == 0
    channel.close()


def contiguous(backend: Any, pool: Attached, direction: Direction) -> float:
    """Bytes a second of plain pinned copies, one chunk at a time."""
    size = min(pool.layout.chunk_bytes, pool.shape.extent)
    base = pool.attachment.addresses[0] + pool.plan.pool.buffers[0].offset
    ops = np.zeros(len(pool.host.chunks), OPS)
    ops["host"] = [chunk.address for chunk in pool.host.chunks]
    ops["device"], ops["width"], ops["depth"] = base, size, 1
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        backend.submit(direction, Batch(boxes=ops[:0], rows=ops))
        wait(backend, backend.record(direction))
        best = max(best, len(ops) * size / (time.perf_counter() - start))
    return best


TOKENS = 450_000
"""Of a pool of Qwen3-8B's geometry: 1.84 GB from layer to layer."""


@pytest.mark.parametrize(
    ("kind", "tokens", "page", "run", "floor"),
    [
        ("arena", TOKENS, 64, 1, 0.85),
        ("arena", TOKENS, 16, 1, 0.75),
        ("arena", TOKENS, 1, 1, 0.15),
        ("arena", TOKENS, 1, 64, 0.5),
        ("arena", TOKENS, 1, 48, 0.5),
        ("arena", 600_000, 64, 1, 0.85),
        ("arena", 600_000, 1, 64, 0.5),
        ("arena", 600_013, 1, 64, 0.5),
        ("all K, then all V", TOKENS, 64, 1, 0.85),
        ("stock", TOKENS, 64, 1, 0.7),
        ("stock", TOKENS, 16, 1, 0.2),
        ("stock", TOKENS, 1, 64, 0.7),
        ("stock", TOKENS, 1, 1, 0.02),
    ],
)
def test_rates_over_a_real_pool(
    attach: Callable[..., Attached],
    backend: Any,
    kind: str,
    tokens: int,
    page: int,
    run: int,
    floor: float,
) -> None:
    """`page`: tokens of a page; `run`: pages that lie side by side on both sides."""
    row = 2048 * page
    pool = attach(Shape(kind, layers=36, pages=tokens // page, row=row), host_bytes=GIB // 2)
    rng = np.random.default_rng(0)
    per_block = pool.layout.block_slots
    blocks = min(pool.slots // per_block, max(1, 4096 // run if per_block > 1 else pool.slots))
    if run > 1:
        starts = rng.permutation(pool.shape.pages // per_block)[:blocks] * per_block
        pages = [int(start) + n for start in starts for n in range(run)]
        slots = [block * per_block + n for block in range(blocks) for n in range(run)]
    else:
        count = min(pool.slots, 4096)
        pages = [int(n) for n in rng.permutation(pool.shape.pages)[:count]]
        slots = list(range(count))
    line = f"\n{kind}, {tokens} tokens, rows of {row}, runs of {run} ({pool.plan.path_text}):"
    fractions = []
    for direction in Direction:
        reference = contiguous(backend, pool, direction)
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            moved = pool.move(direction, pages, slots)
            best = max(best, moved / (time.perf_counter() - start))
        fractions.append(best / reference)
        line += f" {direction.name} {best / 1e9:.1f} GB/s = {best / reference:.2f}"
    print(line, flush=True)
    assert min(fractions) > floor
