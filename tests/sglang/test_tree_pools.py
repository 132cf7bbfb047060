"""A prompt's way through SGLang's own tree and a tier, for every kind of KV that a model keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang_harness import Daemon, prompt
from tierd_client.sglang.tree_engine import TreeEngine

pytestmark = pytest.mark.sglang
Open = Callable[..., TreeEngine]

COMPRESSED = {"page_tokens": 256, "pool_tokens": 4096, "window": 128}
KINDS: dict[str, dict[str, Any]] = {
    "window": {"window": 10},
    "one-page-window": {"window": 3},
    "window-by-token": {"page_tokens": 1, "window": 6},
    "state": {"page_tokens": 1, "states": 8},
    "latent-state": {"kind": "mla", "page_tokens": 1, "states": 8},
    "window-state": {"page_tokens": 1, "window": 6, "states": 8, "layers": 6},
    "side-states": {"page_tokens": 1, "states": 8, "side_states": True},
    "compressed": {**COMPRESSED, "kind": "dsv4", "layers": 6},
}
"""Those whose tree has more than one component."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "latent": {"kind": "mla"},
    "heads-first": {"kind": "hnd"},
    "four-bits": {"kind": "fp4"},
    "eight-bits": {"kind": "mxfp8", "head_dim": 32},
    "indexer": {"kind": "dsa", "page_tokens": 64, "pool_tokens": 512},
    "sparse": {"kind": "minimax"},
    "compressed-low": {**COMPRESSED, "kind": "dsv41", "layers": 5},
    "compressed-and-draft": {**COMPRESSED, "kind": "dsv4", "draft_layers": 2},
    "draft": {"draft_layers": 2},
    "draft-and-window": {"draft_layers": 1, "window": 10},
}
SHAPES = [
    *((name, core) for core in ("python", "rust") for name in KINDS),
    *((name, "rust") for name in LAYOUTS),
]

ROOMY = {"memory": "1GiB", "devices": "host"}
"""Chunks for every pool of an engine from the start."""


@pytest.fixture
def tier() -> dict[str, Any]:
    return ROOMY


def open_kind(open_engine: Open, name: str, **changes: Any) -> TreeEngine:
    return open_engine(**{**KINDS, **LAYOUTS}[name], **changes)


def evict_all(engine: TreeEngine) -> None:
    engine.evict(window_tokens=1 << 30, states=1 << 10)
    assert engine.pools.free() == engine.pools.total()


@pytest.mark.parametrize(("name", "core"), SHAPES, ids=lambda value: value)
def test_an_evicted_prefix_comes_back_byte_for_byte(
    daemon: Daemon, open_engine: Open, name: str, core: str
) -> None:
    engine = open_kind(open_engine, name, core=core)
    page = engine.shape.page_tokens
    length = max(128, 4 * page)
    tokens = prompt(1, length)

    engine.serve("first", tokens)
    assert engine.locked_tokens == length
    engine.drain()
    assert engine.locked_tokens == 0
    assert engine.linker.stats.kept == length // page
    evict_all(engine)

    again = engine.serve("again", [*tokens, *prompt(2, 20)])
    assert (again.device_hit, again.loaded, again.wrong) == (0, length, 0)
    assert again.checked > 0
    engine.drain()

    # From the GPU now, what came back from the tier.
    third = engine.serve("third", [*tokens, *prompt(2, 20), *prompt(3, 20)])
    assert (third.device_hit, third.loaded, third.wrong) == ((length + 20) // page * page, 0, 0)
    engine.drain()
    engine.tree.sanity_check()
    assert not any(engine.unaccounted().values())
    evict_all(engine)


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("name", ["window", "window-by-token", "compressed"])
def test_a_window_lets_a_request_resume_wherever_one_is_whole(
    daemon: Daemon, open_engine: Open, name: str, core: str
) -> None:
    engine = open_kind(open_engine, name, core=core)
    unit = max(16, engine.shape.page_tokens)
    tokens = prompt(1, 8 * unit)
    engine.serve("first", tokens)
    engine.drain()
    evict_all(engine)
    shorter = engine.serve("shorter", [*tokens[: 5 * unit], *prompt(2, 20)])
    assert (shorter.loaded, shorter.wrong) == (5 * unit, 0)
    engine.drain()


@pytest.mark.parametrize("core", ["python", "rust"])
def test_what_has_left_the_window_before_it_was_kept_bounds_where_to_resume(
    daemon: Daemon, open_engine: Open, core: str
) -> None:
    engine = open_kind(open_engine, "window", core=core)
    page = engine.shape.page_tokens
    tokens, output = prompt(1, 40), prompt(2, 80)
    engine.step()
    running = engine.prefill("long output", tokens)
    engine.decode(running, output)  # most of it slides out of the window while it is written
    assert running.wrong == 0
    engine.finish(running)
    engine.drain()
    assert engine.linker.stats.kept == 120 // page
    evict_all(engine)

    part = engine.serve("part", [*tokens, *output[:40], 1])
    assert (part.loaded, part.wrong) == (0, 0)
    engine.drain()
    evict_all(engine)
    whole = engine.serve("whole", [*tokens, *output, 1])
    assert (whole.loaded, whole.wrong) == (120, 0)
    engine.drain()


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("name", ["state", "latent-state", "window-state"])
def test_a_state_lets_a_request_resume_only_where_it_was_taken(
    daemon: Daemon, open_engine: Open, name: str, core: str
) -> None:
    engine = open_kind(open_engine, name, core=core)
    tokens = prompt(1, 128)
    running = engine.admit("in chunks", tokens)
    engine.forward_in_chunks(running, 32)  # a state at each end
    engine.finish(running)
    engine.drain()
    evict_all(engine)

    between = engine.serve("between", [*tokens[:80], *prompt(2, 20)])
    assert (between.loaded, between.wrong) == (64, 0)
    engine.drain()
    evict_all(engine)
    branch = engine.serve("branch", [*tokens[:96], *prompt(3, 20)])
    assert (branch.loaded, branch.wrong) == (96, 0)
    engine.drain()
    evict_all(engine)
    end = engine.serve("end", [*tokens, 1])
    assert (end.loaded, end.wrong) == (128, 0)
    engine.drain()


def test_pools_of_states_are_told_of_the_layer_counter(daemon: Daemon, open_engine: Open) -> None:
    engine = open_kind(open_engine, "state")
    assert engine.pools.requests.layer_transfer_counter is engine.linker.layer_done_counter


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("tier", [{**ROOMY, "flags": ("--pool", "swa=10%")}], ids=["capped"])
def test_a_prefix_whose_windows_are_gone_is_used_as_far_as_one_remains(
    daemon: Daemon, open_engine: Open, core: str
) -> None:
    shape = {"page_tokens": 8, "pool_tokens": 1024, "layers": 5, "heads": 8, "head_dim": 128}
    engine = open_engine(core=core, window=16, **shape)
    prompts = [prompt(seed, 512) for seed in range(14)]
    for number, tokens in enumerate(prompts):
        engine.serve(f"first {number}", tokens)
        engine.drain()
        evict_all(engine)
    evicted = {pool["pool"]: pool["evictions"] for pool in daemon.status()["pools"]}
    assert evicted["swa"] > 0
    assert evicted["kv"] == 0

    def serve_again(what: str, length: int) -> list[int]:
        loaded = []
        for number, tokens in enumerate(prompts):
            again = engine.serve(f"{what} {number}", [*tokens[:length], number])
            assert not again.aborted
            assert again.wrong == 0
            loaded.append(again.loaded)
            engine.drain()
            evict_all(engine)
        return loaded

    # What goes first are windows in which nobody has ended yet.
    assert serve_again("whole", 512) == [512] * len(prompts)
    part = serve_again("part", 256)
    assert min(part) < max(part) == 256
    assert engine.linker.stats.restores_failed == 0
