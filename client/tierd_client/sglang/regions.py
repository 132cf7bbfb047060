"""The memory behind one KV pool of SGLang 0.5.23: which tensors, and what a row of each is.

Every class is known by its exact type. A subclass lays its tensors out differently or keeps more
beside them, and moving only what is familiar would corrupt KV silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import (
    CPUFP8KVCacheMethod,
    FP4MXBlock16KVCacheMethod,
    NVFP4KVCacheMethod,
    UnquantizedKVCacheMethod,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MambaPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)

from tierd.wire.errors import RefusedError

_QUANTIZERS = (
    UnquantizedKVCacheMethod,
    CPUFP8KVCacheMethod,
    FP4MXBlock16KVCacheMethod,
    NVFP4KVCacheMethod,
)
"""What a plain MHA pool may have its buffers made by. NVFP4's global scales are weights."""


@dataclass(frozen=True)
class Region:
    """One tensor of a pool's layer.

    Attributes:
        tensor: Shape (rows, ...).
        layer: Counted within the pool.
        rows_are_pages: A row holds a page; otherwise a token slot (of a state pool, a state).
    """

    tensor: torch.Tensor
    layer: int
    rows_are_pages: bool = False


@dataclass(frozen=True)
class PoolMemory:
    """All of a pool that a page or a state consists of.

    Attributes:
        regions: In an order that is the same in every engine with such a pool.
        format: What the bytes mean, as far as their number does not tell.
    """

    regions: Sequence[Region]
    format: str


def attention_memory(pool: Any, page_tokens: int) -> PoolMemory:
    """The tensors of a pool whose rows are token slots, or whole pages of them.

    Args:
        page_tokens: Tokens of a page of the tree; token slot s belongs to page s // page_tokens.

    Raises: RefusedError: another class, layout or backing; names it and says what to change.
    """
    describe = _KNOWN.get(type(pool))
    if describe is None:
        name = type(pool).__name__
        raise RefusedError(f"the engine's KV pool is a {name}: {_why_not(name)}")
    _check_backing(pool, page_tokens)
    memory = describe(pool, page_tokens)
    rows = pool.size + pool.page_size
    for region in memory.regions:
        needed = rows // page_tokens if region.rows_are_pages else rows
        if len(region.tensor) < needed:
            raise RefusedError(
                f"a {type(pool).__name__} of {rows} token slots has a tensor of shape "
                f"{tuple(region.tensor.shape)}; this SGLang lays it out in a way unknown to tierd"
            )
    return memory


def state_memory(pool: Any) -> PoolMemory:
    """The tensors of a Mamba pool, whose slots are states: temporal, then convolutions.

    What it keeps for speculation is work space, not part of a state.

    Raises: RefusedError: another class, or something beside the states.
    """
    if type(pool) is not MambaPool:
        raise RefusedError(
            f"the engine's states are in a {type(pool).__name__}, which tierd does not know; "
            "leave out --enable-unified-memory"
        )
    _check_allocator(pool, "the Mamba pool")
    if pool._slot_siblings:
        names = ", ".join(type(sibling).__name__ for sibling in pool._slot_siblings)
        raise RefusedError(
            f"the model has side states beside its Mamba states ({names}), which tierd does not "
            "carry yet"
        )
    if pool.enable_linear_replayssm or pool.enable_linear_replayssm_spec:
        raise RefusedError(
            "tierd does not carry the replay buffers of Mamba states yet; leave out "
            "--enable-linear-replayssm and --enable-linear-replayssm-spec"
        )
    cache = pool.mamba_cache
    states = [state for state in (cache.temporal, *cache.conv) if state.numel()]
    regions = [Region(rows, layer) for state in states for layer, rows in enumerate(state)]
    shapes = ", ".join(f"{state.dtype} {tuple(state.shape[2:])}" for state in states)
    return PoolMemory(regions, f"MambaPool {shapes}")


def _mha(pool: Any, page_tokens: int) -> PoolMemory:
    """Per layer a K and a V, and for each its scales where it is quantized in blocks."""
    if type(pool.quant_method) not in _QUANTIZERS:
        raise RefusedError(
            f"the KV pool is quantized by {type(pool.quant_method).__name__}, which tierd does "
            "not know; choose another --kv-cache-dtype"
        )
    scaled = type(pool) is not MHATokenToKVPool or pool.is_quantized_kv_cache
    if pool.use_hnd and scaled:
        raise RefusedError(
            "the KV pool is quantized and has the layout 'hnd' at once; "
            "unset SGLANG_USE_HND_KVCACHE"
        )
    if pool.kv_cache_layout not in ("nhd", "hnd"):
        raise RefusedError(
            f"the KV pool's layout is {pool.kv_cache_layout!r}, and tierd serves 'nhd' and "
            "'hnd'; unset SGLANG_AITER_KV_CACHE_LAYOUT"
        )
    interleaved = getattr(pool, "mxfp8_sf_interleaved", False)
    sides = [
        (pool.k_buffer, pool.use_hnd),
        (pool.v_buffer, pool.use_hnd),
        (pool.k_scale_buffer, interleaved),
        (pool.v_scale_buffer, interleaved),
    ]
    if type(pool) is MHATokenToKVPool:
        sides += [(pool.native_k_scale_buffer, True), (pool.native_v_scale_buffer, True)]
    layers = len(pool.k_buffer)
    if any(side is not None and len(side) != layers for side, _ in sides):
        raise RefusedError(f"a {type(pool).__name__} whose parts have different numbers of layers")
    if pool.use_hnd and any(buffer.shape[2] != page_tokens for buffer in pool.k_buffer):
        raise RefusedError("the KV pool's pages of layout 'hnd' are not those of the tree")
    # Layer by layer: where K and V of a layer follow each other on the device, they do so in host
    # memory too, and a page is one strided copy rather than two.
    regions = [
        Region(side[layer], layer, rows_are_pages)
        for layer in range(layers)
        for side, rows_are_pages in sides
        if side is not None
    ]
    scales = " with interleaved scales" if interleaved else ""
    return PoolMemory(
        regions,
        f"{_kind(pool)} {pool.quant_method.name} {pool.kv_cache_layout}{scales}",
    )


def _mla(pool: Any, page_tokens: int) -> PoolMemory:
    """Per layer one latent row a token, and its scales where it is quantized in blocks."""
    if pool.dcp_replicated:
        raise RefusedError(
            "tierd does not serve decode context parallelism yet; leave out --dcp-size"
        )
    sides = [pool.kv_buffer]
    if pool.kv_scale_buffer is not None:
        sides.append(pool.kv_scale_buffer)
    regions = [Region(tensor, layer) for side in sides for layer, tensor in enumerate(side)]
    packed = " packed with its scales" if pool.dsa_kv_cache_store_fp8 else ""
    return PoolMemory(regions, f"{_kind(pool)} rank {pool.kv_lora_rank}{packed}")


def _dsa(pool: Any, page_tokens: int) -> PoolMemory:
    """MLA, and in the layers that choose tokens the indexer's keys with their scales, by page."""
    if pool.index_kpool != 1 or pool.index_kpool_compress:
        raise RefusedError(
            "the model's indexer pools the keys of several tokens, which tierd does not carry yet"
        )
    latent = _mla(pool, page_tokens)
    pages = (pool.size + pool.page_size) // page_tokens
    indexer = [
        Region(tensor[:pages], layer, rows_are_pages=True)
        for layer, tensor in enumerate(pool.index_k_with_scale_buffer)
        if len(tensor)
    ]
    return PoolMemory(
        [*latent.regions, *indexer],
        f"{latent.format}, indexer of {pool.index_head_dim} in pages of {pool.index_page_size}",
    )


_KNOWN: dict[type, Callable[[Any, int], PoolMemory]] = {
    MHATokenToKVPool: _mha,
    MHATokenToKVPoolFP4: _mha,
    MHATokenToKVPoolMXFP8: _mha,
    MLATokenToKVPool: _mla,
    MLATokenToKVPoolFP4: _mla,
    DSATokenToKVPool: _dsa,
}
KNOWN_CLASSES = frozenset(_KNOWN)
"""The classes of KV pools that `attention_memory` can describe."""

_WHY_NOT = {
    "NoOpMHATokenToKVPool": "it holds no KV",
    "DeepSeekV4TokenToKVPool": "tierd does not carry DeepSeek-V4's compressed KV yet",
    "MiniMaxSparseKVPool": "tierd does not carry MiniMax's sparse KV yet",
}


def _why_not(name: str) -> str:
    if name.startswith("Unified"):
        return "tierd does not serve pools in unified memory; leave out --enable-unified-memory"
    if name.startswith("HiSparse"):
        return "HiSparse would be a second host tier beside tierd"
    return _WHY_NOT.get(name, "tierd does not know how its pages lie in memory")


def _kind(pool: Any) -> str:
    stored = "" if pool.store_dtype == pool.dtype else f" as {pool.store_dtype}"
    return f"{type(pool).__name__} {pool.dtype}{stored}"


def _check_backing(pool: Any, page_tokens: int) -> None:
    """Refuse memory that another process cannot map, or that moves."""
    if pool.post_capture_active:
        raise RefusedError(
            "the KV pool is backed after graph capture, by memory that CUDA IPC cannot share; "
            "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )
    _check_allocator(pool, "the KV pool")
    if pool.layer_shard_enabled or pool.host_transfer_translate is not None:
        raise RefusedError(
            "the KV pool shards or relocates its layers; leave out --enable-unified-memory and "
            "the flags that split KV by layer"
        )
    if pool.page_size != page_tokens:
        raise RefusedError(
            f"the KV pool has pages of {pool.page_size} tokens and the tree of {page_tokens}; "
            "tierd needs one page size for both"
        )


def _check_allocator(pool: Any, what: str) -> None:
    if pool.enable_custom_mem_pool:
        raise RefusedError(
            f"{what} lies in a custom memory pool, which CUDA IPC cannot share; "
            "unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
        )
    if getattr(pool.memory_saver_adapter, "enabled", False):
        raise RefusedError(
            f"{what} can be unmapped by the memory saver; leave out --enable-memory-saver"
        )
