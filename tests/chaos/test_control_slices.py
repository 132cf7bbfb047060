"""A long prompt is taken in little by little: what others ask in between is answered in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from flushes import Row, columns
from one_process import DEADLINE_S, OneProcess

from tierd.bench.wire_rank import WireRank
from tierd.control import backup_desk
from tierd.control.backup_desk import GATHER_S, JOB_PAGES, SLICE_STEPS, BackupDesk
from tierd.control.backups import STEP_PAGES
from tierd.control.pages import PagePool
from tierd.wire import limits, messages

LONG = 40 * STEP_PAGES


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OneProcess]:
    daemon = OneProcess(tmp_path, devices=1)
    yield daemon
    daemon.close()


@pytest.fixture
def rank(daemon: OneProcess) -> Iterator[WireRank]:
    rank = WireRank(daemon.state.endpoint.path, "engine", 0, 1)
    for _ in daemon.turns():
        session = next(iter(daemon.state.sessions.values()), None)
        if session is not None and session.welcomed:
            break
    rank.welcome()
    yield rank
    rank.close()


def keys(name: int, pages: int) -> bytes:
    return b"".join(
        (name << 32 | n).to_bytes(limits.KEY_BYTES, "little") for n in range(1, pages + 1)
    )


def pool_of(daemon: OneProcess) -> PagePool:
    (catalog,) = daemon.state.catalogs.values()
    return catalog.pools["kv"]


def back_up(daemon: OneProcess, rank: WireRank, name: int, pages: int) -> None:
    rank.back_up(keys(name, pages), pages)
    for _ in daemon.turns():
        rank.read(0.0)
        if not rank.in_flight:
            break
    assert rank.kept == rank.sent


def settle(daemon: OneProcess, rank: WireRank) -> None:
    """Let the daemon finish, and take its acks, which another thread brings."""
    daemon.settle()
    while rank.in_flight:
        before = rank.in_flight
        rank.read(DEADLINE_S)
        assert rank.in_flight < before, "no ack comes"


def test_a_turn_decides_no_more_than_a_slice(daemon: OneProcess, rank: WireRank) -> None:
    back_up(daemon, rank, 1, 10)
    pool = pool_of(daemon)
    rank.back_up(keys(2, LONG), LONG)
    arrived = [pool.arrivals]
    for _ in daemon.turns():
        arrived.append(pool.arrivals)
        rank.read(0.0)
        if not rank.in_flight:
            break
    assert rank.kept == rank.sent
    assert max(after - before for before, after in pairwise(arrived)) <= SLICE_STEPS * STEP_PAGES


def test_after_every_step_somebody_looks_for_what_clients_ask(
    daemon: OneProcess, rank: WireRank
) -> None:
    back_up(daemon, rank, 1, 10)
    pool, (session,) = pool_of(daemon), daemon.state.sessions.values()
    row = Row(1, [messages.Part(0, LONG, 10)], b"")
    long = messages.Flush(epoch="", ticket=2, fence=0, keys=keys(2, LONG), **columns([row]))
    desk, now = BackupDesk(daemon.state), time.monotonic()
    desk.flush(session, long, now)
    arrived = [pool.arrivals]
    while desk.work(now, lambda: arrived.append(pool.arrivals)):
        arrived.append(pool.arrivals)
    assert pool.arrivals == 10 + LONG
    assert max(after - before for before, after in pairwise(arrived)) <= STEP_PAGES


def test_a_lookup_is_answered_while_a_long_prompt_is_taken_in(
    daemon: OneProcess, rank: WireRank
) -> None:
    back_up(daemon, rank, 1, 10)
    pool = pool_of(daemon)
    begun = pool.arrivals
    rank.back_up(keys(2, LONG), LONG)
    while pool.arrivals == begun:
        daemon.turn()
    rank.ask("r", keys(1, 10))
    daemon.turn()
    reply = rank.answer(DEADLINE_S)
    assert reply is not None
    assert max(reply.lengths) == 10
    assert pool.arrivals - begun < LONG, "not after the last page of the prompt"


def test_clearing_goes_on_between_lookups(daemon: OneProcess, rank: WireRank) -> None:
    back_up(daemon, rank, 1, LONG)
    pool = pool_of(daemon)
    rank.lifeline.send(messages.ClearRequest(protocol=limits.PROTOCOL_VERSION))
    left = [pool.pages]
    for _ in daemon.turns():
        left.append(pool.pages)
        if not pool.pages:
            break
    assert max(before - after for before, after in pairwise(left)) <= STEP_PAGES
    daemon.turn()
    ((done, _),) = rank.lifeline.receive()
    assert isinstance(done, messages.Done)
    assert done.detail == {"pages": LONG}


def test_a_long_prompt_is_few_jobs_however_small_its_pages(
    daemon: OneProcess, rank: WireRank
) -> None:
    back_up(daemon, rank, 1, 10)
    pool, (copier,) = pool_of(daemon), daemon.copiers
    rank.back_up(keys(2, LONG), LONG)
    now, begun = time.monotonic(), pool.arrivals
    while pool.arrivals - begun < LONG:
        daemon.control.turn(now)  # no time passes: nothing is sent for its age
    daemon.control.turn(now)
    assert len(copier.jobs) == -(-LONG // JOB_PAGES)
    settle(daemon, rank)
    assert rank.kept == rank.sent


def test_large_pages_do_not_wait_for_company(
    daemon: OneProcess, rank: WireRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(daemon, rank, 1, 10)
    pool, (copier,) = pool_of(daemon), daemon.copiers
    monkeypatch.setattr(backup_desk, "JOB_BYTES", STEP_PAGES * pool.host.slot_bytes)
    rank.back_up(keys(2, LONG), LONG)
    now, begun = time.monotonic(), pool.arrivals
    while pool.arrivals == begun:
        daemon.control.turn(now)
    assert len(copier.jobs) == (pool.arrivals - begun) // STEP_PAGES
    settle(daemon, rank)
    assert rank.kept == rank.sent


def test_pages_wait_for_company_a_bounded_time(daemon: OneProcess, rank: WireRank) -> None:
    back_up(daemon, rank, 1, 10)
    pool, (copier,) = pool_of(daemon), daemon.copiers
    rank.back_up(keys(2, LONG), LONG)
    now, begun = time.monotonic(), pool.arrivals
    while pool.arrivals == begun:
        daemon.control.turn(now)
    assert not copier.jobs
    daemon.control.turn(now + GATHER_S)
    assert len(copier.jobs) == 1
    settle(daemon, rank)
    assert rank.kept == rank.sent


@pytest.mark.parametrize("who", ["rank", "copier"])
def test_pages_of_one_who_goes_before_its_copier_is_told_are_given_up(
    daemon: OneProcess, rank: WireRank, who: str
) -> None:
    back_up(daemon, rank, 1, 10)
    pool, (copier,) = pool_of(daemon), daemon.copiers
    (session,) = daemon.state.sessions.values()
    rank.back_up(keys(2, LONG), LONG)
    now, begun = time.monotonic(), pool.arrivals
    while pool.arrivals == begun:
        daemon.control.turn(now)
    if who == "rank":
        rank.lifeline.close()
    else:
        session.attached = False  # as control sees it when its copier has died
    daemon.settle()
    assert not copier.jobs
    daemon.check()
    assert pool.pages == 10
