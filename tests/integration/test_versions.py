"""A rolling upgrade to another version of the protocol, whichever end comes first: a refusal that
says what to upgrade, an engine that serves on without a host tier, and pages that are still there
once the two ends understand each other again."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tier_harness import DEADLINE_S, Engine, eventually, running

from tierd.wire.limits import PROTOCOL_VERSION

Engines = Callable[..., Engine]
NEXT, LAST = PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 1


@pytest.fixture
def pages() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path(tempfile.mkdtemp(prefix="tierd-test-", dir="/dev/shm"))
    yield directory / "pages"
    shutil.rmtree(directory)


def refusals(text: str) -> int:
    return text.count("the tierd daemon refuses this rank")


def serves_without_a_tier(engine: Engine) -> None:
    assert engine.lookup("a", 6) == 0
    assert not engine.back_up("b", 4, at=8)
    assert not engine.restored("a", 6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_newer_daemon_under_a_running_engine(
    tmp_path: Path,
    pages: Path,
    engines: Engines,
    caplog: pytest.LogCaptureFixture,
    world_size: int,
) -> None:
    with running(tmp_path / "run", persist=pages) as daemon:
        engine = engines(daemon.socket, world_size=world_size)
        assert engine.back_up("a", 6)
        daemon.stop()
        eventually(lambda: not engine.connected(), "the engine notices")
    with running(tmp_path / "run", persist=pages, protocol=NEXT) as newer:
        assert "took over 6 pages" in newer.log

        def refused() -> int:
            engine.step()
            return newer.log.count("upgrade the client")

        eventually(lambda: refused() >= 2 * world_size, "it is refused, again and again")
        said = f"the client speaks protocol {PROTOCOL_VERSION}, the daemon {NEXT}"
        assert said in caplog.text
        assert refusals(caplog.text) == world_size, "each rank says it once"
        serves_without_a_tier(engine)
        newer.stop()
    with running(tmp_path / "run", persist=pages):
        eventually(engine.connected, "it registers by itself with one that it understands")
        eventually(lambda: engine.lookup("a", 6) == 6, "memory is pinned")
        assert engine.restored("a", 6)


@pytest.mark.parametrize(("protocol", "behind"), [(NEXT, "client"), (LAST, "daemon")])
def test_an_engine_that_starts_under_a_daemon_of_another_version(
    tmp_path: Path,
    engines: Engines,
    caplog: pytest.LogCaptureFixture,
    protocol: int,
    behind: str,
) -> None:
    with running(tmp_path / "run", protocol=protocol) as daemon:
        engine = engines(daemon.socket, world_size=2, connect=False)
        assert [rank.client.connect(DEADLINE_S) for rank in engine.ranks] == [False, False]
        assert f"upgrade the {behind}" in caplog.text
        assert "Serving without a host tier" in caplog.text
        serves_without_a_tier(engine)
        daemon.stop()
    with running(tmp_path / "run"):
        eventually(engine.connected, "it registers by itself with one that it understands")
        assert engine.back_up("a", 6)
        assert engine.restored("a", 6)


def test_commands_of_another_version_are_told_the_same(tmp_path: Path) -> None:
    with running(tmp_path / "run", protocol=LAST) as daemon:
        for command in ("status", "clear", "pause"):
            answer = subprocess.run(
                [sys.executable, "-m", "tierd", command, "--socket", str(daemon.socket)],
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            assert answer.returncode == 1
            assert "upgrade the daemon" in answer.stderr
