"""Every kind of KV through SGLang's own tree on a GPU, over CUDA IPC, by random operations.

Needs a GPU and sglang: `pytest tests/sglang/test_tree_gpu.py --operations 300`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang_harness import Daemon
from sglang_users import ENGINES, LARGE, Users
from tierd_client.sglang.tree_engine import TreeEngine

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
Open = Callable[..., TreeEngine]

LAYOUTS: dict[str, dict[str, Any]] = {
    "heads-first": {"kind": "hnd", "page_tokens": 16, "pool_tokens": 1024},
    "four-bits": {"kind": "fp4", "page_tokens": 16, "pool_tokens": 1024, "layers": 8},
    "eight-bits": {"kind": "mxfp8", "page_tokens": 16, "pool_tokens": 1024},
    "indexer": {"kind": "dsa", "page_tokens": 64, "pool_tokens": 4096},
    "draft": {"draft_layers": 2, "page_tokens": 16, "pool_tokens": 1024},
}
ALL = {**ENGINES, **LAYOUTS}


@pytest.fixture
def tier(name: str) -> dict[str, Any]:
    """Little more memory than a chunk for each pool of the engine."""
    pools = 1 + ("window" in ALL[name]) + ("states" in ALL[name])
    return {"memory": f"{64 * (1 + pools)}MiB", "devices": "0"}


@pytest.mark.parametrize("name", ALL)
def test_random_operations_leave_no_wrong_byte_and_no_lost_slot(
    daemon: Daemon, open_engine: Open, operations: int, name: str
) -> None:
    engine = open_engine(device="cuda", **{**LARGE, **ALL[name]})
    Users(engine, seed=operations).act(operations)
    assert engine.linker.stats.restored > 0
    assert engine.linker.stats.restores_failed == 0
