"""A copier's worker between two steps: driven in this process, turn by turn, with a clock that
stands still.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from copied_ranks import LAYERS, PAGE_TOKENS, PAGES, ROW, Rank, SharedFile, small_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.channel import Channel, ChannelClosed
from tierd.copier.backend import Marker
from tierd.copier.host import HostBackend
from tierd.copier.plan import Batch, Direction
from tierd.copier.worker import Pace, Worker
from tierd.wire import codec, layout
from tierd.wire.messages import (
    AddChunk,
    Attached,
    BackupJob,
    ChunkDropped,
    ChunkReady,
    Detach,
    DropChunk,
    FromCopier,
    JobDone,
    RestoreJob,
    Shutdown,
)

READY_TIMEOUT_S = 2.0
PATIENCE_S = 120.0


class Device(HostBackend):
    """One whose copies retire when the test lets them."""

    held = False
    submitted = 0

    def submit(self, direction: Direction, batch: Batch) -> None:
        self.submitted += 1
        super().submit(direction, batch)

    def retired(self, marker: Marker) -> bool:
        return not self.held and super().retired(marker)


class Bench:
    """A worker in this process, with a clock that stands still until it is moved."""

    def __init__(self, max_bytes_per_s: float | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.now = 0.0
        self.device = Device()
        self.channel = Channel(ours, codec.FROM_COPIER)
        self.worker = Worker(
            Channel(theirs, codec.TO_COPIER),
            self.device,
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
        deadline = time.monotonic() + PATIENCE_S
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


def test_a_rank_whose_words_never_come_holds_up_nobody(bench: Bench) -> None:
    stuck, flowing = bench.rank, small_layout(Rank(2))
    bench.channel.send(flowing.attach(), flowing.fds)
    assert bench.await_answers(1)
    bench.channel.send(stuck.restore(100, [1], [1], ready=False, entry=2, generation=9))
    bench.channel.send(stuck.backup(101, [1], [1], ready=False))
    for job in range(20):
        bench.channel.send(flowing.backup(job, [job], [job % 16]))
        (done,) = bench.await_answers(1)
        assert isinstance(done, JobDone)
        assert (done.job, done.ok) == (job, True)
    assert stuck.segment.get_verdict(2, 9) == layout.PENDING
    bench.now += 2 * READY_TIMEOUT_S
    failed = [message for message in bench.await_answers(2) if isinstance(message, JobDone)]
    assert sorted(done.job for done in failed) == [100, 101]
    assert all(not done.ok and "ready words" in done.error for done in failed)
    assert stuck.segment.get_verdict(2, 9) == layout.FAILED
    assert (stuck.segment.layers[2] == 9).all()
    assert stuck.segment.consumed.tolist() == [PAGE_TOKENS, PAGE_TOKENS]
    flowing.close()


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


@pytest.mark.parametrize("kind", ["backup", "restore"])
def test_the_next_job_is_planned_while_the_wire_is_busy(bench: Bench, kind: str) -> None:
    rank, direction = bench.rank, Direction[kind.upper()]
    bench.device.held = True
    for number in range(5):
        if kind == "backup":
            bench.channel.send(rank.backup(number, [number], [number]))
        else:
            bench.channel.send(rank.restore(number, [number], [number], entry=number))
    bench.settle()
    assert bench.device.submitted == 2
    assert rank.segment.consumed[direction] == 3 * PAGE_TOKENS, "a third one's ring has been read"
    rank.segment.fence[0] += 1
    bench.device.held = False
    bench.settle()
    done = [message for message in bench.heard() if isinstance(message, JobDone)]
    assert [message.ok for message in done] == [False] * 5, "planned is not yet wanted"
    assert bench.device.submitted == 2


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
