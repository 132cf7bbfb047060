"""A copier process serves its ranks whatever one of them, or control, does: talked to over its
channel, as control does.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import psutil
import pytest
from copied_ranks import LAYERS, PAGE_TOKENS, PAGES, ROW, Rank, SharedFile, small_layout

from tierd.channel import Channel, ChannelClosed
from tierd.wire import codec, layout, messages
from tierd.wire.messages import (
    AddChunk,
    Allocation,
    Attach,
    Attached,
    BackupJob,
    ChunkDropped,
    ChunkReady,
    CopierReady,
    Detach,
    Detached,
    DropChunk,
    FromCopier,
    JobDone,
    RestoreJob,
    Shutdown,
)

T = TypeVar("T")
PATIENCE_S = 120.0


class Copier:
    """A copier process and control's end of the conversation."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tierd.copier", "--device", "host:0"),
                *("--channel-fd", str(theirs.fileno())),
                *("--ready-timeout-s", str(10 * PATIENCE_S)),
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
    assert rank.segment.consumed.tolist() == [4 * PAGE_TOKENS, 0]

    untouched = rank.page(12)
    copier.say(rank.restore(2, [10, 11], [9, 1], chunk=7, entry=5, generation=3))
    assert copier.done(2).ok
    assert rank.page(10) == rank.page(60)
    assert rank.page(11) == rank.page(4)
    assert rank.page(12) == untouched
    assert rank.segment.consumed.tolist() == [4 * PAGE_TOKENS, 2 * PAGE_TOKENS]
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
    assert int(rank.segment.consumed[0]) == 90 * PAGE_TOKENS


def test_slots_that_change_while_they_are_checked_reach_no_other_memory(
    copier: Copier, ranks: Callable[[int], Rank]
) -> None:
    copier.add_chunk(0)
    rank = ranks(1)
    copier.attach(rank)
    over = threading.Event()

    def change() -> None:
        ring = rank.segment.backup_ring
        tokens = np.arange(len(ring)) % PAGE_TOKENS
        while not over.is_set():
            ring[:] = (PAGES - 1) * PAGE_TOKENS + tokens
            ring[:] = (1 << 40) + tokens

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for job in range(200):
            copier.say(rank.backup(job, [0] * 8, list(range(8))))
            done = copier.done(job)
            assert done.ok or "is out of range" in done.error or "are no page of" in done.error
    finally:
        over.set()
        changer.join()
    copier.say(rank.backup(1000, [3], [3]))
    assert copier.done(1000).ok, "it has survived them all"


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


def astray(rank: Rank, page: int, first: int, last: int) -> BackupJob:
    """A page whose first and last token slot are not its own."""
    job = rank.backup(1, [page], [0])
    rank.segment.backup_ring[[0, PAGE_TOKENS - 1]] = first, last
    return job


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda rank: rank.backup(1, [PAGES], [0]), f"page number {PAGES} is out of range"),
        (lambda rank: rank.backup(1, [-1], [0]), "page number -1 is out of range"),
        (lambda rank: rank.restore(1, [2**58], [0]), "is out of range"),
        (lambda rank: astray(rank, 0, 1, 16), "slots 1 to 16 are no page of 16"),
        (lambda rank: astray(rank, 0, 0, 31), "slots 0 to 31 are no page of 16"),
        (lambda rank: astray(rank, 2, 40, 32), "slots 40 to 32 are no page of 16"),
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
    assert int(rank.segment.consumed.max()) == PAGE_TOKENS
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
