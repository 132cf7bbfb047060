"""Pools whose bytes are the same on every rank: one copy serves them, and each brings a part."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tier_harness import Daemon, Engine, Shape, eventually, freeze, is_dead, running

LATENT = Shape(replicated=True)
SHARDED = Shape()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path / "daemon", devices="host:2") as daemon:
        yield daemon


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    engine = Engine(daemon.socket, [LATENT], world_size=2)
    yield engine
    engine.close()


def pool(daemon: Daemon) -> dict[str, Any]:
    (only,) = daemon.status()["pools"]
    return dict(only)


def moved(daemon: Daemon, what: str) -> list[int]:
    return [copier[what] for copier in daemon.status()["copiers"]]


def test_the_presence_table_is_as_large_as_the_pages_are_many(
    tmp_path: Path, daemon: Daemon
) -> None:
    small = Shape(page_tokens=1, layers=1, row_bytes=512, replicated=True)
    together = Engine(daemon.socket, [small], world_size=2)
    with running(tmp_path / "alone") as other:
        alone = Engine(other.socket, [small])
        tables = [engine.client._link.presence for engine in (together, alone)]
        assert len({table.buckets for table in tables if table is not None}) == 1
        alone.close()
    together.close()


def test_memory_is_used_once_and_every_rank_restores_every_byte(
    daemon: Daemon, engine: Engine
) -> None:
    assert engine.back_up("a", 12)
    row_bytes = 2 * LATENT.layers * LATENT.page_tokens * LATENT.row_bytes
    assert (pool(daemon)["shards"], pool(daemon)["bytes_used"]) == (1, 12 * row_bytes)
    assert engine.lookup("a", 12, rid="load") == 12
    assert engine.restored("a", 12, at=16)
    # A verdict comes from the copier itself, and its count by way of control.
    eventually(lambda: moved(daemon, "restore_pages") == [12, 12], "each has loaded all")


def test_a_backup_is_striped_over_the_ranks(daemon: Daemon, engine: Engine) -> None:
    assert engine.back_up("a", 12)
    assert moved(daemon, "backup_pages") == [6, 6]
    for n in range(12):
        assert engine.back_up(f"one page {n}", 1)
    assert sum(moved(daemon, "backup_pages")) == 24
    assert min(moved(daemon, "backup_pages")) > 6, "single pages are spread over them too"


def test_a_sharded_pool_beside_it_keeps_its_shards(daemon: Daemon) -> None:
    shapes = [LATENT, Shape("states", layers=1)]
    engine = Engine(daemon.socket, shapes, world_size=2)
    assert engine.back_up("a", 8)
    assert {p["pool"]: p["shards"] for p in daemon.status()["pools"]} == {"kv": 1, "states": 2}
    assert engine.lookup("a", 8, rid="load") == 8
    assert engine.restored("a", 8, at=16)
    engine.close()


def test_engines_that_differ_in_it_share_no_page(daemon: Daemon, engine: Engine) -> None:
    assert engine.back_up("a", 8)
    other = Engine(daemon.socket, [SHARDED], world_size=2, instance="other")
    assert other.lookup("a", 8) == 0
    alike = Engine(daemon.socket, [LATENT], world_size=2, instance="alike")
    assert alike.lookup("a", 8, rid="load") == 8
    assert alike.restored("a", 8, at=16)
    other.close()
    alike.close()


def test_a_rank_that_dies_in_the_middle_of_a_backup_leaves_no_page(
    daemon: Daemon, engine: Engine
) -> None:
    assert engine.back_up("before", 1)
    freeze(daemon.copier_pid("host:1"))
    try:
        seq = engine.offer("a", 8)
        engine.step()
        eventually(lambda: moved(daemon, "backup_pages")[0] >= 4, "one rank has copied its part")
        dying = engine.ranks.pop()
        dying.client.close()
        eventually(lambda: len(daemon.status()["sessions"]) == 1, "its end is noticed")
        assert pool(daemon)["pages"] == 1
    finally:
        os.kill(daemon.copier_pid("host:1"), signal.SIGCONT)
    assert not engine.settled(seq)
    assert (pool(daemon)["pages"], pool(daemon)["slots_used"]) == (1, 1)


def test_a_copier_that_dies_comes_back_to_the_same_pages(daemon: Daemon, engine: Engine) -> None:
    assert engine.back_up("a", 8)
    for device in ("host:0", "host:1"):
        before = daemon.copier_pid(device)
        os.kill(before, signal.SIGKILL)
        eventually(lambda pid=before: is_dead(pid), "the copier is dead")
        eventually(
            lambda device=device, pid=before: daemon.copier_pid(device) != pid,
            "control has noticed",
        )
        eventually(
            lambda: daemon.copiers_ready() and engine.lookup("a", 8, rid="load") == 8,
            "the pages are found again",
        )
        assert engine.restored("a", 8, at=16)
    assert engine.back_up("b", 8)
    assert engine.lookup("b", 8, rid="load") == 8
    assert engine.restored("b", 8, at=16)
