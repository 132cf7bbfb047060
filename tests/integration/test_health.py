"""A daemon says when a part of it does not answer, and what happens next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tier_harness import Daemon, Engine, eventually, running

from tierd.cli.daemon import ask
from tierd.wire import limits
from tierd.wire.errors import DaemonUnavailableError
from tierd.wire.messages import Status, StatusRequest

Engines = Callable[..., Engine]


def status_text(daemon: Daemon) -> str:
    command = [sys.executable, "-m", "tierd", "status", "--socket", str(daemon.socket)]
    env = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=env
    ).stdout


def test_a_copier_that_does_not_answer_is_shown_gets_no_work_and_is_replaced(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run", patience=0.2) as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 4)
        copier = daemon.copier_pid()
        os.kill(copier, signal.SIGSTOP)
        eventually(lambda: daemon.status()["copiers"][0]["silent_s"] > 0, "it is noticed")
        assert "killed and started again at 8 s" in status_text(daemon)
        assert f"copier host:0 (pid {copier}) does not answer" in daemon.log
        assert engine.lookup("a", 4) == 0, "nobody is sent into a restore that would hang"
        assert not engine.back_up("b", 4, at=8)
        eventually(lambda: daemon.copier_pid() not in (0, copier), "another one takes its place")
        assert "has not answered in time" in daemon.log
        eventually(lambda: engine.lookup("a", 4) == 4, "its pages are still there")
        assert engine.restored("a", 4)


def test_a_copier_that_answers_again_goes_on_as_if_nothing_had_been(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run", patience=0.2) as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 4)
        copier = daemon.copier_pid()
        os.kill(copier, signal.SIGSTOP)
        eventually(lambda: daemon.status()["copiers"][0]["silent_s"] > 0, "it is noticed")
        os.kill(copier, signal.SIGCONT)
        eventually(lambda: daemon.status()["copiers"][0]["silent_s"] == 0, "it answers")
        assert engine.restored("a", 4)
        assert daemon.copier_pid() == copier


def test_of_a_stopped_control_status_says_what_to_do(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd.cli.daemon.REPLY_TIMEOUT_S", 0.2)
    os.kill(daemon.pid, signal.SIGSTOP)
    with pytest.raises(DaemonUnavailableError) as error:
        ask(daemon.socket, StatusRequest(protocol=limits.PROTOCOL_VERSION), Status)
    text = str(error.value)
    assert f"(pid {daemon.pid}) has not answered" in text
    assert f"its process is stopped; `kill -CONT {daemon.pid}`" in text
    assert f"`kill -KILL {daemon.pid}`" in text
    os.kill(daemon.pid, signal.SIGCONT)
    assert ask(daemon.socket, StatusRequest(protocol=limits.PROTOCOL_VERSION), Status).data
