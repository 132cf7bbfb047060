"""Misses are answered from shared memory, and nobody but control can write what it says."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

import pytest
from tier_harness import DEADLINE_S, Daemon, Engine, Shape, eventually, keys, lifeline

from tierd.wire import limits
from tierd.wire.messages import Register, Welcome

Engines = Callable[..., Engine]


def test_a_miss_costs_no_message_and_a_hit_one(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    for n in range(50):
        assert engine.lookup(f"never seen {n}", 4) == 0
    assert daemon.status()["counters"]["lookups"] == 0
    assert engine.back_up("a", 4)
    assert engine.lookup("a", 4) == 4
    assert daemon.status()["counters"]["lookups"] == 1


class LookedAt(list[str]):
    """Digits of keys, of which each may be looked at, but not all of them one after the other."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("every key was looked at")


def test_a_miss_and_a_leased_hit_cost_the_same_however_long_the_chain_is(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    absent, present = ([key.hex() for key in keys(name, 32_768)] for name in ("never seen", "a"))
    assert engine.client.lookup("r", LookedAt(absent)) == []
    assert max(engine.client.lookup("r", present)) == 4
    assert max(engine.client.lookup("r", LookedAt(present))) == 4


def test_what_was_acked_is_never_missed(daemon2: Daemon, engines: Engines) -> None:
    engine = engines(daemon2.socket, world_size=2)
    for n in range(30):
        assert engine.back_up(f"chain {n}", 1)
        assert engine.lookup(f"chain {n}", 1) == 1


def test_what_was_evicted_is_missed_without_a_message(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    daemon.clear()
    assert engine.lookup("a", 4) == 0
    assert daemon.status()["counters"]["lookups"] == 0


def test_smaller_pages_get_a_larger_table_and_what_is_there_stays_there(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    small = engines(daemon.socket, [Shape(page_tokens=1, layers=1, row_bytes=8)], instance="small")
    assert small.back_up("b", 4)

    def lookups() -> int:
        return int(daemon.status()["counters"]["lookups"])

    def misses_without_a_message() -> bool:
        before = lookups()
        engine.step()  # reads the lifeline, which brings the table
        assert engine.lookup("never seen", 4) == 0
        return lookups() == before

    assert engine.lookup("a", 4) == 4
    eventually(misses_without_a_message, "the engine has the larger table")
    assert engine.lookup("a", 4, rid="again") == 4
    assert small.lookup("b", 4) == 4
    assert engine.back_up("c", 4)
    daemon.clear()
    before = lookups()
    assert engine.lookup("c", 4) == 0
    assert lookups() == before, "what was dropped has left the larger table"


def test_an_idle_control_shows_that_it_lives(daemon: Daemon, engines: Engines) -> None:
    link = engines(daemon.socket).client._link
    before = link.heartbeat_s
    assert before > 0.0
    eventually(lambda: link.heartbeat_s > before, "its heart beats")


def test_a_rank_cannot_write_the_table(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    client = engine.client
    message = Register(
        protocol=limits.PROTOCOL_VERSION,
        software="",
        instance="another",
        rank=0,
        world_size=1,
        namespace={},
        epoch="",
        device="host:0",
        pid=os.getpid(),
        next_seq=0,
        allocations=client._exports.allocations,
        pools=client._specs,
    )
    channel = lifeline(daemon.socket)
    channel.send(message, [client._shared.fd, client._pidfd, *client._exports.fds])
    ((welcome, fds),) = channel.wait(DEADLINE_S)
    assert isinstance(welcome, Welcome)
    table = fds[2]
    with pytest.raises(PermissionError):
        mmap.mmap(table, os.fstat(table).st_size)
    with pytest.raises(PermissionError):
        os.pwrite(table, b"x", 0)
    mmap.mmap(table, os.fstat(table).st_size, prot=mmap.PROT_READ).close()
    for fd in fds:
        os.close(fd)
    channel.close()
