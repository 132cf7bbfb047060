"""Pages that change in host memory behind the daemon's back: with --verify, nobody gets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tier_harness import Daemon, Engine, Shape, content, eventually, keys, open_files, running

Engines = Callable[..., Engine]


def damage(daemon: Daemon, name: str, page: int, *, pool: str = "kv", rank: int = 0) -> None:
    """Turn one bit of a cached page, wherever it lies in the daemon's memory."""
    shape = Shape()
    (key,) = keys(name, page + 1, page)
    row = content(key, rank, pool, 1, shape.page_tokens * shape.row_bytes).tobytes()
    found = 0
    for link, what in open_files(daemon.pid).items():
        if "chunk" not in what:
            continue
        with link.open("r+b") as file:
            at = file.read().find(row)
            if at >= 0:
                file.seek(at + 7)
                file.write(bytes([row[7] ^ 4]))
                found += 1
    assert found == 1, "the page is there once"


def test_a_damaged_page_is_never_restored_and_then_a_miss_that_heals(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run", verify="always") as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 6)
        assert engine.back_up("b", 4, at=8)
        assert engine.restored("a", 6)
        damage(daemon, "a", 3)
        assert engine.lookup("a", 6, rid="load") == 6
        assert not engine.restored("a", 6), "the verdict says so"
        eventually(lambda: daemon.status()["counters"]["pages_corrupt"], "control knows, too")
        assert daemon.status()["counters"]["pages_corrupt"] == 1
        assert "1 pages have changed in host memory" in daemon.log
        assert engine.lookup("a", 6) == 3, "what comes before it can still be used"
        assert engine.restored("a", 3)
        assert engine.restored("b", 4)
        assert engine.back_up("a", 6)
        assert engine.lookup("a", 6) == 6
        assert engine.restored("a", 6)
        (pool,) = daemon.status()["pools"]
        assert pool["slots_used"] == pool["pages"] == 10


def test_a_page_damaged_in_one_rank_is_lost_for_all(tmp_path: Path, engines: Engines) -> None:
    with running(tmp_path / "run", devices="host:2", verify="always") as daemon:
        engine = engines(daemon.socket, world_size=2)
        assert engine.back_up("a", 4)
        damage(daemon, "a", 2, rank=1)
        landed = [restore.finish() for restore in engine.start_restore("a", 4)]
        assert landed == [True, False]
        # The copier tells the rank itself, and control after that.
        eventually(lambda: engine.lookup("a", 4) == 2, "it is dropped")
        assert engine.restored("a", 2)


@pytest.mark.parametrize("verify", ["off", "sample"])
def test_pages_without_a_checksum_are_restored_as_they_are(
    tmp_path: Path, engines: Engines, verify: str
) -> None:
    sampled = [n for n in range(6) if keys("a", 6)[n][0] % 16 == 0]
    assert sampled == []
    with running(tmp_path / "run", verify=verify) as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 6)
        damage(daemon, "a", 3)
        (restore,) = engine.start_restore("a", 6)
        assert restore.finish()
        assert engine.ranks[0].pages["kv"].wrong(keys("a", 6), range(6)) == 1
        assert daemon.status()["counters"]["pages_corrupt"] == 0
