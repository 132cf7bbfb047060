"""A pool's layers in one allocation: SGLang's own classes, tensor for tensor as without it, and a
page in few strided copies."""

from __future__ import annotations

import collections
import copy
import pkgutil
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang_harness import Daemon, prompt
from sglang_pools import (
    compressed,
    four_bits,
    heads_first,
    latent,
    latent_with_indexer,
    plain,
    sliding_window,
    walk,
)
from tierd_client.device import open_device
from tierd_client.pools import describe
from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_engine import TreeEngine
from torch.multiprocessing.reductions import StorageWeakRef

from tierd.copier.plan import Path, PoolPlan
from tierd.wire.geometry import pool_layout

pytestmark = pytest.mark.sglang

LAYERS = 16


def eight_bits(**changes: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8

    return plain(MHATokenToKVPoolMXFP8, page_size=64, size=256, **changes)


def windows() -> Any:
    return sliding_window(
        full_attention_layer_ids=list(range(0, 2 * LAYERS, 2)),
        swa_attention_layer_ids=list(range(1, 2 * LAYERS, 2)),
    )


KINDS: dict[str, tuple[Callable[[], Any], int, list[int]]] = {
    "plain": (lambda: plain(layer_num=LAYERS), 4, [1]),
    "values-wider-than-keys": (lambda: plain(layer_num=LAYERS, v_head_dim=64), 4, [2]),
    "heads-first": (lambda: heads_first(layer_num=LAYERS), 4, [1]),
    "four-bits": (lambda: four_bits(layer_num=LAYERS), 4, [4]),
    "eight-bits": (lambda: eight_bits(layer_num=LAYERS), 64, [4]),
    "latent": (lambda: latent(layer_num=LAYERS), 4, [1]),
    "indexer": (lambda: latent_with_indexer(layer_num=LAYERS), 64, [2]),
    "windows": (windows, 4, [1, 1]),
    "compressed": (lambda: compressed((4, 128) * LAYERS), 256, [3, 2 * LAYERS + 1]),
}
"""By name: how it is made, its tokens a page, and boxes a page in each of its pools."""


@pytest.fixture(autouse=True)
def sglang() -> types.SimpleNamespace:
    return load_sglang()


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the test runs, pools lie in arenas."""
    from tierd_client.sglang.arena import create_in_arena
    from tierd_client.sglang.plugin.arena import HOOKS

    for hook in HOOKS:
        create = pkgutil.resolve_name(hook.target)

        def created(pool: Any, create: Callable[[Any], Any] = create) -> Any:
            return create_in_arena(create, pool)

        monkeypatch.setattr(hook.target, created)


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the test runs, the plugin's hooks are in, as SGLang puts them in at its start."""
    from sglang.srt.plugins.hook_registry import HookRegistry
    from tierd_client.sglang.plugin import arena

    for hook in arena.HOOKS:
        monkeypatch.setattr(hook.target, pkgutil.resolve_name(hook.target))  # to be put back
    monkeypatch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    arena.install()
    HookRegistry.apply_hooks()


def tensors(kvcache: Any, page_tokens: int) -> list[list[torch.Tensor]]:
    found = walk(kvcache, page_size=page_tokens)
    return [[buffer.tensor for buffer in pool.buffers] for pool in found.pools]


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_a_few_strided_copies(arenas: None, kind: str) -> None:
    make, page_tokens, boxes = KINDS[kind]
    for pool, wanted in zip(walk(make(), page_size=page_tokens).pools, boxes, strict=True):
        exports = open_device([pool.buffers[0].tensor], rank=0).export(
            [buffer.tensor for buffer in pool.buffers]
        )
        spec = describe(pool, exports.places)
        addresses = [n << 40 for n in range(len(exports.allocations))]
        plan = PoolPlan(spec, addresses, pool_layout(spec))
        exports.close()
        deep = 8 * wanted <= len(pool.buffers)
        assert plan.path is (Path.STRIDED if deep else Path.ROWS)
        assert len(plan.group(0, plan.layers).progressions) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_its_tensors_are_what_they_are_without(kind: str, request: pytest.FixtureRequest) -> None:
    make, page_tokens, _ = KINDS[kind]
    usual = tensors(make(), page_tokens)
    request.getfixturevalue("arenas")
    for before, after in zip(usual, tensors(make(), page_tokens), strict=True):
        allocations = collections.Counter(t.untyped_storage().data_ptr() for t in after)
        assert len(allocations) < len(before)
        for was, now in zip(before, after, strict=True):
            assert (now.shape, now.stride(), now.dtype) == (was.shape, was.stride(), was.dtype)
            if allocations[now.untyped_storage().data_ptr()] > 1:
                assert not now.view(torch.uint8).any()
        # None reaches into another.
        for number, tensor in enumerate(after):
            tensor.view(torch.uint8).fill_(number + 1)
        for number, tensor in enumerate(after):
            assert (tensor.view(torch.uint8) == number + 1).all()


def test_its_memory_goes_with_its_last_tensor(arenas: None) -> None:
    pool = plain(layer_num=LAYERS)
    memory = StorageWeakRef(pool.k_buffer[0].untyped_storage())
    last = pool.v_buffer[-1]
    pool._clear_buffers()
    assert not memory.expired()
    del last
    assert memory.expired()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"post_capture_active": True}, "after graph capture"),
        ({"enable_custom_mem_pool": True}, "memory pool of its own"),
        ({"memory_saver_adapter": types.SimpleNamespace(enabled=True)}, "memory saver"),
    ],
)
def test_memory_that_somebody_else_manages_is_left_alone(
    state: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tierd_client.sglang import arena

    pool = copy.copy(plain())
    vars(pool).update(state)
    caplog.set_level("INFO")
    assert arena.create_in_arena(lambda _: "as usual", pool) == "as usual"
    assert why in caplog.text


def test_a_class_unknown_to_tierd_is_left_alone(
    arenas: None, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class Another(MHATokenToKVPool):  # type: ignore[misc]
        pass

    caplog.set_level("INFO")
    pool = plain(Another)
    assert pool.k_buffer[0].untyped_storage().data_ptr() == pool.k_buffer[0].data_ptr()
    assert "Another is allocated as usual: tierd does not know this class" in caplog.text


@pytest.mark.parametrize("change", ["larger", "fewer", "more"])
def test_a_pool_that_makes_other_tensors_than_in_its_rehearsal_is_allocated_as_usual(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tierd_client.sglang import arena

    pool = plain()
    del pool.k_buffer, pool.v_buffer

    def create(pool: Any) -> None:
        assert not hasattr(pool, "v_buffer")
        really = pool.device != "meta"
        count = 4 + (really and change == "more") - (really and change == "fewer")
        rows = 70 if really and change == "larger" else 68
        pool.k_buffer = [torch.zeros(68, 8, device=pool.device)]
        pool.v_buffer = [torch.zeros(rows, 8, device=pool.device) for _ in range(count)]

    arena.create_in_arena(create, pool)
    assert "rehearsal" in caplog.text
    assert len({t.untyped_storage().data_ptr() for t in (*pool.k_buffer, *pool.v_buffer)}) > 3


def test_a_pool_whose_rehearsal_fails_is_allocated_as_usual(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from tierd_client.sglang import arena

    def create(pool: Any) -> list[torch.Tensor]:
        made = [torch.zeros(8, device=pool.device) for _ in range(2)]
        made[0].sum().item()  # not to be had on the meta device
        return made

    caplog.set_level("INFO")
    first, second = arena.create_in_arena(create, plain())
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert "its rehearsal failed" in caplog.text


CONFIG = {"linker": "TierdLinker", "linker_module_path": "tierd_client.sglang"}


@pytest.mark.parametrize(
    ("on", "config", "allocations"),
    [
        (True, CONFIG, 1),
        (True, {**CONFIG, "linker_extra_config": {"socket": "/run/tierd.sock"}}, 1),
        (True, {**CONFIG, "linker_extra_config": {"arena": False}}, LAYERS),
        (True, {**CONFIG, "linker_module_path": "another"}, LAYERS),
        (False, CONFIG, LAYERS),
    ],
)
def test_only_an_engine_with_a_tierd_linker_has_arenas(
    plugin: None, on: bool, config: dict[str, Any], allocations: int
) -> None:
    with (
        load_sglang()
        .get_context()
        .override_server_args(
            enable_unified_cache_external_linker=on, unified_cache_external_linker_config=config
        )
    ):
        pool = plain(layer_num=LAYERS)
    assert len({keys.untyped_storage().data_ptr() for keys in pool.k_buffer}) == allocations


@pytest.mark.parametrize(
    "shape",
    [
        {"page_tokens": 1, "layers": 16},
        {"page_tokens": 4, "layers": 32, "window": 16, "heads": 4},
        {"page_tokens": 64, "pool_tokens": 4096, "layers": 16, "kind": "dsa"},
    ],
    ids=["one-token-pages", "windows", "indexer"],
)
def test_a_prefix_comes_back_byte_for_byte_through_strided_copies(
    arenas: None, daemon: Daemon, open_engine: Callable[..., TreeEngine], shape: dict[str, Any]
) -> None:
    engine = open_engine(core="rust", **shape)
    engine.serve("first", prompt(1, 200))
    engine.drain()
    engine.evict()
    again = engine.serve("again", prompt(1, 200))
    assert again.loaded > 0
    assert again.checked > 0
    assert again.wrong == 0
    paths = [pool["copy_path"] for pool in daemon.status()["pools"]]
    assert paths
    assert all(path.startswith("strided") for path in paths), paths
