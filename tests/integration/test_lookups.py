"""Lookups of a real client: long ones, ones that nobody reads, and of requests that are loading."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tier_harness import Daemon, Engine, eventually, freeze, keys, running

from tierd.wire.limits import KEY_BYTES

Engines = Callable[..., Engine]
MORE_THAN_A_SOCKET_HOLDS = (1 << 20) // KEY_BYTES


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path / "tier", patience=10) as daemon:
        yield daemon


def long_chain(name: str, pages: int) -> bytes:
    """A chain of which the tier has the first pages, if it has any."""
    first = b"".join(keys(name, pages))
    return first + os.urandom((MORE_THAN_A_SOCKET_HOLDS - pages) * KEY_BYTES)


def leased(daemon: Daemon) -> int:
    (pool,) = daemon.status()["pools"]
    return int(pool["leased"])


def test_a_lookup_of_more_than_a_socket_holds(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket, lookup_timeout_s=60.0)
    assert engine.back_up("a", 4)
    assert max(engine.ranks[0].client.lookup("r", long_chain("a", 4))) == 4
    assert leased(daemon) == 4
    engine.client.cancel("r")
    eventually(lambda: leased(daemon) == 0, "its lease has ended")


def test_a_long_lookup_that_nobody_reads_holds_up_no_later_call(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket, lookup_timeout_s=0.2)
    assert engine.back_up("a", 4)
    chain = long_chain("a", 4)
    freeze(daemon.pid)
    for number in range(50):
        assert engine.client.lookup(f"r{number}", chain) == []
        engine.client.cancel(f"r{number}")
        engine.step()
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: engine.lookup("a", 4, rid="again") == 4, "lookups hit again")
    engine.client.cancel("again")
    eventually(lambda: leased(daemon) == 0, "nothing is left of those that were given up")
    assert engine.restored("a", 4)


def test_a_request_that_is_loading_is_not_looked_up(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    assert engine.lookup("a", 4, rid="load") == 4
    freeze(daemon.copier_pid())
    (restore,) = engine.start_restore("a", 4, rid="load")
    assert engine.lookup("a", 4, rid="load") == 0, "it could overtake the restore"
    assert engine.lookup("a", 4, rid="another") == 4
    os.kill(daemon.copier_pid(), signal.SIGCONT)
    assert restore.finish()
    assert engine.lookup("a", 4, rid="load") == 4
