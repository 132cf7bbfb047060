"""A copier serves its ranks whatever one of them, or control, does.

Most tests talk to a real copier process over its channel, as control does. Those about the
moment between two steps drive a worker in this process, turn by turn.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.channel import Channel, ChannelClosed
from tierd.copier.host import HostBackend
from tierd.copier.worker import Pace, Worker
from tierd.wire import codec, layout, messages
from tierd.wire.geometry import HostLayout, pool_layout
from tierd.wire.messages import (
    AddChunk,
    Allocation,
    Attach,
    Attached,
    BackupJob,
    BufferSpec,
    ChunkDropped,
    ChunkReady,
    CopierReady,
    CopyPart,
    Detach,
    Detached,
    DropChunk,
    FromCopier,
    HostPool,
    JobDone,
    PoolSpec,
    RestoreJob,
    Shutdown,
)

T = TypeVar("T")
LAYERS, PAGES, ROW = 3, 64, 4096
READY_TIMEOUT_S = 2.0
PATIENCE_S = 20.0


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
        spec = layout.SegmentSpec(backup_ring=64, restore_ring=64, max_layers=max_layers)
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
            page_tokens=16,
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
        positions = np.arange(self.ring[ring], self.ring[ring] + len(pages), dtype="<u8")
        array[positions % len(array)] = pages
        self.ring[ring] += len(pages)
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


class Copier:
    """A copier process and control's end of the conversation."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tierd.copier", "--device", "host:0"),
                *("--channel-fd", str(theirs.fileno())),
                *("--ready-timeout-s", str(READY_TIMEOUT_S)),
            ],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.channel = Channel(ours, codec.FROM_COPIER)
        self.heard: list[FromCopier] = []
        self.chunks: dict[int, SharedFile] = {}
        self.hear(CopierReady)

    def say(self, message: messages.ToCopier, fds: list[int] | None = None) -> None:
        self.channel.send(message, fds or [])

    def hear(self, kind: type[T], matches: Callable[[T], bool] = lambda _: True) -> T:
        """The next message of a kind; others that come before it are kept for later."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for n, message in enumerate(self.heard):
                if isinstance(message, kind) and matches(message):
                    del self.heard[n]
                    return message
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} came; heard {self.heard}"
            self.heard += [message for message, _ in self.channel.wait(left)]

    def done(self, job: int) -> JobDone:
        return self.hear(JobDone, lambda message: message.job == job)

    def add_chunk(self, number: int, nbytes: int = 4 << 20) -> SharedFile:
        chunk = SharedFile(f"chunk{number}", nbytes)
        self.chunks[number] = chunk
        self.say(AddChunk(chunk=number, size=nbytes), [chunk.fd])
        ready = self.hear(ChunkReady)
        assert (ready.chunk, ready.error) == (number, "")
        return chunk

    def attach(self, rank: Rank) -> Attached:
        self.say(rank.attach(), rank.fds)
        return self.hear(Attached)

    def mappings(self) -> list[str]:
        """Names of the shared files that the process has mapped."""
        with open(f"/proc/{self.process.pid}/maps") as maps:
            return [
                line.split("tierd-test-")[1].split()[0] for line in maps if "tierd-test" in line
            ]

    def close(self) -> None:
        self.channel.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()
            for chunk in self.chunks.values():
                chunk.close()


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


@pytest.fixture
def copier() -> Iterator[Copier]:
    process = Copier()
    yield process
    process.close()


@pytest.fixture
def ranks() -> Iterator[Callable[[int], Rank]]:
    made: list[Rank] = []

    def make(session: int, **geometry: int) -> Rank:
        made.append(small_layout(Rank(session, **geometry)))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def test_pages_go_to_their_slots_and_come_back_elsewhere(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    chunk = copier.add_chunk(7)
    rank = ranks(1)
    assert copier.attach(rank) == Attached(
        session=1, paths=["rows: 6 rows a page; restores of narrow rows in 3 boxes"]
    )

    copier.say(rank.backup(1, [3, 4, 5, 60], [0, 1, 2, 9], chunk=7))
    done = copier.done(1)
    assert (done.ok, done.error, done.pages) == (True, "", 4)
    assert done.copied_bytes == 4 * 2 * LAYERS * ROW
    for page, slot in zip([3, 4, 5, 60], [0, 1, 2, 9], strict=True):
        assert rank.slot(chunk, slot) == rank.page(page)
    assert rank.segment.consumed.tolist() == [4, 0]

    untouched = rank.page(12)
    copier.say(rank.restore(2, [10, 11], [9, 1], chunk=7, entry=5, generation=3))
    assert copier.done(2).ok
    assert rank.page(10) == rank.page(60)
    assert rank.page(11) == rank.page(4)
    assert rank.page(12) == untouched
    assert rank.segment.consumed.tolist() == [4, 2]
    assert rank.segment.layers[5].tolist() == [3] * LAYERS + [0] * (8 - LAYERS)
    assert rank.segment.get_verdict(5, 3) == layout.LANDED


def test_a_second_engine_restores_what_the_first_one_left(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    first, second = ranks(1), ranks(2)
    copier.attach(first)
    copier.say(first.backup(1, [1, 2], [4, 5]))
    assert copier.done(1).ok
    copier.say(Detach(session=1))
    copier.hear(Detached)
    copier.attach(second)
    copier.say(second.restore(2, [40, 41], [4, 5]))
    assert copier.done(2).ok
    assert [second.page(40), second.page(41)] == [first.page(1), first.page(2)]


def test_the_ring_wraps(copier: Copier, ranks: Callable[[int], Rank]) -> None:
    chunk = copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    for job in range(9):
        pages = [(job * 10 + n) % PAGES for n in range(10)]
        copier.say(rank.backup(job, pages, list(range(10))))
        assert copier.done(job).ok
        assert [rank.slot(chunk, n) for n in range(10)] == [rank.page(p) for p in pages]
    assert int(rank.segment.consumed[0]) == 90


def test_page_numbers_that_change_while_they_are_checked_reach_no_other_memory(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    over = threading.Event()

    def change() -> None:
        ring = rank.segment.backup_ring
        while not over.is_set():
            ring[:] = PAGES - 1
            ring[:] = 1 << 40

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for job in range(200):
            copier.say(rank.backup(job, [0] * 8, list(range(8))))
            done = copier.done(job)
            assert done.ok or "page number" in done.error
    finally:
        over.set()
        changer.join()
    copier.say(rank.backup(1000, [3], [3]))
    assert copier.done(1000).ok, "it has survived them all"


def test_a_rank_whose_words_never_come_holds_up_nobody(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    stuck, flowing = ranks(1), ranks(2)
    copier.attach(stuck)
    copier.attach(flowing)
    copier.say(stuck.restore(100, [1], [1], ready=False, entry=2, generation=9))
    copier.say(stuck.backup(101, [1], [1], ready=False))
    for job in range(20):
        copier.say(flowing.backup(job, [job], [job % 16]))
        assert copier.done(job).ok
    assert stuck.segment.get_verdict(2, 9) == layout.PENDING
    for job in (100, 101):
        done = copier.done(job)
        assert not done.ok
        assert "ready words" in done.error
    assert stuck.segment.get_verdict(2, 9) == layout.FAILED
    assert (stuck.segment.layers[2] == 9).all()
    assert stuck.segment.consumed.tolist() == [1, 1]


def test_a_job_starts_when_both_words_are_there(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    job = rank.backup(1, [1], [1], ready=False)
    rank.segment.ready[job.tickets[0], 0] = job.tickets[0]
    copier.say(job)
    copier.say(messages.DropChunk(chunk=99))  # answered after the job was looked at
    copier.hear(ChunkDropped)
    assert not any(isinstance(message, JobDone) for message in copier.heard)
    rank.segment.ready[job.tickets[0], 1] = job.tickets[0]
    assert copier.done(1).ok


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda rank: rank.backup(1, [PAGES], [0]), f"page number {PAGES} is out of range"),
        (lambda rank: rank.backup(1, [-1], [0]), "page number -1 is out of range"),
        (lambda rank: rank.restore(1, [2**62], [0]), "is out of range"),
        (lambda rank: rank.backup(1, [0], [16]), "slot 16 is out of range"),
        (lambda rank: rank.backup(1, [0], [0], chunk=5), "chunk 5 is not mapped"),
        (lambda rank: rank.restore(1, [0], [0], chunk=1), "chunk 1 has 4096 bytes"),
    ],
)
def test_a_job_that_makes_no_sense_fails_alone(
    copier: Copier,
    ranks: Callable[[int], Rank],
    spoil: Callable[[Rank], BackupJob | RestoreJob],
    error: str,
) -> None:
    chunk = copier.add_chunk(0)
    copier.add_chunk(1, 4096)
    rank = ranks(1)
    copier.attach(rank)
    before = [tensor.bytes.copy() for tensor in rank.tensors]
    job = spoil(rank)
    copier.say(job)
    done = copier.done(1)
    assert not done.ok
    assert error in done.error
    assert (done.pages, done.copied_bytes) == (0, 0)
    if isinstance(job, RestoreJob):
        assert rank.segment.get_verdict(0, 1) == layout.FAILED
        assert (rank.segment.layers[0] == 1).all()
    assert not chunk.bytes.any()
    assert all((a.bytes == b).all() for a, b in zip(rank.tensors, before, strict=True))
    assert int(rank.segment.consumed.max()) == 1
    copier.say(rank.backup(2, [0], [0]))
    assert copier.done(2).ok


def test_jobs_of_unknown_ranks_and_entries_are_answered(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    rank = ranks(1)
    copier.say(rank.backup(1, [0], [0]))
    assert copier.done(1).error == "session 1 is not attached"
    copier.attach(rank)
    spoiled = rank.restore(2, [0], [0])
    copier.say(
        RestoreJob(**{**{f: getattr(spoiled, f) for f in spoiled.__struct_fields__}, "entry": 8})
    )
    assert "`entry` 8" in copier.done(2).error
    copier.say(Detach(session=77))
    assert copier.hear(Detached) == Detached(session=77)


def test_what_was_asked_before_the_fence_moved_is_not_done(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    chunk = copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    before = rank.page(8)
    backup = rank.backup(1, [1], [1], ready=False)
    restore = rank.restore(2, [8], [3], ready=False, generation=4)
    copier.say(backup)
    copier.say(restore)
    rank.segment.fence[0] += 1
    rank.mark_ready(backup.tickets[0])
    rank.mark_ready(restore.ticket)
    for job in (1, 2):
        done = copier.done(job)
        assert not done.ok
        assert "fence" in done.error
    assert rank.page(8) == before
    assert not chunk.bytes.any()
    assert rank.segment.get_verdict(0, 4) == layout.FAILED
    assert (rank.segment.layers[0] == 4).all()
    copier.say(rank.backup(3, [1], [1]))
    assert copier.done(3).ok


def test_detaching_drops_what_waits_and_closes_every_mapping(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    gone, stays = ranks(1), ranks(2)
    copier.attach(gone)
    copier.attach(stays)
    assert copier.mappings().count("segment") == 2
    copier.say(gone.backup(1, [1], [1], ready=False))
    copier.say(gone.restore(2, [1], [1], ready=False, generation=6))
    copier.say(stays.backup(3, [1], [2], ready=False))
    copier.say(Detach(session=1))
    copier.say(gone.backup(4, [1], [1]))
    copier.hear(Detached)
    before = {m.job: m.ok for m in copier.heard if isinstance(m, JobDone) and m.job != 4}
    assert before == {1: False, 2: False}
    assert copier.done(4).error == "session 1 is not attached"
    assert gone.segment.get_verdict(0, 6) == layout.FAILED
    assert sorted(copier.mappings()) == ["chunk0", "layer0", "layer1", "layer2", "segment"]
    stays.mark_ready(stays.ticket)
    assert copier.done(3).ok


def test_chunks_come_and_go(copier: Copier) -> None:
    copier.add_chunk(0)
    copier.add_chunk(1)
    short = SharedFile("short", 4096)
    copier.say(AddChunk(chunk=2, size=8192), [short.fd])
    assert "announced with 8192" in copier.hear(ChunkReady).error
    copier.say(AddChunk(chunk=1, size=4096), [short.fd])
    assert "mapped already" in copier.hear(ChunkReady).error
    copier.say(AddChunk(chunk=3, size=4096))
    assert "0 descriptors" in copier.hear(ChunkReady).error
    copier.say(DropChunk(chunk=0))
    assert copier.hear(ChunkDropped) == ChunkDropped(chunk=0)
    assert copier.mappings() == ["chunk1"]
    short.close()


def spoiled_attach(rank: Rank, how: str) -> tuple[Attach, list[int]]:
    whole = rank.attach()
    fields = {name: getattr(whole, name) for name in whole.__struct_fields__}
    fds = rank.fds
    if how == "outside":
        fields["allocations"] = [Allocation(size=4096)] * LAYERS
    elif how == "gpu":
        fields["allocations"] = [
            Allocation(size=a.size, handle=bytes(64)) for a in whole.allocations
        ]
        fds = fds[:1]
    elif how == "too few":
        fds = fds[:-1]
    elif how == "nothing":
        fds = []
    elif how == "no segment":
        fds = [fds[1], *fds[1:]]
    elif how == "short":
        fields["allocations"] = [Allocation(size=a.size + 1) for a in whole.allocations]
    elif how == "layouts":
        fields["host_pools"] = []
    return Attach(**fields), fds


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("outside", "pool 'kv', buffer 0: its last page ends at"),
        ("gpu", "allocation 0 is GPU memory"),
        ("too few", "3 allocations without a handle, yet 2 descriptors"),
        ("nothing", "no descriptor of the rank's segment"),
        ("no segment", "not a tierd segment"),
        ("short", "was announced with"),
        ("layouts", "1 pools, 0 host layouts"),
    ],
)
def test_a_rank_that_cannot_be_mapped_is_told_why(
    copier: Copier, ranks: Callable[[int], Rank], how: str, error: str
) -> None:
    rank = ranks(1)
    copier.say(*spoiled_attach(rank, how))
    assert error in copier.hear(Attached).error
    assert copier.mappings() == []
    assert copier.attach(rank).error == ""
    assert "attached already" in copier.attach(rank).error


def test_a_rank_with_more_layers_than_words_is_refused(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    assert "words for 2" in copier.attach(ranks(1, max_layers=2)).error


def test_when_control_goes_waiting_streams_are_released_and_the_process_ends(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    copier.say(rank.restore(1, [1], [1], ready=False, entry=3, generation=11))
    copier.channel.close()
    assert copier.process.wait(PATIENCE_S) == 0
    assert rank.segment.get_verdict(3, 11) == layout.FAILED
    assert (rank.segment.layers[3] == 11).all()


def test_shutdown_answers_for_every_job_and_ends_the_process(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    copier.say(rank.backup(1, [1], [1], ready=False))
    copier.say(Shutdown())
    assert not copier.done(1).ok
    assert copier.hear(Detached) == Detached(session=1)
    assert copier.process.wait(PATIENCE_S) == 0
    with pytest.raises(ChannelClosed):
        copier.channel.wait(PATIENCE_S)


def test_nonsense_from_control_ends_the_process_with_an_error(copier: Copier) -> None:
    copier.say(CopierReady(device="host:0", detail={}))  # type: ignore[arg-type]
    assert copier.process.wait(PATIENCE_S) == 3


def test_signals_to_the_process_group_do_not_end_it(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    copier.process.send_signal(signal.SIGTERM)
    copier.process.send_signal(signal.SIGINT)
    rank = ranks(1)
    copier.attach(rank)
    copier.say(rank.backup(1, [1], [1]))
    assert copier.done(1).ok


def test_an_idle_copier_sleeps(copier: Copier, ranks: Callable[[int], Rank]) -> None:
    copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    copier.say(rank.backup(1, [1], [1]))
    assert copier.done(1).ok
    process = psutil.Process(copier.process.pid)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        before = process.num_ctx_switches().voluntary
        time.sleep(0.1)
        if process.num_ctx_switches().voluntary == before:
            break
        assert time.monotonic() < deadline, "it keeps waking up with nothing to do"


def test_a_device_that_is_not_there_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tierd.copier", "--device", "GPU-none", "--channel-fd"]
    ended = subprocess.run(
        [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], timeout=PATIENCE_S
    )
    theirs.close()
    ours.close()
    assert ended.returncode == 2
    assert "GPU-none: cannot start" in capfd.readouterr().err


class Bench:
    """A worker in this process, with a clock that stands still until it is moved."""

    def __init__(self, max_bytes_per_s: float | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.now = 0.0
        self.channel = Channel(ours, codec.FROM_COPIER)
        self.worker = Worker(
            Channel(theirs, codec.TO_COPIER),
            HostBackend(),
            "host:0",
            ready_timeout_s=READY_TIMEOUT_S,
            max_bytes_per_s=max_bytes_per_s,
            clock=lambda: self.now,
        )
        self.chunk = SharedFile("chunk", 4 << 20)
        self.chunk.bytes[:] = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
        self.rank = small_layout(Rank(1))
        self.channel.send(AddChunk(chunk=0, size=4 << 20), [self.chunk.fd])
        self.channel.send(self.rank.attach(), self.rank.fds)
        # Pinning is other threads' work: the attachment can be answered before it.
        assert {type(m) for m in self.await_answers(3)} >= {ChunkReady, Attached}  # and CopierReady

    def settle(self) -> None:
        while self.worker.turn() is Pace.BUSY:
            pass

    def await_answers(self, count: int) -> list[FromCopier]:
        """So many, some of which take other threads' work."""
        deadline = time.monotonic() + 10.0
        answers: list[FromCopier] = []
        while len(answers) < count:
            assert time.monotonic() < deadline, f"only {answers}"
            self.settle()
            answers += self.heard()
        return answers

    def heard(self) -> list[FromCopier]:
        return [message for message, _ in self.channel.receive()]

    def close(self) -> None:
        self.worker.stop()
        self.channel.close()
        self.rank.close()
        self.chunk.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


@pytest.mark.parametrize("kind", ["backup", "restore"])
def test_a_fence_that_moves_while_copies_run_discards_them(bench: Bench, kind: str) -> None:
    rank = bench.rank
    job = rank.backup(1, [1], [1]) if kind == "backup" else rank.restore(1, [1], [1])
    bench.channel.send(job)
    assert bench.worker.turn() is Pace.BUSY
    assert bench.heard() == []  # submitted, and not yet seen to have retired
    rank.segment.fence[0] += 1
    bench.settle()
    (done,) = bench.heard()
    assert isinstance(done, JobDone)
    assert not done.ok
    assert "fence" in done.error
    if kind == "restore":
        assert rank.segment.get_verdict(0, 1) == layout.FAILED


def test_a_chunk_in_use_is_dropped_after_the_copies(bench: Bench) -> None:
    bench.channel.send(bench.rank.backup(1, [1], [1]))
    bench.worker.turn()
    bench.channel.send(DropChunk(chunk=0))
    done, dropped = bench.await_answers(2)
    assert isinstance(done, JobDone)
    assert done.ok
    assert dropped == ChunkDropped(chunk=0)
    bench.channel.send(bench.rank.backup(2, [1], [1]))
    bench.settle()
    assert [m.error for m in bench.heard() if isinstance(m, JobDone)] == [
        "chunk 0 is not mapped here"
    ]


def test_what_is_on_the_wire_at_shutdown_still_lands(bench: Bench) -> None:
    rank = bench.rank
    bench.channel.send(rank.restore(1, [1], [1], generation=2))
    bench.worker.turn()
    assert rank.segment.get_verdict(0, 2) == layout.PENDING
    bench.channel.send(Shutdown())
    bench.worker.run()
    assert rank.segment.get_verdict(0, 2) == layout.LANDED


def test_what_two_jobs_share_of_the_time_counts_once(bench: Bench) -> None:
    rank = bench.rank
    for number in (1, 2):
        bench.channel.send(rank.restore(number, [number], [number], entry=number))
    bench.worker.turn()  # both are submitted
    bench.now = 1.0
    bench.settle()
    done = [m for m in bench.heard() if isinstance(m, JobDone)]
    assert [m.ok for m in done] == [True, True]
    assert sum(m.seconds for m in done) == 1.0


def test_a_job_of_several_parts_of_a_pool_copies_each_page_to_its_slot(bench: Bench) -> None:
    rank = bench.rank
    jobs = [rank.backup(1, [5, 9, 2], [4, 0, 3]), rank.backup(1, [7, 6], [1, 2])]
    job = msgspec.structs.replace(
        jobs[1],
        tickets=[ticket for j in jobs for ticket in j.tickets],
        parts=[part for j in jobs for part in j.parts],
    )
    bench.channel.send(job)
    bench.settle()
    (done,) = bench.heard()
    assert isinstance(done, JobDone)
    assert (done.ok, done.pages) == (True, 5)
    for page, slot in [(5, 4), (9, 0), (2, 3), (7, 1), (6, 2)]:
        assert rank.page(page) == rank.slot(bench.chunk, slot)


@pytest.mark.parametrize("kind", ["backup", "restore"])
def test_under_a_cap_a_page_waits_until_the_one_before_it_is_paid_for(kind: str) -> None:
    page = 2 * LAYERS * ROW
    bench = Bench(max_bytes_per_s=page)
    rank = bench.rank
    for number in (1, 2, 3):
        if kind == "backup":
            bench.channel.send(rank.backup(number, [number], [number]))
        else:
            bench.channel.send(rank.restore(number, [number], [number], entry=number))
    other = rank.restore(4, [9], [9]) if kind == "backup" else rank.backup(4, [9], [9])
    bench.channel.send(other)
    done = []
    for now in (0.0, 0.5, 0.9, 1.1, 1.9, 2.2):
        bench.now = now
        bench.settle()
        done.append([m.job for m in bench.heard() if isinstance(m, JobDone) and m.ok])
    bench.close()
    # The other direction has a cap of its own.
    assert [sorted(jobs) for jobs in done] == [[1, 4], [], [], [2], [], [3]]


Action = tuple[str, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "backup",
                "restore",
                "bad page",
                "bad slot",
                "unready",
                "ready",
                "fence",
                "turn",
                "wait",
            ]
        ),
        st.integers(0, 15),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(actions=ACTIONS, ending=st.sampled_from(["wait", "detach", "stop"]))
def test_every_job_is_answered_once_and_truthfully(actions: list[Action], ending: str) -> None:
    bench = Bench()
    rank, number, unready = bench.rank, 0, []
    jobs: dict[int, tuple[str, int, int]] = {}
    generations = [0] * layout.RESTORE_ENTRIES
    pending: dict[int, int] = {}
    answers: dict[int, JobDone] = {}

    def listen() -> None:
        for message in bench.heard():
            if isinstance(message, JobDone):
                assert message.job not in answers
                answers[message.job] = message
                pending.pop(message.job, None)

    for what, n in actions:
        if what in ("backup", "restore", "bad page", "bad slot", "unready"):
            restore = what == "restore" or n % 2 == 1
            entry = next(
                (e for e in range(layout.RESTORE_ENTRIES) if e not in pending.values()), None
            )
            if sum(len(m) for m in (pending, unready)) > 20 or (restore and entry is None):
                continue
            number += 1
            # Backups read pages 0-15 and write slots 0-7; restores read slots 8-15 and write
            # pages 32-47: nothing that is read ever changes.
            page, slot = (32 + n, 8 + n % 8) if restore else (n, n % 8)
            page = PAGES if what == "bad page" else page
            slot = 16 if what == "bad slot" else slot
            job: BackupJob | RestoreJob
            if restore:
                assert entry is not None
                generations[entry] += 1
                pending[number] = entry
                job = rank.restore(
                    number,
                    [page],
                    [slot],
                    ready=what != "unready",
                    entry=entry,
                    generation=generations[entry],
                )
            else:
                job = rank.backup(number, [page], [slot], ready=what != "unready")
            if what == "unready":
                unready.append(rank.ticket)
            jobs[number] = ("restore" if restore else "backup", page, slot)
            bench.channel.send(job)
        elif what == "ready" and unready:
            rank.mark_ready(unready.pop(0))
        elif what == "fence":
            rank.segment.fence[0] += 1
        elif what == "wait":
            bench.now += n / 10
        for _ in range(n % 3 if what == "turn" else 0):
            bench.worker.turn()
        listen()

    if ending == "wait":
        bench.settle()
        bench.now += 2 * READY_TIMEOUT_S
        bench.settle()
        assert bench.worker.turn() is Pace.IDLE
    elif ending == "detach":
        bench.channel.send(Detach(session=1))
        bench.settle()
    else:
        bench.settle()
        bench.worker.stop()
    with contextlib.suppress(ChannelClosed):
        listen()
    assert sorted(answers) == sorted(jobs)
    latest: dict[tuple[str, int], tuple[bool, int, int]] = {}
    for job_number, (kind, page, slot) in jobs.items():
        ok = answers[job_number].ok
        if page == PAGES or slot == 16:
            assert not ok
        else:
            latest[kind, page if kind == "restore" else slot] = ok, page, slot
    for ok, page, slot in latest.values():
        if ok:
            assert rank.page(page) == rank.slot(bench.chunk, slot)
    for entry, generation in enumerate(generations):
        if generation:
            assert rank.segment.get_verdict(entry, generation) != layout.PENDING
            assert (rank.segment.layers[entry, :LAYERS] == generation).all()
    bench.close()
