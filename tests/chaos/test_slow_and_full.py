"""A slow copier, memory that is all leased, a full ring, 200 lanes at once: throughput sinks,
nothing stalls, and everything that was held is let go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tier_harness import DEADLINE_S, Daemon, Engine, Shape, eventually, freeze, keys, running
from tierd_client import PoolPages

SMALL = Shape(page_tokens=1, pages=512, layers=2, row_bytes=64)
WIDE = Shape(page_tokens=1, pages=64, layers=1, row_bytes=1 << 20)
"""Pages of 2 MiB: a chunk holds some thirty of them."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path / "d", memory="128MiB") as daemon:
        yield daemon


@contextmanager
def engine_of(daemon: Daemon, *shapes: Shape, **options: Any) -> Iterator[Engine]:
    engine = Engine(daemon.socket, shapes, **options)
    try:
        yield engine
    finally:
        engine.close()


def at_rest(daemon: Daemon) -> bool:
    """Nothing is queued, leased or half written."""
    status = daemon.status()
    queue = status["queue"]
    busy = queue["backups"] or queue["backup_pages"] or queue["restores"]
    pools = status["pools"]
    return not busy and all(
        pool["leased"] == 0 and pool["slots_used"] == pool["pages"] for pool in pools
    )


THROTTLE = """
import os, signal, sys, time
pid = int(sys.argv[1])
try:
    while True:
        os.kill(pid, signal.SIGSTOP); time.sleep(0.05)
        os.kill(pid, signal.SIGCONT); time.sleep(0.005)
finally:
    os.kill(pid, signal.SIGCONT)
"""


@contextmanager
def crawling(pid: int) -> Iterator[None]:
    """A process gets a tenth of its time."""
    throttle = subprocess.Popen([sys.executable, "-c", THROTTLE, str(pid)])
    try:
        yield
    finally:
        throttle.send_signal(2)
        throttle.wait(DEADLINE_S)


def test_a_copier_that_crawls_slows_the_tier_and_not_the_engine(daemon: Daemon) -> None:
    with engine_of(daemon, SMALL) as engine:
        assert engine.back_up("before", 8)
        freeze(daemon.copier_pid())
        for n in range(20):  # a step that waited for the copier would be the last one
            last = engine.offer(f"slow {n}", 4, at=16 + 4 * n)
            engine.step()
        assert engine.acks[-1].seq == 0
        with crawling(daemon.copier_pid()):
            assert engine.lookup("before", 8, rid="load") == 8
            assert engine.restored("before", 8, at=500, rid="load")
            engine.settled(last)
        assert [ack.seq for ack in engine.acks] == list(range(last + 1))
        eventually(lambda: at_rest(daemon), "all is let go")
        assert engine.back_up("after", 4)


def test_what_is_leased_stays_in_a_full_tier_and_comes_free_again(tmp_path: Path) -> None:
    with running(tmp_path / "d", memory="64MiB") as daemon, engine_of(daemon, WIDE) as engine:
        kept = 0
        while engine.back_up(f"chain {kept}", 4) and kept < 10:
            kept += 1
        (pool,) = daemon.status()["pools"]
        capacity = pool["slots_total"]
        assert pool["slots_used"] >= capacity - 4, "it is full"
        leased = []
        for n in reversed(range(kept)):
            if engine.lookup(f"chain {n}", 4, rid=f"r{n}") == 4:
                leased.append(n)
        (pool,) = daemon.status()["pools"]
        assert 0 < pool["leased"] <= capacity // 2, "leases never hold more than their share"
        for n in range(6):  # what is leased stays, whatever comes
            assert engine.back_up(f"more {n}", 4)
        for n in range(kept):
            if n in leased:
                assert engine.restored(f"chain {n}", 4, rid=f"r{n}")
            else:
                engine.client.cancel(f"r{n}")
        eventually(lambda: at_rest(daemon), "all is let go")
        assert daemon.clear() > 0
        assert daemon.status()["pools"][0]["slots_used"] == 0
        assert engine.back_up("after", 4)


def test_a_ring_that_is_full_sheds_and_is_used_again(daemon: Daemon) -> None:
    with engine_of(daemon, SMALL) as engine:
        client = engine.client
        assert engine.back_up("before", 4)
        daemon.pause(True)  # what fits is decided at once, and nothing is copied
        ring = client._segment.spec.backup_ring
        pages = 200_000
        shared = torch.zeros(pages, dtype=torch.int64)
        names = np.zeros((pages, 4), np.uint64)
        names[:, 0] = np.arange(pages)
        blob = names.tobytes()
        offered = 0
        while offered <= ring + pages:
            last = client.backup([PoolPages("kv", blob, shared)], parent=b"")
            client.flush()
            offered += pages
        assert not engine.settled(last)
        daemon.pause(False)
        for n in range(3):
            assert engine.back_up(f"after {n}", 4)
            assert engine.restored(f"after {n}", 4, at=100)
        assert engine.restored("before", 4, at=100)
        eventually(lambda: at_rest(daemon), "all is let go")


@pytest.mark.parametrize("steps", [1, 8])
def test_two_hundred_lanes_are_restored_at_once(daemon: Daemon, steps: int) -> None:
    lanes, pages = 200, 2
    with engine_of(daemon, SMALL) as engine:
        client, device = engine.client, engine.ranks[0].pages["kv"]
        for n in range(0, lanes, 50):
            seqs = [engine.offer(f"lane {m}", pages, at=m % 50 * pages) for m in range(n, n + 50)]
            assert [engine.settled(seq) for seq in seqs] == [True] * 50
        for n in range(lanes):
            assert engine.lookup(f"lane {n}", pages, rid=f"lane {n}") == pages
        assert daemon.status()["pools"][0]["leased"] == lanes * pages
        places = {n: range(n * pages, (n + 1) * pages) for n in range(lanes)}
        device.wipe(range(lanes * pages))
        restores = []
        for step in range(steps):
            mine = range(step, lanes, steps)
            restores.append(
                client.restore(
                    {f"lane {n}": [device.named(keys(f"lane {n}", pages), places[n])] for n in mine}
                )
            )
        if steps == 8:
            one_more = client.restore({"x": [device.named(keys("lane 0", 1), [511])]})
            assert not one_more.finish(), "eight at a time; the ninth is a miss, not a wait"
        for restore in restores:
            restore.wait_layer(1)
        assert [restore.finish() for restore in restores] == [True] * steps
        assert sum(device.wrong(keys(f"lane {n}", pages), places[n]) for n in range(lanes)) == 0
        eventually(lambda: at_rest(daemon), "all is let go")
        assert engine.restored("lane 0", pages, at=400)
