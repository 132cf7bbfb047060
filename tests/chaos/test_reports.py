"""Faults that other tiers were reported for and that have no better place: each by its symptom.
The table in this directory's README names the tests of all of them."""

from __future__ import annotations

import ast
import os
import random
import signal
from pathlib import Path

from tier_harness import Engine, Shape, eventually, freeze, is_dead, running

import tierd.copier

WIDE = Shape(page_tokens=1, pages=64, layers=1, row_bytes=1 << 20)


def test_a_rank_that_cannot_be_let_go_of_hangs_nobody_else(tmp_path: Path) -> None:
    """A peer's unregistration waited for a stream, and the whole daemon with it."""
    with running(tmp_path / "d", devices="host:2") as daemon:
        victim = Engine(daemon.socket, instance="victim", world_size=2)
        other = Engine(daemon.socket, instance="other")
        assert victim.back_up("a", 4)
        hung = daemon.copier_pid("host:1")
        freeze(hung)
        victim.offer("b", 4)
        victim.step()
        victim.close()
        for n in range(20):
            assert other.back_up(f"meanwhile {n}", 2)
            assert other.restored(f"meanwhile {n}", 2)
        assert not is_dead(hung), "all that was while it hung"
        os.kill(hung, signal.SIGKILL)
        eventually(
            lambda: daemon.status()["queue"]["backup_pages"] == 0, "and nothing waits for it"
        )
        eventually(daemon.copiers_ready, "another one is there")
        other.close()


def test_a_full_tier_evicts_for_ever_whatever_has_died_meanwhile(tmp_path: Path) -> None:
    """A peer's eviction thread died, nobody noticed, and the pool stayed full."""
    rng = random.Random(1)
    with running(tmp_path / "d", memory="64MiB") as daemon:
        engine = Engine(daemon.socket, [WIDE])
        for n in range(4):
            for m in range(10):
                eventually(
                    lambda name=f"{n} {m}": engine.back_up(name, 4), "there is room for more"
                )
            if rng.random() < 0.5:
                os.kill(daemon.copier_pid(), signal.SIGKILL)
            else:
                Engine(daemon.socket, [WIDE], instance="passing by").close()
        (pool,) = daemon.status()["pools"]
        assert pool["evictions"] >= 160 - pool["slots_total"]
        assert pool["slots_used"] == pool["pages"] <= pool["slots_total"]
        engine.close()


def test_the_daemon_launches_no_kernel() -> None:
    """A peer's copy kernel made decode's p99 46% slower: the copy engines alone are used."""
    files = list(Path(str(tierd.copier.__file__)).parent.glob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [
                node.attr if isinstance(node, ast.Attribute) else "",
                node.id if isinstance(node, ast.Name) else "",
                node.value
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                else "",
            ]
            for name in names:
                called = name.startswith(("cuLaunch", "cudaLaunch", "cuModule", "cuLibrary"))
                assert not called, f"{file.name}: {name}"
