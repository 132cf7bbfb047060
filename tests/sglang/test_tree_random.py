"""Thousands of random operations on engines of every kind, over a tier that is too small.

After each of them every slot of every pool is free or the tree's, and all reused KV was right.
`--operations N` sets how many there are for each engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang_harness import Daemon
from sglang_users import ENGINES, LARGE, Users
from tierd_client.sglang.tree_engine import TreeEngine

pytestmark = pytest.mark.sglang
Open = Callable[..., TreeEngine]


@pytest.fixture
def tier(name: str) -> dict[str, Any]:
    """One chunk of memory for each pool of the engine."""
    pools = 1 + ("window" in ENGINES[name]) + ("states" in ENGINES[name])
    return {"memory": f"{64 * pools}MiB", "devices": "host"}


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("name", ENGINES)
def test_random_operations_leave_no_wrong_byte_and_no_lost_slot(
    daemon: Daemon, open_engine: Open, operations: int, name: str, core: str
) -> None:
    engine = open_engine(core=core, **{**LARGE, **ENGINES[name]})
    Users(engine, seed=operations).act(operations)
    assert engine.linker.stats.restored > 0
    assert engine.linker.stats.restores_failed == 0
    assert sum(pool["evictions"] for pool in daemon.status()["pools"]) > 0
