"""What chunks are made of: huge pages if there are any, near the GPU, and really there."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tierd.control.keys import MISSING
from tierd.copier.backend import map_chunk_file
from tierd.memory import placement
from tierd.memory.chunks import ChunkRows, ChunkStore
from tierd.memory.hugepages import (
    GIB_1,
    MIB_2,
    SHMEM_POLICY,
    PagePlan,
    Reserved,
    how_to_reserve,
    joined_pages,
    joining_note,
    plan_pages,
    reserved_pages,
)
from tierd.memory.source import AnonymousMemory
from tierd.wire import layout
from tierd.wire.geometry import CHUNK_BYTES, host_layout

GIB = 1 << 30
KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])


def reserve(root: Path, kib: int, **counts: int) -> None:
    """The files in which a kernel shows its huge pages of one size."""
    directory = root / f"sys/kernel/mm/hugepages/hugepages-{kib}kB"
    directory.mkdir(parents=True)
    for name in ("nr", "free", "resv"):
        (directory / f"{name}_hugepages").write_text(f"{counts.get(name, 0)}\n")


def test_huge_pages_that_others_were_promised_are_not_free(tmp_path: Path) -> None:
    reserve(tmp_path, 2048, nr=100, free=60, resv=20)
    reserve(tmp_path, 1048576)
    assert reserved_pages(tmp_path) == {MIB_2: Reserved(100, 40), GIB_1: Reserved(0, 0)}
    assert reserved_pages(tmp_path / "nowhere") == {}


def test_the_machine_itself_says_what_it_has() -> None:
    sizes = [line.split() for line in Path("/proc/meminfo").read_text().splitlines()]
    usual = [int(words[1]) * 1024 for words in sizes if words[0] == "Hugepagesize:"]
    assert set(usual) <= reserved_pages().keys()


def test_enough_huge_pages_are_taken_without_a_word() -> None:
    plan = plan_pages("auto", 64 * GIB, 1, {MIB_2: Reserved(40000, 32768)})
    assert plan == PagePlan(((MIB_2, 64 * GIB),))
    assert plan_pages("2MiB", 64 * GIB, 1, {MIB_2: Reserved(40000, 32768)}) == plan


def test_what_is_missing_is_said_with_the_command_that_reserves_it() -> None:
    few = {MIB_2: Reserved(6000, 5120)}
    plan = plan_pages("2MiB", 64 * GIB, 1, few)
    assert plan.huge == ((MIB_2, 10 * GIB),)
    assert plan.short
    assert "10.0 GiB of 64.0 GiB are reserved" in plan.note
    assert how_to_reserve(MIB_2, 6000 + 32768 - 5120) in plan.note
    assert not plan_pages("auto", 64 * GIB, 1, few).short, "nobody asked for them"
    one_less = plan_pages("2MiB", 64 * GIB, 1, {MIB_2: Reserved(32767, 32767)})
    assert one_less.huge_bytes == 64 * GIB - CHUNK_BYTES, "a chunk is of one kind of pages"
    assert how_to_reserve(MIB_2, 32768) in one_less.note
    none = plan_pages("2MiB", 64 * GIB, 1, {})
    assert (none.huge, none.short) == ((), True)
    assert how_to_reserve(MIB_2, 32768) in none.note


def test_pages_of_a_gib_make_chunks_of_a_gib() -> None:
    plan = plan_pages("1GiB", 8 * GIB, 1, {GIB_1: Reserved(8, 8)})
    assert (plan.huge, plan.chunk_bytes, plan.note) == (((GIB_1, 8 * GIB),), GIB, "")
    short = plan_pages("1GiB", 8 * GIB, 1, {GIB_1: Reserved(2, 2), MIB_2: Reserved(512, 512)})
    assert (short.huge, short.chunk_bytes) == (((GIB_1, 2 * GIB), (MIB_2, GIB)), GIB)
    assert short.huge_bytes == 3 * GIB
    assert "hugepages-1048576kB" in short.note
    none = plan_pages("1GiB", 8 * GIB, 1, {})
    assert (none.huge, none.chunk_bytes) == ((), CHUNK_BYTES)


def test_by_itself_a_daemon_takes_pages_of_a_gib_only_where_all_fits_and_is_much() -> None:
    reserved = {GIB_1: Reserved(64, 64), MIB_2: Reserved(32768, 32768)}
    assert plan_pages("auto", 64 * GIB, 1, reserved).chunk_bytes == GIB
    assert plan_pages("auto", 64 * GIB, 8, reserved).chunk_bytes == CHUNK_BYTES
    assert plan_pages("auto", 65 * GIB, 1, reserved).huge == ((MIB_2, 64 * GIB),)
    assert plan_pages("off", 64 * GIB, 1, reserved) == PagePlan()


def test_a_file_is_in_ordinary_pages_where_no_huge_ones_are_left() -> None:
    left = reserved_pages().get(GIB_1, Reserved(0, 0)).free
    size = (left + 1) * GIB
    file = AnonymousMemory({GIB_1: size}).create(1, size)
    assert file.page_bytes == mmap.PAGESIZE
    assert os.fstat(file.fd).st_size == size
    os.close(file.fd)


def test_the_store_counts_what_it_has_made_and_stops_at_its_budget() -> None:
    store = ChunkStore(2 * CHUNK_BYTES, AnonymousMemory())
    chunks = [store.create(CHUNK_BYTES, "host:0") for _ in range(3)]
    assert chunks.pop() is None
    assert store.created_bytes == sum(store.bytes_by_page.values()) == 2 * CHUNK_BYTES
    for chunk in chunks:
        assert chunk is not None
        store.discard(chunk)
    assert store.created_bytes == 0


def test_what_the_kernel_has_joined_is_told_from_what_was_reserved() -> None:
    store = ChunkStore(2 * CHUNK_BYTES, AnonymousMemory())
    first, second = (store.create(CHUNK_BYTES, "host:0") for _ in range(2))
    assert first is not None
    assert second is not None
    store.note_joined(first.number, CHUNK_BYTES)
    store.note_joined(second.number, 4 * MIB_2)
    store.note_joined(second.number, 2 * MIB_2)  # another copier, or the same one again
    store.note_joined(17, MIB_2)  # gone meanwhile
    assert store.joined_bytes == CHUNK_BYTES + 2 * MIB_2
    assert store.bytes_by_page == {mmap.PAGESIZE: 2 * CHUNK_BYTES}
    store.discard(first)
    assert store.joined_bytes == 2 * MIB_2
    store.discard(second)
    assert store.joined_bytes == 0


def test_a_chunk_that_is_laid_out_again_shows_nothing_of_before() -> None:
    store = ChunkStore(CHUNK_BYTES, AnonymousMemory())
    chunk = store.create(CHUNK_BYTES, "host:0")
    assert chunk is not None
    one_token, large = host_layout([2048] * 4), host_layout([1 << 20] * 4)
    chunk.lay_out(one_token, shard=0, shards=1, ordinal=3, namespace=b"n" * 32, pool="kv")
    chunk.headers["state"] = layout.COMMITTED
    chunk.wipe()
    assert int(layout.chunk_header(chunk.memory)["magic"][0]) == 0
    chunk.lay_out(large, shard=1, shards=2, ordinal=0, namespace=b"m" * 32, pool="swa")
    assert len(chunk.headers) == large.chunk_slots
    assert (chunk.headers["state"] == layout.FREE).all()
    chunk.lay_out(one_token, shard=0, shards=1, ordinal=0, namespace=b"n" * 32, pool="kv")
    assert (chunk.headers["state"] == layout.FREE).all()
    store.discard(chunk)


def two_nodes(root: Path, bus: str, node: int) -> None:
    for n in range(2):
        (root / f"sys/devices/system/node/node{n}").mkdir(parents=True)
    device = root / f"sys/bus/pci/devices/{bus}"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")


def test_a_gpu_has_the_node_that_its_slot_is_attached_to(tmp_path: Path) -> None:
    two_nodes(tmp_path, "0000:1b:00.0", 1)
    assert placement.node_of_gpu("0000:1B:00.0", tmp_path) == 1
    assert placement.node_of_gpu("0000:2B:00.0", tmp_path) is None


def test_a_machine_with_one_node_or_a_silent_firmware_has_none(tmp_path: Path) -> None:
    two_nodes(tmp_path / "a", "0000:1b:00.0", -1)
    assert placement.node_of_gpu("0000:1b:00.0", tmp_path / "a") is None
    (tmp_path / "b/sys/devices/system/node/node0").mkdir(parents=True)
    assert placement.node_of_gpu("0000:1b:00.0", tmp_path / "b") is None


def may_bind() -> bool:
    """Containers often may not."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = ctypes.c_char.from_buffer(page)
        try:
            placement.prefer_node(ctypes.addressof(view), mmap.PAGESIZE, 0)
        except OSError:
            return False
        finally:
            del view
    return True


@pytest.mark.skipif(not may_bind(), reason="this machine lets nobody place memory")
def test_pages_can_be_asked_for_on_a_node_that_exists() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = ctypes.c_char.from_buffer(page)
        with pytest.raises(OSError, match="mbind"):
            placement.prefer_node(ctypes.addressof(view), mmap.PAGESIZE, 1023)
        del view


def test_pages_are_there_once_they_are_populated() -> None:
    file = AnonymousMemory().create(1, 4 << 20)
    memory = mmap.mmap(file.fd, 4 << 20)
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    assert os.fstat(file.fd).st_blocks == 0
    placement.populate(address, 4 << 20)
    assert os.fstat(file.fd).st_blocks * 512 == 4 << 20
    del view
    memory.close()
    os.close(file.fd)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("always within_size advise [never] deny force", "never"),
        ("always within_size [advise] never deny force", "advise"),
        ("nonsense", "never"),
        (None, "never"),
    ],
)
def test_the_kernels_policy_of_joining_pages_is_read(
    tmp_path: Path, text: str | None, policy: str
) -> None:
    if text is not None:
        (tmp_path / SHMEM_POLICY).parent.mkdir(parents=True)
        (tmp_path / SHMEM_POLICY).write_text(text + "\n")
    assert joined_pages(tmp_path) == policy
    assert (f"echo advise > /{SHMEM_POLICY}" in joining_note(policy)) == (policy == "never")


def test_a_chunk_keeps_what_is_in_it_when_it_is_mapped_for_huge_pages() -> None:
    fd = os.memfd_create("tierd-test")
    os.ftruncate(fd, CHUNK_BYTES)
    os.pwrite(fd, b"here", CHUNK_BYTES - 4)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        address = map_chunk_file(stack, fd, CHUNK_BYTES, touch=True, node=None)
        assert ctypes.string_at(address + CHUNK_BYTES - 4, 4) == b"here"
        (there,) = (os.fstat(fd).st_blocks * 512,)
        assert there == CHUNK_BYTES


@pytest.mark.skipif(joined_pages() != "advise", reason="the kernel does not join pages on request")
def test_a_chunk_lies_in_huge_pages_where_the_kernel_lets_it() -> None:
    fd = os.memfd_create("tierd-test")
    os.ftruncate(fd, CHUNK_BYTES)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        address = map_chunk_file(stack, fd, CHUNK_BYTES, touch=True, node=None)
        assert smaps_kib(address, "ShmemPmdMapped") > 0


def smaps_kib(address: int, name: str) -> int:
    """What the kernel counts under a name in the mapping that begins there."""
    smaps = Path("/proc/self/smaps").read_text().split(f"{address:x}-", 1)[1]
    line = next(line for line in smaps.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


@pytest.mark.parametrize("wanted", [True, False])
def test_what_lies_in_huge_pages_is_as_the_kernel_counts_it(wanted: bool) -> None:
    size = 32 * MIB_2
    memory = mmap.mmap(-1, size + MIB_2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    address = -(-begin // MIB_2) * MIB_2
    assert placement.joined_bytes(address, size) == 0
    memory.madvise(mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE)
    placement.populate(address, size)
    if KERNEL < (6, 7):
        assert placement.joined_bytes(address, size) == 0, "it cannot say"
        return

    def agreed() -> bool:
        """The kernel may join or split pages between the two looks."""
        return placement.joined_bytes(address, size) == smaps_kib(begin, "AnonHugePages") << 10

    assert any(agreed() for _ in range(5))


def test_a_slot_lies_in_the_chunk_of_its_row_or_in_none() -> None:
    host = host_layout([1 << 20] * 8)
    store = ChunkStore(6 * CHUNK_BYTES, AnonymousMemory())
    rows, numbers = ChunkRows(host), {}
    for _ in range(3):
        row = [chunk for _ in range(2) if (chunk := store.create(CHUNK_BYTES, "host:0"))]
        numbers[rows.add(row)] = [chunk.number for chunk in row]
    size = host.chunk_slots
    slots = np.array([2 * size, 0, size - 1, size + 3])
    for shard in range(2):
        chunks, within = rows.locate(slots, shard)
        assert chunks.tolist() == [numbers[row][shard] for row in (2, 0, 0, 1)]
        assert within.tolist() == [0, 0, size - 1, 3]

    gone = rows.remove(1)
    there = {chunk.number for row in rows.rows.values() for chunk in row}
    chunks, _ = rows.locate(np.array([MISSING, size, 2 * size - 1]), 0)
    assert not there & set(chunks.tolist()), "what is not there is in nobody's chunk"
    assert rows.add(gone) == 1
    assert rows.locate(np.array([size]), 1)[0].tolist() == [gone[1].number]
    for row in rows.rows.values():
        for chunk in row:
            store.discard(chunk)
