"""Real SGLang pools at real sizes on a GPU: one allocation, its copy path, and every byte back.

Needs a GPU with room for them, and sglang: `pytest tests/sglang/test_arena_gpu.py -s`.
"""

from __future__ import annotations

import gc
import pkgutil
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from sglang_harness import DEADLINE_S, Daemon, prompt
from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_engine import TreeEngine

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

KINDS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"layers": 36, "heads": 8, "head_dim": 128, "page_tokens": 64},
    "Qwen3-8B-token-pages": {"layers": 36, "heads": 8, "head_dim": 128, "page_tokens": 1},
    "past-2-GiB": {"layers": 16, "heads": 16, "head_dim": 128, "pool_tokens": 614_400},
    "gpt-oss": {"layers": 24, "heads": 8, "head_dim": 64, "page_tokens": 64, "window": 128},
    "latent": {"layers": 61, "kind": "mla", "heads": 4, "head_dim": 128, "page_tokens": 64},
    "indexer": {"layers": 61, "kind": "dsa", "heads": 4, "head_dim": 128, "page_tokens": 64},
}


@pytest.fixture
def tier() -> dict[str, Any]:
    return {"memory": "2GiB", "devices": "0"}


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    load_sglang()
    from tierd_client.sglang.arena import create_in_arena
    from tierd_client.sglang.plugin.arena import HOOKS

    for hook in HOOKS:
        create = pkgutil.resolve_name(hook.target)

        def created(pool: Any, create: Callable[[Any], Any] = create) -> Any:
            start = time.perf_counter()
            made = create_in_arena(create, pool)
            torch.cuda.synchronize()
            print(
                f"\n{type(pool).__name__}: made in {time.perf_counter() - start:.3f} s", flush=True
            )
            return made

        monkeypatch.setattr(hook.target, created)


@pytest.mark.parametrize("name", KINDS)
def test_a_real_pool_comes_back_by_the_path_of_its_rows(
    arenas: None, daemon: Daemon, open_engine: Callable[..., TreeEngine], name: str
) -> None:
    shape = {"pool_tokens": 448_000, "page_tokens": 16, "core": "python", **KINDS[name]}
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 90 << 30:
        pytest.skip("needs 90 GiB of free GPU memory")
    torch.cuda.reset_peak_memory_stats()
    engine = open_engine(device="cuda", **shape)
    print(
        f"{name}: {torch.cuda.memory_allocated() / 2**30:.2f} GiB, at its highest "
        f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    )
    engine.serve("first", prompt(1, 1000))
    engine.drain()
    assert engine.linker.stats.kept > 0
    deadline = time.monotonic() + DEADLINE_S
    for number in count():
        engine.evict()
        again = engine.serve(f"again-{number}", prompt(1, 1000))
        if again.loaded:
            break
        # A new client finds nothing until its watchdog is up.
        assert time.monotonic() < deadline
        engine.drain()
    paths = [pool["copy_path"] for pool in daemon.status()["pools"]]
    print(f"{name}: {paths}", flush=True)
    assert again.checked > 0
    assert again.wrong == 0
    # 64 tokens of this model are rows of 128 KiB; the others' are narrower than 96.
    expected = "rows" if name == "Qwen3-8B" else "strided"
    assert all(path.startswith(expected) for path in paths)
