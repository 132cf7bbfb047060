"""The memory behind one KV pool of SGLang 0.5.23: which tensors, and what a row of each is.

Every class is known by its exact type. A subclass lays its tensors out differently or keeps more
beside them, and moving only what is familiar would corrupt KV silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

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
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.ple_state_pool import NGramPool, ShortConvPool

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
        replicated: Every rank of a tensor-parallel group computes the same bytes.
    """

    regions: Sequence[Region]
    format: str
    replicated: bool = False

    def on(self, layers: Sequence[int] | Mapping[int, int]) -> PoolMemory:
        """The same with other numbers for the layers: `layers[old]`."""
        regions = [replace(region, layer=layers[region.layer]) for region in self.regions]
        return replace(self, regions=regions)


def attention_memory(pool: Any, page_tokens: int) -> PoolMemory:
    """The tensors of a pool whose rows are token slots, or whole pages of them.

    Args:
        page_tokens: Tokens of a page of the tree; token slot s belongs to page s // page_tokens.

    Raises: RefusedError: another class, layout or backing; names it and says what to change.
    """
    if type(pool) is MiniMaxSparseKVPool:
        return _minimax(pool, page_tokens)
    describe = _KNOWN.get(type(pool))
    if describe is None:
        refuse_class(pool)
    check_backing(pool)
    if pool.page_size != page_tokens:
        raise RefusedError(
            f"the KV pool has pages of {pool.page_size} tokens and the tree of {page_tokens}; "
            "tierd needs one page size for both"
        )
    memory = describe(pool, page_tokens)
    rows = pool.size + pool.page_size
    for region in memory.regions:
        needed = rows // page_tokens if region.rows_are_pages else rows
        if len(region.tensor) < needed:
            refuse_shape(pool, region.tensor, f"{rows} token slots")
    return memory


def state_memory(pool: Any) -> PoolMemory:
    """The tensors of a Mamba pool, whose slots are states: temporal, then convolutions, then what
    stands beside them in the same slots. Layers are the model's.

    What it keeps for speculation is work space, not part of a state.

    Raises: RefusedError: another class, or something unknown beside the states.
    """
    if type(pool) is not MambaPool:
        raise RefusedError(
            f"the engine's states are in a {type(pool).__name__}, which tierd does not know; "
            "leave out --enable-unified-memory"
        )
    check_allocator(pool, "the Mamba pool")
    if pool.enable_linear_replayssm or pool.enable_linear_replayssm_spec:
        raise RefusedError(
            "tierd does not carry the replay buffers of Mamba states yet; leave out "
            "--enable-linear-replayssm and --enable-linear-replayssm-spec"
        )
    cache = pool.mamba_cache
    states = [state for state in (cache.temporal, *cache.conv) if state.numel()]
    layers = pool.mamba_layer_ids
    regions = [
        Region(rows, layer) for state in states for layer, rows in zip(layers, state, strict=True)
    ]
    formats = [f"{state.dtype} {tuple(state.shape[2:])}" for state in states]
    for side in pool._slot_siblings:
        memory = _side_memory(side, first_layer=min(layers))
        regions += memory.regions
        formats.append(memory.format)
    return PoolMemory(regions, f"MambaPool {', '.join(formats)}")


def _side_memory(side: Any, first_layer: int) -> PoolMemory:
    """A state that SGLang keeps in the same slots as those of a Mamba pool.

    Args:
        first_layer: The first with a Mamba state. What belongs to no layer is read once that one
            is there (0.5.23, `HybridReqToTokenPool.get_ngram_context`).
    """
    if type(side) is ShortConvPool:
        rows = side.conv_state
        regions = [Region(rows[index], layer) for layer, index in side.layer_map.items()]
    elif type(side) is NGramPool:
        rows = side.context[None]
        regions = [Region(side.context, first_layer)]
    else:
        raise RefusedError(
            f"the model has a {type(side).__name__} beside its Mamba states, which tierd does not "
            "know"
        )
    check_allocator(side, f"the {type(side).__name__}")
    return PoolMemory(regions, f"{type(side).__name__} {rows.dtype} {tuple(rows.shape[2:])}")


def refuse_class(pool: Any) -> NoReturn:
    """Raises: RefusedError: naming the pool's class, and what is known of it."""
    name = type(pool).__name__
    raise RefusedError(f"the engine's KV pool is a {name}: {_why_not(name)}")


def refuse_shape(pool: Any, tensor: torch.Tensor, rows: str) -> NoReturn:
    """Raises: RefusedError: the pool should have so many rows, and the tensor has fewer."""
    raise RefusedError(
        f"a {type(pool).__name__} of {rows} has a tensor of shape {tuple(tensor.shape)}; "
        "this SGLang lays it out in a way unknown to tierd"
    )


def check_backing(pool: Any) -> None:
    """Raises: RefusedError: memory that another process cannot map, or that moves."""
    if pool.post_capture_active:
        raise RefusedError(
            "the KV pool is backed after graph capture, by memory that CUDA IPC cannot share; "
            "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )
    check_allocator(pool, "the KV pool")
    if pool.layer_shard_enabled or pool.host_transfer_translate is not None:
        raise RefusedError(
            "the KV pool shards or relocates its layers; leave out --enable-unified-memory and "
            "the flags that split KV by layer"
        )


def check_allocator(pool: Any, what: str) -> None:
    """Raises: RefusedError: memory that does not come from the engine's usual allocator."""
    if pool.enable_custom_mem_pool:
        raise RefusedError(
            f"{what} lies in a custom memory pool, which CUDA IPC cannot share; "
            "unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
        )
    if getattr(pool.memory_saver_adapter, "enabled", False):
        raise RefusedError(
            f"{what} can be unmapped by the memory saver; leave out --enable-memory-saver"
        )


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
    """Per layer one latent row a token, and its scales where it is quantized in blocks.

    The projection that makes it is not divided among ranks (SGLang 0.5.23, `kv_a_proj_with_mqa`
    and `fused_qkv_a_proj_with_mqa` are replicated), nor is that of an indexer's keys.
    """
    if pool.dcp_replicated:
        raise RefusedError(
            "tierd does not serve decode context parallelism yet; leave out --dcp-size"
        )
    sides = [pool.kv_buffer]
    if pool.kv_scale_buffer is not None:
        sides.append(pool.kv_scale_buffer)
    regions = [Region(tensor, layer) for side in sides for layer, tensor in enumerate(side)]
    packed = " packed with its scales" if pool.dsa_kv_cache_store_fp8 else ""
    return PoolMemory(regions, f"{_kind(pool)} rank {pool.kv_lora_rank}{packed}", replicated=True)


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
        replicated=True,
    )


def _keys(pool: Any, page_tokens: int) -> PoolMemory:
    """Per layer a K, and no V."""
    regions = [Region(tensor, layer) for layer, tensor in enumerate(pool.k_buffer)]
    return PoolMemory(regions, _kind(pool))


def _minimax(pool: Any, page_tokens: int) -> PoolMemory:
    """K and V of all layers, and in the sparse ones an indexer's keys, some with values."""
    main = attention_memory(pool.main_pool, page_tokens)
    regions = list(main.regions)
    formats = [f"{type(pool).__name__} {main.format}"]
    for part, places in (
        (pool.index_kv_pool, pool.index_kv_layer_id_mapping),
        (pool.index_k_pool, pool.index_k_layer_id_mapping),
    ):
        if part is None:
            continue
        layers = {index: layer - pool.start_layer for layer, index in places.items()}
        memory = attention_memory(part, page_tokens)
        regions += memory.on(layers).regions
        formats.append(f"indexer {memory.format}")
    return PoolMemory(regions, ", ".join(formats))


_KNOWN: dict[type, Callable[[Any, int], PoolMemory]] = {
    MHATokenToKVPool: _mha,
    MHATokenToKVPoolFP4: _mha,
    MHATokenToKVPoolMXFP8: _mha,
    MLATokenToKVPool: _mla,
    MLATokenToKVPoolFP4: _mla,
    DSATokenToKVPool: _dsa,
    MHATokenToKOnlyPool: _keys,
}

_WHY_NOT = {
    "NoOpMHATokenToKVPool": "it holds no KV",
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
