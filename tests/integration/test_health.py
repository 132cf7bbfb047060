"""A daemon says when a part of it does not answer, and what happens next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tier_harness import DEADLINE_S, Daemon, Engine, eventually, freeze, running

from tierd.cli.daemon import ask
from tierd.wire import limits
from tierd.wire.errors import DaemonUnavailableError
from tierd.wire.messages import Status, StatusRequest

Engines = Callable[..., Engine]
QUIET_SOON = 0.5
"""Patience: a copier that says nothing for 2.5 s gets no more work; after 20 s it is killed."""


def quiet(daemon: Daemon) -> bool:
    return bool(daemon.status()["copiers"][0]["silent_s"] > 0)


def status_text(daemon: Daemon) -> str:
    command = [sys.executable, "-m", "tierd", "status", "--socket", str(daemon.socket)]
    env = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, env=env
    ).stdout


def test_a_copier_that_does_not_answer_is_shown_and_gets_no_work(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run", patience=QUIET_SOON) as daemon:
        engine = engines(daemon.socket)
        eventually(lambda: engine.back_up("a", 4), "it is kept")
        copier = daemon.copier_pid()
        freeze(copier)
        eventually(lambda: quiet(daemon), "it is noticed")
        assert "killed and started again at 20 s" in status_text(daemon)
        assert f"copier host:0 (pid {copier}) does not answer" in daemon.log
        assert engine.lookup("a", 4) == 0, "nobody is sent into a restore that would hang"
        assert not engine.back_up("b", 4, at=8)


def test_a_copier_that_never_answers_is_replaced(tmp_path: Path, engines: Engines) -> None:
    with running(tmp_path / "run", patience=0.1) as daemon:  # after 4 s
        engine = engines(daemon.socket)
        eventually(lambda: engine.back_up("a", 4), "it is kept")
        copier = daemon.copier_pid()
        freeze(copier)
        eventually(lambda: daemon.copier_pid() not in (0, copier), "another one takes its place")
        assert "has not answered in time" in daemon.log
        eventually(lambda: engine.lookup("a", 4) == 4, "its pages are still there")
        eventually(lambda: engine.restored("a", 4), "and can be loaded")


def test_a_copier_that_answers_again_goes_on_as_if_nothing_had_been(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run", patience=QUIET_SOON) as daemon:
        engine = engines(daemon.socket)
        eventually(lambda: engine.back_up("a", 4), "it is kept")
        copier = daemon.copier_pid()
        freeze(copier)
        eventually(lambda: quiet(daemon), "it is noticed")
        os.kill(copier, signal.SIGCONT)
        eventually(lambda: not quiet(daemon), "it answers")
        eventually(lambda: engine.restored("a", 4), "its pages can be loaded")
        assert daemon.copier_pid() == copier


def test_of_a_stopped_control_status_says_what_to_do(daemon: Daemon) -> None:
    request = StatusRequest(protocol=limits.PROTOCOL_VERSION)
    freeze(daemon.pid)
    with pytest.raises(DaemonUnavailableError) as error:
        ask(daemon.socket, request, Status, timeout_s=0.2)
    text = str(error.value)
    assert f"(pid {daemon.pid}) has not answered" in text
    assert f"its process is stopped; `kill -CONT {daemon.pid}`" in text
    assert f"`kill -KILL {daemon.pid}`" in text
    os.kill(daemon.pid, signal.SIGCONT)
    assert ask(daemon.socket, request, Status, timeout_s=DEADLINE_S).data
