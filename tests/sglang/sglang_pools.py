"""Small pools of SGLang's own classes, as the tests of the pool walk need them. Call
`load_sglang()` first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tierd_client.sglang.pools import EnginePools

PAGE = 4
SIZES = {"size": 64, "page_size": PAGE, "device": "cpu", "enable_memory_saver": False}
HEADS = {"head_num": 2, "head_dim": 32}


def plain(kind: Any = None, **changes: Any) -> Any:
    """An MHA pool, or one of a class with the same arguments."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    settings = {**SIZES, **HEADS, "layer_num": 2, "dtype": torch.bfloat16}
    return (kind or MHATokenToKVPool)(**{**settings, **changes})


def heads_first(**changes: Any) -> Any:
    from sglang.srt.environ import envs

    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return plain(**changes)


def four_bits(**changes: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolFP4

    return plain(MHATokenToKVPoolFP4, **changes)


def latent(**changes: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    settings = {**SIZES, "dtype": torch.bfloat16, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    return MLATokenToKVPool(**{**settings, "layer_num": 2, **changes})


def latent_with_indexer(**changes: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    settings = {
        **SIZES,
        "page_size": 64,
        "size": 256,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "kv_cache_dim": 48,
        "index_head_dim": 128,
        "index_buf_size": 256,
        "layer_num": 3,
    }
    return DSATokenToKVPool(**{**settings, **changes})


def sliding_window(**changes: Any) -> Any:
    """Layers 0 and 2 of three have a window."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    settings = {
        **SIZES,
        **HEADS,
        "size_swa": 32,
        "dtype": torch.bfloat16,
        "swa_attention_layer_ids": [0, 2],
        "full_attention_layer_ids": [1],
    }
    return SWAKVPool(**{**settings, **changes})


def sparse(**changes: Any) -> Any:
    """Layers 1 and 2 of three have an indexer, the latter without values."""
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    settings = {
        **SIZES,
        **HEADS,
        "dtype": torch.bfloat16,
        "idx_head_dim": 16,
        "dense_layer_ids": [0],
        "sparse_layer_ids": [1, 2],
        "disable_value_sparse_layer_ids": [2],
        "start_layer": 0,
        "end_layer": 3,
    }
    return MiniMaxSparseKVPool(**{**settings, **changes})


def compressed(ratios: Sequence[int] = (0, 4, 128), **changes: Any) -> Any:
    """DeepSeek-V4's pool, with these groups by layer: 8 pages of full attention, 4 of windows."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.runtime_context import get_context

    settings = {
        "max_num_reqs": 4,
        "page_size": 256,
        "swa_page_size": 256,
        "full_size": 8 * 256,
        "swa_size": 4 * 256,
        "c4_size": 8 * 256 // 4,
        "c128_size": 8 * 256 // 128,
        "c4_state_pool_size": 4 * 8,
        "c128_state_pool_size": 0,
        "dtype": torch.float8_e4m3fn,
        "c4_state_dtype": torch.float32,
        "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "indexer_head_dim": 128,
        "layer_num": len(ratios),
        "start_layer": 0,
        "end_layer": len(ratios),
        "compression_ratios": list(ratios),
        "device": "cpu",
        "enable_memory_saver": False,
    }
    with get_context().override_server_args(page_size=256):
        return DeepSeekV4TokenToKVPool(**{**settings, **changes})


def recurrent_requests(**changes: Any) -> Any:
    """Layers 0 and 2 of four keep states, of 8 requests."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32,
        n_groups=1,
        num_heads=2,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=4,
        mamba_size=8,
        mamba_spec_state_size=4,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
        **changes,
    )


def hybrid_linear(requests: Any, **changes: Any) -> Any:
    """Layers 1 and 3 of four have full attention, the others states."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    settings = {
        **SIZES,
        **HEADS,
        "dtype": torch.bfloat16,
        "full_attention_layer_ids": [1, 3],
        "mamba_pool": requests.mamba_pool,
    }
    return HybridLinearKVPool(**{**settings, **changes})


def walk(
    kvcache: Any, requests: Any = None, *, components: set[Any] | None = None, **changes: Any
) -> EnginePools:
    """What tierd finds in an engine with this pool."""
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from tierd_client.sglang.pools import engine_pools

    if components is None:
        components = {ComponentType.FULL}
        if isinstance(kvcache, BaseSWAKVPool):
            components.add(ComponentType.SWA)
        if isinstance(kvcache, HybridLinearKVPool) or requests is not None:
            components.add(ComponentType.MAMBA)
    return engine_pools(parameters(kvcache, requests, **changes), components)


def parameters(kvcache: Any, requests: Any = None, **changes: Any) -> Any:
    """SGLang's `CacheInitParams` of a tree over a pool."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    settings: dict[str, Any] = {"page_size": PAGE}
    if isinstance(kvcache, SWAKVPool):
        settings["sliding_window_size"] = 2 * PAGE + 1
    if isinstance(kvcache, DeepSeekV4TokenToKVPool):
        settings |= {"page_size": 256, "sliding_window_size": 128}
    settings |= changes
    allocator: Any
    if isinstance(kvcache, DeepSeekV4TokenToKVPool) and kvcache.swa_req_ring_size is None:
        allocator = SWATokenToKVPoolAllocator(
            kvcache.full_size, kvcache.swa_size, 256, torch.bfloat16, "cpu", kvcache, False
        )
    else:
        allocator = PagedTokenToKVPoolAllocator(
            kvcache.size, settings["page_size"], torch.bfloat16, "cpu", kvcache, False
        )
    return CacheInitParams(
        disable=False,
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        **settings,
    )
