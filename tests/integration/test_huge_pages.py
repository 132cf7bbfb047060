"""Pages of 2 MiB under the chunks, of a hugetlbfs that outlives the daemon and without a name:
every byte comes back, and where too few are reserved nobody is killed for it.

Each test holds back all but as many huge pages as it is about, so others find none meanwhile; a
daemon that others start in the same second, and that takes huge pages, can spoil one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tier_harness import DEADLINE_S, Daemon, Engine, Shape, eventually, is_dead, running

from tierd.memory.filesystems import huge_page_bytes
from tierd.memory.hugepages import GIB_1, MIB_2, Reserved, reserved_pages
from tierd.memory.persist import SPARE_RECORDS
from tierd.memory.source import AnonymousMemory
from tierd.wire.geometry import CHUNK_BYTES

Engines = Callable[..., Engine]
CHUNK_PAGES = CHUNK_BYTES // MIB_2
WANTED = 3 * CHUNK_PAGES
"""Huge pages that all of these tests can do with."""
LARGE = Shape(page_tokens=1, pages=32, layers=2, row_bytes=2 << 20)
"""Seven pages a chunk."""
HOW_TO = (
    f"as root `echo {WANTED} > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages`, for those "
    "with --persist also `mount -t hugetlbfs -o mode=1777,pagesize=2M none /dev/hugepages`"
)


def mounted() -> Path | None:
    """A hugetlbfs with pages of 2 MiB that this user can make files on."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, _ = line.split(maxsplit=3)
        if kind == "hugetlbfs" and os.access(place, os.W_OK) and huge_page_bytes(Path(place)):
            path = Path(place)
            if huge_page_bytes(path) == MIB_2:
                return path
    return None


def free_pages() -> int:
    return reserved_pages().get(MIB_2, Reserved(0, 0)).free


@pytest.fixture
def only() -> Iterator[Callable[[int], None]]:
    """Leaves so many huge pages free until the test has ended. Tests that run side by side take
    turns."""
    turn = Path(tempfile.gettempdir()) / f"tierd-test-huge-pages-{os.geteuid()}.lock"
    with turn.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held: list[mmap.mmap] = []

        def leave(pages: int) -> None:
            for mapping in held:
                mapping.close()
            held.clear()
            free = free_pages()
            if free < max(pages, WANTED):
                pytest.skip(f"{free} huge pages of 2 MiB are free, {WANTED} wanted: {HOW_TO}")
            if free > pages:
                # A mapping has its pages set aside, untouched; MAP_HUGETLB is 0x40000.
                flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x40000
                held.append(mmap.mmap(-1, (free - pages) * MIB_2, flags=flags))

        yield leave
        for mapping in held:
            mapping.close()


@pytest.fixture
def kept() -> Iterator[Path]:
    """A directory on a hugetlbfs."""
    place = mounted()
    if place is None:
        pytest.skip(f"no hugetlbfs with pages of 2 MiB that this user can write to: {HOW_TO}")
    directory = place / f"tierd-test-{secrets.token_hex(4)}"
    directory.mkdir(mode=0o700)
    yield directory / "pages"
    shutil.rmtree(directory)


def by_page(daemon: Daemon) -> dict[int, int]:
    return {int(size): nbytes for size, nbytes in daemon.status()["memory"]["by_page"].items()}


@contextmanager
def refused(daemon: Daemon, words: str) -> Iterator[None]:
    with pytest.raises(AssertionError, match=words):
        daemon.start()
    yield
    daemon.stop()


# --- files on a hugetlbfs ---------------------------------------------------------------------


def test_pages_in_huge_pages_outlive_a_daemon_that_is_killed(
    tmp_path: Path, only: Callable[[int], None], kept: Path, engines: Engines
) -> None:
    only(2 * CHUNK_PAGES + SPARE_RECORDS)
    memory = {"memory": "128MiB", "memory_check": True, "persist": kept}
    with running(tmp_path / "run", **memory) as daemon:
        engine = engines(daemon.socket, [LARGE])
        assert engine.back_up("a", 6)
        assert engine.back_up("b", 5, at=8)
        assert by_page(daemon) == {MIB_2: 2 * CHUNK_BYTES}
        for copier in daemon.kill():
            eventually(lambda c=copier: is_dead(c.pid), "it goes with its control")
        assert {file.stat().st_size for file in kept.glob("*.chunk")} == {CHUNK_BYTES}
        assert free_pages() < CHUNK_PAGES, "what is not taken over could not be had again"
        for end in (daemon.kill, daemon.stop):
            daemon.start()
            assert "took over 11 pages" in daemon.log
            eventually(engine.connected, "the new daemon is used")
            eventually(lambda: engine.lookup("a", 6) == 6, "its copier has the old chunks")
            assert engine.restored("a", 6)
            assert engine.restored("b", 5, at=8)
            end()
            eventually(lambda: not engine.connected(), "the engine notices")


def test_more_than_the_hugetlbfs_has_is_refused_beforehand(
    tmp_path: Path, only: Callable[[int], None], kept: Path
) -> None:
    only(CHUNK_PAGES + SPARE_RECORDS - 1)
    daemon = Daemon(tmp_path, memory="64MiB", memory_check=True, persist=kept)
    with refused(daemon, r"more than the 62.0 MiB that the hugetlbfs of .* has left"):
        assert not kept.exists() or not any(kept.glob("*.chunk"))


def test_a_daemon_that_was_promised_too_many_huge_pages_serves_with_those_there_are(
    tmp_path: Path, only: Callable[[int], None], kept: Path, engines: Engines
) -> None:
    only(CHUNK_PAGES + SPARE_RECORDS)
    with running(tmp_path / "run", memory="256MiB", persist=kept) as daemon:
        engine = engines(daemon.socket, [LARGE])
        assert engine.back_up("a", 3)
        for turn in range(4):
            engine.back_up(f"more {turn}", 4, at=4 * turn)
        assert "serving on with the 64 MiB of host memory there are" in daemon.log
        assert by_page(daemon) == {MIB_2: CHUNK_BYTES}
        assert engine.back_up("b", 3, at=4)
        assert engine.restored("b", 3, at=4)
        assert daemon.copiers_ready()
        assert daemon.status()["copiers"][0]["restarts"] == 0


# --- files without a name ---------------------------------------------------------------------


def test_a_file_in_huge_pages_has_them_set_aside(only: Callable[[int], None]) -> None:
    only(4)
    memory = AnonymousMemory({GIB_1: GIB_1, MIB_2: 2 * MIB_2})
    file = memory.create(1, 2 * MIB_2)
    assert file.page_bytes == MIB_2
    assert free_pages() == 2
    more = memory.create(2, 2 * MIB_2)
    assert more.page_bytes == mmap.PAGESIZE, "no more was to be taken"
    with mmap.mmap(file.fd, 2 * MIB_2) as mapped:
        mapped[MIB_2] = 7
    for fd in (file.fd, more.fd):
        os.close(fd)
    assert free_pages() == 4
    memory.discard(1)
    again = memory.create(3, 2 * MIB_2)
    assert again.page_bytes == MIB_2
    os.close(again.fd)


def test_memory_in_huge_pages_serves_and_outlives_its_copier(
    tmp_path: Path, only: Callable[[int], None], engines: Engines
) -> None:
    only(2 * CHUNK_PAGES)
    with running(tmp_path / "run", memory="128MiB", hugepages="2MiB") as daemon:
        engine = engines(daemon.socket, [LARGE])
        assert engine.back_up("a", 6)
        assert engine.back_up("b", 5, at=8)
        assert by_page(daemon) == {MIB_2: 2 * CHUNK_BYTES}
        assert "huge pages:" not in daemon.log, "nothing is missing"
        os.kill(daemon.copier_pid(), signal.SIGKILL)
        eventually(lambda: daemon.status()["copiers"][0]["restarts"], "it is missed")
        eventually(daemon.copiers_ready, "there is another one")
        eventually(lambda: engine.lookup("a", 6) == 6, "it has the chunks")
        assert engine.restored("a", 6)
        assert engine.restored("b", 5, at=8)
        daemon.stop()
    eventually(lambda: free_pages() == 2 * CHUNK_PAGES, "they are given back", DEADLINE_S)


@pytest.mark.parametrize("pages", [2 * CHUNK_PAGES - 1, CHUNK_PAGES - 1])
def test_where_too_few_are_reserved_the_rest_is_in_ordinary_pages_and_it_is_said(
    tmp_path: Path, only: Callable[[int], None], engines: Engines, pages: int
) -> None:
    only(pages)
    huge = pages // CHUNK_PAGES * CHUNK_BYTES
    with running(tmp_path / "run", memory="128MiB", hugepages="2MiB") as daemon:
        assert f"huge pages: {huge >> 20}" in daemon.log
        assert "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages" in daemon.log
        engine = engines(daemon.socket, [LARGE])
        assert engine.back_up("a", 6)
        assert engine.back_up("b", 5, at=8)
        made = {mmap.PAGESIZE: 2 * CHUNK_BYTES - huge, MIB_2: huge}
        assert by_page(daemon) == {size: nbytes for size, nbytes in made.items() if nbytes}
        assert engine.restored("a", 6)
        assert engine.restored("b", 5, at=8)


def test_huge_pages_that_are_gone_by_the_time_they_are_needed_are_replaced_by_ordinary_ones(
    tmp_path: Path, only: Callable[[int], None], engines: Engines
) -> None:
    only(2 * CHUNK_PAGES)
    with running(tmp_path / "run", memory="128MiB", hugepages="2MiB") as daemon:
        only(0)
        engine = engines(daemon.socket, [LARGE])
        assert engine.back_up("a", 6)
        assert by_page(daemon) == {mmap.PAGESIZE: 2 * CHUNK_BYTES}
        assert engine.restored("a", 6)
