"""Engines that the linker cannot serve are refused at start, with the reason and what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.sglang.cpu_engine import load_sglang

from tierd.wire.errors import ConfigError, RefusedError

pytestmark = pytest.mark.sglang

SIZES = {"size": 64, "page_size": 4, "device": "cpu", "enable_memory_saver": False}
HEADS = {"head_num": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def sglang() -> None:
    load_sglang()


def plain(**changes: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    settings = {**SIZES, **HEADS, "layer_num": 2, "dtype": torch.bfloat16}
    return MHATokenToKVPool(**{**settings, **changes})


def sliding_window() -> Any:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=64,
        size_swa=64,
        page_size=4,
        dtype=torch.bfloat16,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        device="cpu",
        **HEADS,
    )


def latent() -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        **SIZES, dtype=torch.bfloat16, kv_lora_rank=32, qk_rope_head_dim=16, layer_num=2
    )


def hybrid_linear() -> Any:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        **SIZES,
        **HEADS,
        dtype=torch.bfloat16,
        full_attention_layer_ids=[1],
        mamba_pool=None,
    )


def fp4() -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolFP4

    return MHATokenToKVPoolFP4(**SIZES, **HEADS, layer_num=2, dtype=torch.bfloat16)


def without_kv() -> Any:
    from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool

    return NoOpMHATokenToKVPool(**SIZES, **HEADS, layer_num=2, dtype=torch.bfloat16)


def heads_first() -> Any:
    from sglang.srt.environ import envs

    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return plain()


def vectorized() -> Any:
    pool = plain()
    pool.kv_cache_layout = "vectorized_5d"  # built on ROCm only
    return pool


POOLS: list[tuple[Callable[[], Any], str]] = [
    (sliding_window, "SWAKVPool: sliding-window layers"),
    (latent, "MLATokenToKVPool: tierd does not carry MLA"),
    (hybrid_linear, "HybridLinearKVPool: tierd does not carry Mamba"),
    (fp4, "scales of FP4"),
    (without_kv, "holds no KV"),
    (heads_first, "SGLANG_USE_HND_KVCACHE"),
    (vectorized, "vectorized_5d"),
]


@pytest.mark.parametrize(("build", "reason"), POOLS, ids=[p[0].__name__ for p in POOLS])
def test_pools_that_are_not_plain_are_refused(build: Callable[[], Any], reason: str) -> None:
    from tierd_client.sglang.pools import kv_pool

    with pytest.raises(RefusedError, match=reason):
        kv_pool(build(), 4)


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("post_capture_active", True, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ("enable_custom_mem_pool", True, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
        ("k_scale_buffer", [torch.ones(1)], "scales beside"),
        ("layer_shard_enabled", True, "by layer"),
        ("host_transfer_translate", lambda indices: indices, "--enable-unified-memory"),
    ],
)
def test_pools_with_something_beside_their_rows_are_refused(
    attribute: str, value: Any, reason: str
) -> None:
    from tierd_client.sglang.pools import kv_pool

    pool = plain()
    setattr(pool, attribute, value)  # what these modes set, and a CPU cannot build
    with pytest.raises(RefusedError, match=reason):
        kv_pool(pool, 4)


def test_fp8_without_scales_is_served() -> None:
    from tierd_client.sglang.pools import kv_pool

    pool = kv_pool(plain(dtype=torch.float8_e4m3fn), 4)
    assert {buffer.tensor.element_size() for buffer in pool.buffers} == {1}


def test_a_plain_pool_is_all_keys_then_all_values() -> None:
    from tierd_client.sglang.pools import kv_pool

    kvcache = plain(v_head_dim=16)
    pool = kv_pool(kvcache, 4)
    assert [buffer.layer for buffer in pool.buffers] == [0, 1, 0, 1]
    assert pool.buffers[1].tensor is kvcache.k_buffer[1]
    assert pool.buffers[2].tensor is kvcache.v_buffer[0]


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ({"enable_memory_saver": True}, "--enable-memory-saver"),
    ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
    ({"dcp_size": 2}, "--dcp-size"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
    ({"pp_size": 2}, "--pp-size"),
    ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
]


@pytest.mark.parametrize(("change", "reason"), ARGUMENTS, ids=[next(iter(a[0])) for a in ARGUMENTS])
def test_arguments_that_tierd_does_not_serve_are_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(RefusedError, match=reason):
        link(tmp_path, ServerArgs(model_path="/model", **change))


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"pp_size": 2}, "--pp-size"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
    ({"is_eagle": True}, "--speculative-algorithm"),
    ({"mtp_draft_device_pools": (object(),)}, "--speculative-algorithm"),
    ({"sidecar_draft_device_pools": (object(),)}, "--speculative-algorithm"),
]


@pytest.mark.parametrize(
    ("change", "reason"), PARAMETERS, ids=[next(iter(p[0])) for p in PARAMETERS]
)
def test_a_tree_that_tierd_does_not_serve_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RefusedError, match=reason):
        link(tmp_path, **change)


def test_components_beside_full_attention_are_refused(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    with pytest.raises(RefusedError, match="the tree has SWA"):
        link(tmp_path, components={ComponentType.FULL, ComponentType.SWA})


def test_every_reason_is_given_at_once(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"--pp-size.*--speculative-algorithm"):
        link(tmp_path, pp_size=2, is_eagle=True)


def test_a_typo_in_the_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sokcet"):
        link(tmp_path, extra_config={"sokcet": "/run/tierd.sock"})
    with pytest.raises(ConfigError, match="socket"):
        link(tmp_path, extra_config={"socket": 7})


def test_sglang_finds_the_linker_by_the_names_in_its_flag(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
    from tierd_client.sglang import TierdLinker

    linker = create_unified_cache_linker(
        None,
        parameters(),
        backend="dynamic",
        config={
            "linker": "TierdLinker",
            "linker_module_path": "tierd_client.sglang",
            "linker_extra_config": {"socket": str(tmp_path / "tierd.sock")},
        },
        components={ComponentType.FULL},
    )
    assert isinstance(linker, TierdLinker)
    linker.close()


def link(
    tmp_path: Path,
    server_args: Any = None,
    *,
    components: set[Any] | None = None,
    extra_config: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    """Construct a linker as SGLang does, over a plain pool."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from tierd_client.sglang import TierdLinker

    TierdLinker(
        server_args,
        parameters(**changes),
        components=components or {ComponentType.FULL},
        extra_config=extra_config or {"socket": str(tmp_path / "tierd.sock")},
    ).close()


def parameters(**changes: Any) -> Any:
    """SGLang's `CacheInitParams` of a tree over a plain pool."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.bfloat16, "cpu", plain(), False)
    return CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=allocator,
        page_size=4,
        **changes,
    )
