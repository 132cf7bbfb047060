"""A backup that is not kept says why: in `tierd status` and, if nothing else does, in the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tier_harness import Daemon, Engine, Shape, eventually, running

from tierd.control.sheds import Shed, Sheds

Engines = Callable[..., Engine]


def shed(daemon: Daemon) -> dict[str, int]:
    """The reasons there have been."""
    return {reason: n for reason, n in daemon.status()["shed"].items() if n}


def leased(daemon: Daemon) -> int:
    return sum(pool["leased"] for pool in daemon.status()["pools"])


def test_there_is_no_room_while_the_only_chunk_has_a_leased_page(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "d", memory="64MiB") as daemon:
        first = engines(daemon.socket)
        assert first.back_up("a", 4)
        other = engines(daemon.socket, [Shape(page_tokens=1)], instance="other")
        assert first.lookup("a", 4, rid="r") == 4
        assert not other.back_up("b", 4)
        assert shed(daemon) == {"no_room": 1}
        assert "a backup of engine other is not kept (1 so far for this reason)" in daemon.log
        first.client.cancel("r")
        eventually(lambda: not leased(daemon), "its lease has ended")
        assert other.back_up("c", 4)
        assert shed(daemon) == {"no_room": 1}


def test_a_daemon_that_is_paused_counts_what_it_sheds(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    daemon.pause(True)
    assert not engine.back_up("a", 4)
    assert shed(daemon) == {"paused": 1}


def test_the_log_has_a_reason_again_when_it_has_been_so_twice_as_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sheds = Sheds()
    for _ in range(100):
        sheds.note(Shed.NO_ROOM, "engine")
    sheds.note(Shed.RANKS, "engine", 50)
    sheds.note(Shed.COPIER, "engine", 50)
    assert len(caplog.records) == len((1, 2, 4, 8, 16, 32, 64)) + 1
    assert sheds.counts() == {
        **dict.fromkeys((reason.value for reason in Shed), 0),
        "no_room": 100,
        "ranks": 50,
        "copier": 50,
    }
