"""A daemon that is told to stop finishes what it has accepted, within a time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from tier_harness import DEADLINE_S, Daemon, Engine, eventually, freeze, running

Engines = Callable[..., Engine]


def told_to_stop(daemon: Daemon) -> None:
    """Signal the daemon; returns when it says that it drains."""
    os.kill(daemon.pid, signal.SIGTERM)
    eventually(lambda: "SIGTERM" in daemon.log, "it drains")


def exit_status(daemon: Daemon) -> int:
    assert daemon.process is not None
    return daemon.process.wait(DEADLINE_S)


def test_accepted_backups_and_restores_are_finished_and_new_ones_are_not_taken(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run") as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 4)
        freeze(daemon.copier_pid())
        accepted = engine.offer("b", 4, at=8)
        engine.step()
        (restore,) = engine.start_restore("a", 4)
        eventually(
            lambda: (q := daemon.status()["queue"])["backup_pages"] == 4 and q["restores"] == 1,
            "both are under way",
        )
        told_to_stop(daemon)
        status = daemon.status()
        assert status["draining"]
        assert engine.lookup("a", 4) == 0
        late = engine.offer("c", 4, at=12)
        engine.step()
        os.kill(status["copiers"][0]["pid"], signal.SIGCONT)
        assert restore.finish()
        assert exit_status(daemon) == 0
        engine.settled(late)
        kept = {ack.seq: ack.kept for ack in engine.acks}
        assert len(engine.acks) == 3
        assert not kept[late]
        assert sorted(kept) == [0, accepted, late]
        assert "all is finished" in daemon.log


def test_a_rank_that_was_told_of_a_hit_can_still_load_it(tmp_path: Path, engines: Engines) -> None:
    with running(tmp_path / "run") as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 4)
        assert engine.lookup("a", 4, rid="load") == 4
        told_to_stop(daemon)
        assert engine.restored("a", 4, rid="load")
        assert exit_status(daemon) == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path, engines: Engines) -> None:
    with running(tmp_path / "run") as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 4)
        copier = daemon.copier_pid()
        freeze(copier)
        seq = engine.offer("b", 4)
        engine.step()
        eventually(lambda: daemon.status()["queue"]["backup_pages"] == 4, "it is under way")
        told_to_stop(daemon)
        os.kill(daemon.pid, signal.SIGTERM)
        ending = "ending before all is finished (1 backups)"
        eventually(lambda: ending in daemon.log, "it gives up what is under way")
        os.kill(copier, signal.SIGCONT)
        assert exit_status(daemon) == 4
        assert not engine.settled(seq)


def test_what_does_not_finish_is_given_up_in_time(tmp_path: Path, engines: Engines) -> None:
    with running(tmp_path / "run", patience=0.2) as daemon:  # 3 s for what is under way
        engine = engines(daemon.socket)
        eventually(lambda: engine.back_up("a", 4), "it is kept")
        seq = -1

        def under_way() -> bool:
            nonlocal seq
            freeze(daemon.copier_pid())
            seq = engine.offer("b", 4)
            eventually(lambda: (engine.step(), taken_in(seq))[1], "it is taken in, or shed")
            if not any(ack.seq == seq for ack in engine.acks):
                return True
            os.kill(daemon.copier_pid(), signal.SIGCONT)  # it had been silent for too long
            return False

        def taken_in(seq: int) -> bool:
            shed = any(ack.seq == seq for ack in engine.acks)
            return shed or daemon.status()["queue"]["backup_pages"] == 4

        eventually(under_way, "a backup is under way")
        told_to_stop(daemon)
        assert exit_status(daemon) == 4, "the copier would never finish"
        assert not engine.settled(seq)
