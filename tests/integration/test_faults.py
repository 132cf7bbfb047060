"""Ranks, copiers and control die or stop at the worst moments: what the others see of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tier_harness import (
    DEADLINE_S,
    Daemon,
    Engine,
    RankProcess,
    Shape,
    eventually,
    freeze,
    is_dead,
    keys,
    mappings,
    open_files,
    running,
    shared_files,
)
from tierd_client import PoolPages

Engines = Callable[..., Engine]
Ranks = Callable[..., RankProcess]
UNUSED = itertools.count()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Starts ranks in processes of their own."""
    with ExitStack() as stack:

        def start(*args: Any, **options: Any) -> RankProcess:
            rank = RankProcess(*args, **options)
            stack.callback(rank.close)
            return rank

        yield start


def patiently(engine: Engine) -> None:
    """From now on it gives nothing up, as it did at once so far."""
    for rank in engine.ranks:
        client, restores = rank.client, rank.client._restores
        assert max(client._ack_timeout_s, restores.verdict_timeout_s) <= 60.0
        client._ack_timeout_s = restores.verdict_timeout_s = DEADLINE_S


def back(daemon: Daemon, *engines: Engine) -> None:
    """Wait until every copier serves, and every engine can use it again."""
    eventually(daemon.copiers_ready, "copiers are back")
    for engine in engines:
        # A page that is here already would be kept without a copier.
        eventually(lambda e=engine: e.back_up(f"new {next(UNUSED)}", 1), "backups are kept again")


# --- a rank -----------------------------------------------------------------------------------


def test_of_a_killed_rank_nothing_stays_mapped_or_leased(
    daemon: Daemon, engines: Engines, ranks: Ranks
) -> None:
    other = engines(daemon.socket, instance="other")
    rank = ranks(daemon.socket, instance="victim")
    assert rank.do("offer", "a", 4) == 0
    rank.do("ack", "a")
    assert rank.do("lookup", "a", 4) == 4
    copier = daemon.copier_pid()
    assert mappings(copier, f"torch_{rank.pid}") > 0
    assert mappings(copier, "tierd-segment") == 2
    assert daemon.status()["pools"][0]["leased"] == 4
    rank.kill()
    eventually(
        lambda: mappings(copier, f"torch_{rank.pid}") == 0 and mappings(copier, "segment") == 1,
        "its memory is not mapped any more",
    )
    status = daemon.status()
    assert status["pools"][0]["leased"] == 0
    assert [session["instance"] for session in status["sessions"]] == ["other"]
    assert other.restored("a", 4), "what it left is there for the others"
    assert daemon.copier_pid() == copier
    assert mappings(daemon.pid, "tierd-segment") == 1


def test_pages_that_only_one_rank_has_written_are_never_seen(
    daemon2: Daemon, engines: Engines, ranks: Ranks
) -> None:
    world = {"world_size": 2, "instance": "halves"}
    rank1 = ranks(daemon2.socket, rank=1, **world)
    engine = engines(daemon2.socket, instance="halves", world_size=2, connect=False)
    rank0 = engine.ranks[0].client
    engine.ranks.pop().client.close()
    assert rank0.connect(DEADLINE_S)
    warm = engine.offer("warm", 1)
    rank0.flush()
    rank1.do("offer", "warm", 1)
    assert engine.settled(warm)
    freeze(daemon2.copier_pid("host:1"))
    seq = engine.offer("a", 4)
    rank0.flush()
    rank1.do("offer", "a", 4)
    eventually(
        lambda: daemon2.status()["copiers"][0]["backup_pages"] == 5, "rank 0's shard is written"
    )
    rank1.kill()
    eventually(lambda: len(daemon2.status()["sessions"]) == 1, "rank 1 is gone")
    os.kill(daemon2.copier_pid("host:1"), signal.SIGCONT)
    assert not engine.settled(seq)
    (pool,) = daemon2.status()["pools"]
    assert (pool["pages"], pool["slots_used"]) == (1, 1)
    assert engine.lookup("a", 4) == 0
    new = engines(daemon2.socket, instance="next", world_size=2)
    assert new.restored("warm", 1)
    assert not new.restored("a", 4)
    assert new.back_up("a", 4)
    assert new.restored("a", 4)


def test_a_rank_may_come_back_before_its_death_was_noticed(
    daemon: Daemon, engines: Engines
) -> None:
    first = Engine(daemon.socket, instance="same")
    assert first.back_up("a", 4)
    freeze(daemon.pid)
    first.close()
    second = engines(daemon.socket, instance="same", connect=False)
    second.step()
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(second.connected, "it is let in again")
    assert second.restored("a", 4)
    assert second.back_up("b", 4)


def test_a_copier_that_cannot_let_go_of_a_dead_ranks_memory_is_ended(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run", patience=0.5) as daemon:  # 2.5 s to let go
        other = engines(daemon.socket, instance="other")
        eventually(lambda: other.back_up("a", 4), "it is kept")
        victim = Engine(daemon.socket, instance="victim")
        copier = daemon.copier_pid()
        freeze(copier)
        victim.close()
        eventually(lambda: is_dead(copier), "the copier was killed")
        assert "has not let go of a dead rank's memory" in daemon.log
        back(daemon, other)
        eventually(lambda: other.restored("a", 4), "restores land again")


# --- a copier ---------------------------------------------------------------------------------


def test_a_killed_copier_costs_what_was_on_its_way_and_no_cached_page(
    daemon: Daemon, engines: Engines
) -> None:
    first = engines(daemon.socket, instance="first")
    second = engines(daemon.socket, instance="second")
    assert first.back_up("a", 4)
    copier = daemon.copier_pid()
    freeze(copier)
    lost = first.offer("b", 4, at=8)
    first.step()
    (restore,) = first.start_restore("a", 4, at=16)
    eventually(
        lambda: (
            (daemon.status()["queue"]["restores"], daemon.status()["queue"]["backup_pages"])
            == (1, 4)
        ),
        "both are on their way",
    )
    os.kill(copier, signal.SIGKILL)
    assert not restore.finish()
    restore.wait_layer(1)
    assert not first.settled(lost)
    back(daemon, first, second)
    assert daemon.status()["copiers"][0]["restarts"] == 1
    for engine in (first, second):
        assert engine.lookup("b", 4) == 0
        assert engine.restored("a", 4)


def test_a_group_is_served_again_when_one_of_its_copiers_is_back(
    daemon2: Daemon, engines: Engines
) -> None:
    engine = engines(daemon2.socket, world_size=2)
    assert engine.back_up("a", 4)
    for device in ("host:1", "host:0"):
        os.kill(daemon2.copier_pid(device), signal.SIGKILL)
        back(daemon2, engine)
        assert engine.restored("a", 4)
    assert [copier["restarts"] for copier in daemon2.status()["copiers"]] == [1, 1]


def test_every_backup_is_acked_once_and_in_order_whenever_the_copier_dies(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    seq = 0
    for death in range(3):
        for n in range(30):
            seq = engine.offer(f"{death} {n}", 2)
            engine.step()
            if n == 15:
                os.kill(daemon.copier_pid(), signal.SIGKILL)
        engine.settled(seq)
        back(daemon, engine)
    assert [ack.seq for ack in engine.acks] == list(range(len(engine.acks)))
    kept = [ack.kept for ack in engine.acks]
    assert True in kept
    assert daemon.status()["queue"]["backups"] == 0


def test_a_copier_that_does_not_get_ready_is_ended_and_another_one_is_started(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "hasty", patience=0.05) as daemon:  # 3 s to get ready
        engine = engines(daemon.socket)
        eventually(lambda: engine.back_up("a", 4), "it is kept")

        def copier() -> tuple[int, str]:
            (only,) = daemon.status()["copiers"]
            return only["pid"], only["state"]

        hung = 0
        while not hung:
            before, _ = copier()
            if before:
                os.kill(before, signal.SIGKILL)
            eventually(lambda last=before: copier()[0] not in (0, last), "another one is started")
            started, _ = copier()
            if started:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    freeze(started)
                    if copier() == (started, "starting"):  # it was not ready just before
                        hung = started
        eventually(lambda: is_dead(hung), "the one that hangs was killed")
        back(daemon, engine)
        eventually(lambda: engine.restored("a", 4), "restores land again")


def test_a_restore_that_hangs_is_reported_only_when_its_copier_is_dead(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket, verdict_timeout_s=0.3)
    assert engine.back_up("a", 4)
    copier = daemon.copier_pid()
    freeze(copier)
    (restore,) = engine.start_restore("a", 4)
    assert not restore.finish()
    assert is_dead(copier), "it could still have written the pages"
    patiently(engine)
    for _ in range(20):  # the words of the failed restore are not touched under a new one
        engine.start_restore("a", 4)[0].finish()
    back(daemon, engine)
    for _ in range(20):
        assert engine.restored("a", 4)


def test_a_layer_is_waited_for_no_longer_than_the_verdict_although_all_have_stopped(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket, verdict_timeout_s=0.3)
    assert engine.back_up("a", 4)
    copier = daemon.copier_pid()
    for process in daemon.family():
        freeze(process.pid)
    (restore,) = engine.start_restore("a", 4)
    restore.wait_layer(1)
    assert is_dead(copier), "it could still have written the layer"
    assert not restore.finish()
    patiently(engine)
    os.kill(daemon.pid, signal.SIGCONT)
    back(daemon, engine)
    eventually(lambda: engine.restored("a", 4), "restores land again")


# --- control ----------------------------------------------------------------------------------


def test_a_killed_control_is_noticed_at_once_and_its_successor_is_used(
    daemon: Daemon, engines: Engines
) -> None:
    forever = {f"{what}_timeout_s": 10 * DEADLINE_S for what in ("lookup", "verdict", "ack")}
    engine = engines(daemon.socket, **forever)
    assert engine.back_up("a", 4)
    freeze(daemon.copier_pid())
    pending = [engine.offer(name, 2) for name in ("b", "c")]
    engine.step()
    fence = int(engine.client._segment.fence[0])
    (copier,) = daemon.kill()
    # None of what follows waits for a time-out: the test would not live to see one.
    eventually(lambda: not engine.connected(), "control's death is noticed")
    engine.acks += engine.client.acks()
    assert [ack.kept for ack in engine.acks[-2:]] == [False, False]
    assert [ack.seq for ack in engine.acks[-2:]] == pending
    assert int(engine.client._segment.fence[0]) != fence, "no late copy may count as wanted"
    assert engine.lookup("a", 4) == 0
    assert not engine.restored("a", 4)
    seq = engine.offer("d", 2)
    assert not engine.settled(seq)
    copier.resume()
    eventually(lambda: is_dead(copier.pid), "the copier goes with its control")

    daemon.start()
    eventually(engine.connected, "the new daemon is used")
    assert engine.lookup("a", 4) == 0
    assert engine.back_up("a", 4)
    assert engine.restored("a", 4)


def test_a_restore_in_flight_ends_with_the_copier_when_control_is_killed(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    freeze(daemon.copier_pid())
    (restore,) = engine.start_restore("a", 4)
    (copier,) = daemon.kill()
    assert not restore.finish()
    assert is_dead(copier.pid)


def test_a_restore_does_not_wait_for_the_daemon_that_came_after_its_own(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket, verdict_timeout_s=10 * DEADLINE_S)
    assert engine.back_up("a", 4)
    freeze(daemon.copier_pid())
    (restore,) = engine.start_restore("a", 4)
    (copier,) = daemon.kill()
    copier.kill()
    engine.step()
    daemon.start()
    eventually(engine.connected, "the new daemon is used")
    assert not restore.finish(), "and not when the time for its verdict is over"
    assert engine.back_up("a", 4)
    assert engine.restored("a", 4)


def test_a_daemon_that_comes_later_is_used(tmp_path: Path, engines: Engines) -> None:
    (tmp_path / "late").mkdir()
    engine = engines(tmp_path / "late" / "tierd.sock", connect=False, retry_s=0.05)
    assert not engine.client.connect()
    assert not engine.back_up("a", 4)
    assert engine.lookup("a", 4) == 0
    with running(tmp_path / "late"):
        eventually(engine.connected, "the daemon is used")
        assert engine.back_up("a", 4)
        assert engine.restored("a", 4)


def test_ranks_that_meet_a_late_daemon_one_after_the_other_keep_together(
    tmp_path: Path, engines: Engines
) -> None:
    (tmp_path / "late").mkdir()
    engine = engines(tmp_path / "late" / "tierd.sock", world_size=2, connect=False)
    for name in "abc":
        assert not engine.back_up(name, 2)
    with running(tmp_path / "late", devices="host:2", patience=1.0):
        first, second = (rank.client for rank in engine.ranks)
        assert first.connect(DEADLINE_S)
        seq = engine.offer("d", 2)
        first.flush()
        assert second.connect(DEADLINE_S)
        engine.settled(seq)  # kept by both or by none
        eventually(lambda: engine.back_up("e", 2), "both are served")
        assert engine.restored("e", 2)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_daemon_that_is_ended_under_load_leaves_nothing(
    tmp_path: Path, engines: Engines, stop: signal.Signals
) -> None:
    with running(tmp_path / "run", devices="host:2") as daemon:
        engine = engines(daemon.socket, world_size=2)
        assert engine.back_up("a", 4)
        engine.offer("b", 4)
        engine.step()
        family: list[psutil.Process] = daemon.family()
        daemon.stop(stop)
        assert all(is_dead(process.pid) for process in family)
        assert [file.name for file in (tmp_path / "run").iterdir()] == ["daemon.log"]
        assert shared_files([process.pid for process in family]) == []
        eventually(lambda: not engine.connected(), "the engine notices")
        assert not engine.back_up("c", 4)


def test_a_stopped_daemon_costs_one_timeout_and_then_nothing(
    daemon: Daemon, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(daemon.socket, lookup_timeout_s=0.2)
    assert engine.back_up("a", 4)
    freeze(daemon.pid)
    assert [engine.lookup("a", 4) for _ in range(50)] == [0] * 50
    assert caplog.text.count("has not answered a lookup") <= 1
    engine.offer("b", 4)
    engine.step()
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: engine.lookup("a", 4) == 4, "lookups hit again")
    assert engine.back_up("b", 4)


def test_a_lease_granted_after_its_lookup_had_timed_out_ends_with_the_request(
    daemon: Daemon, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(daemon.socket, lookup_timeout_s=0.2)
    assert engine.back_up("a", 4)

    def asked_in_vain() -> bool:
        eventually(lambda: engine.lookup("a", 4, rid="early") == 4, "its heart beats")
        engine.client.cancel("early")
        caplog.clear()
        freeze(daemon.pid)
        assert engine.lookup("a", 4, rid="late") == 0
        os.kill(daemon.pid, signal.SIGCONT)
        return "has not answered" in caplog.text  # else its heart had beaten too long ago

    eventually(asked_in_vain, "its lookup times out")

    def leased() -> int:
        (pool,) = daemon.status()["pools"]
        return int(pool["leased"])

    eventually(lambda: leased() == 4, "it is granted all the same")
    engine.client.cancel("late")
    eventually(lambda: leased() == 0, "it has not to run out")


def test_a_daemon_that_acks_nothing_is_given_up(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket, ack_timeout_s=0.3)
    freeze(daemon.pid)
    assert not engine.back_up("a", 4)
    patiently(engine)
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(engine.connected, "it is used again once it answers")
    assert engine.back_up("b", 4)
    assert engine.restored("b", 4)


def test_a_daemon_that_falls_behind_sheds_and_never_stalls_the_engine(
    daemon: Daemon, engines: Engines
) -> None:
    shape = Shape(page_tokens=1, layers=1, row_bytes=8)
    engine = engines(daemon.socket, [shape], ack_timeout_s=10 * DEADLINE_S)
    assert engine.back_up("before", 1)
    freeze(daemon.pid)
    # More than the queue of messages holds. The daemon does nothing, so a step that waited for it
    # would be the last one.
    for n in range(3000):
        seq = engine.offer(f"{n}", 1)
        engine.step()
    os.kill(daemon.pid, signal.SIGCONT)
    engine.settled(seq)
    assert [ack.seq for ack in engine.acks] == list(range(3001))
    kept = [ack.kept for ack in engine.acks]
    assert all(kept[:500])
    assert not kept[-1]
    assert engine.back_up("after", 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_reset_in_the_middle_of_everything_no_page_is_stale(
    daemon2: Daemon, engines: Engines, world_size: int
) -> None:
    engine = engines(daemon2.socket, world_size=world_size)
    assert engine.back_up("old", 4)
    stopped = daemon2.copier_pid("host:0")
    freeze(stopped)
    engine.offer("under way", 4, at=8)
    engine.step()
    eventually(lambda: daemon2.status()["queue"]["backup_pages"] == 4, "it is on its way")
    for rank in engine.ranks:
        rank.client.reset(keep_pending=True)
    # The pages are the engine's again, and hold something else by the time the copier reads them.
    for rank in engine.ranks:
        rank.pages["kv"].wipe(range(8, 12))
    os.kill(stopped, signal.SIGCONT)
    eventually(lambda: daemon2.status()["queue"]["backup_pages"] == 0, "the copies have ended")
    other = engines(daemon2.socket, world_size=world_size, instance="other")
    assert other.lookup("under way", 4) == 0
    assert other.restored("old", 4)
    assert engine.lookup("old", 4) == 0
    assert engine.back_up("new", 4)
    assert engine.restored("new", 4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_reset_between_registration_and_welcome_is_not_lost(
    daemon2: Daemon, engines: Engines, world_size: int
) -> None:
    engine = engines(daemon2.socket, world_size=world_size, connect=False)
    first, *others = (rank.client for rank in engine.ranks)
    assert all(client.connect(DEADLINE_S) for client in others)
    freeze(daemon2.pid)
    first.flush()
    assert not first.connected, "it has registered, and has no answer"
    for client in (first, *others):
        client.reset(keep_pending=True)
    os.kill(daemon2.pid, signal.SIGCONT)
    eventually(engine.connected, "it is welcome")
    eventually(lambda: engine.back_up("new", 4), "backups are kept")
    assert engine.restored("new", 4)


def test_words_of_a_restore_are_not_used_again_before_control_has_given_its_verdict(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket, verdict_timeout_s=0.3)
    assert engine.back_up("a", 4)
    freeze(daemon.copier_pid())
    (first,) = engine.start_restore("a", 4)
    eventually(lambda: daemon.status()["queue"]["restores"] == 1, "the copier is told")
    freeze(daemon.pid)
    assert not first.finish(), "the client has ended the copier by itself"
    awaited = engine.client._segment.awaited
    generation = int(awaited[0])
    (second,) = engine.start_restore("a", 4)
    assert int(awaited[0]) == generation, "control will still write there"
    os.kill(daemon.pid, signal.SIGCONT)
    assert not second.finish()
    patiently(engine)
    back(daemon, engine)
    for _ in range(9):
        assert engine.restored("a", 4)
    assert int(awaited[0]) != generation


def test_one_engine_that_floods_the_tier_does_not_hold_another_back(
    daemon: Daemon, engines: Engines
) -> None:
    shapes = [Shape(page_tokens=1, pages=8, layers=1, row_bytes=8)]
    flood = engines(daemon.socket, shapes, instance="flood")
    quiet = engines(daemon.socket, shapes, instance="quiet")
    assert flood.back_up("before", 1)
    assert quiet.back_up("before", 1)
    freeze(daemon.pid)
    for n in range(1000):  # seconds of work for control
        names = b"".join(keys(f"flood {n}", 64))
        last = flood.client.backup([PoolPages("kv", names, torch.zeros(64, dtype=torch.int64))])
        flood.step()
    seq = quiet.offer("quiet", 1)
    quiet.step()
    os.kill(daemon.pid, signal.SIGCONT)
    assert quiet.settled(seq)
    flood.settled(last)
    kept = max(ack.seq for ack in flood.acks if ack.kept)  # what came after found the queue full
    assert kept > 500
    # Slots are given in the order in which pages are taken in.
    (page,), (*_, end) = keys("quiet", 1), keys(f"flood {kept - 1}", 64)
    files = {what: file for file, what in open_files(daemon.pid).items() if "tierd-chunk" in what}
    (headers,) = [data for data in map(Path.read_bytes, files.values()) if page in data]
    assert headers.index(page) < headers.index(end), "it has not waited for all of the flood"
