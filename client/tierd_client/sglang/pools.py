"""Reads an engine's KV pool, or says why tierd cannot serve it.

A pool that is merely similar is refused: moving its buffers as if they were plain K and V rows
would corrupt them silently.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from tierd.wire.errors import RefusedError
from tierd_client.pools import DeviceBuffer, DevicePool

KV = "kv"
"""The pool's name on the wire: the value of SGLang's `PoolName.KV`."""

_WHY_NOT = {
    "SWAKVPool": "sliding-window layers have a pool of their own, which tierd does not carry yet; "
    "start the engine with --disable-hybrid-swa-memory",
    "HybridLinearKVPool": "tierd does not carry Mamba states yet",
    "MLATokenToKVPool": "tierd does not carry MLA's replicated latent KV yet",
    "MLATokenToKVPoolFP4": "tierd does not carry MLA's replicated latent KV yet",
    "DSATokenToKVPool": "tierd does not carry the indexer's KV beside the latent one yet",
    "MHATokenToKVPoolFP4": "tierd does not carry the scales of FP4 KV yet; "
    "choose another --kv-cache-dtype",
    "MHATokenToKVPoolMXFP8": "tierd does not carry the scales of MXFP8 KV yet; "
    "choose another --kv-cache-dtype",
    "NoOpMHATokenToKVPool": "it holds no KV",
}


def kv_pool(kvcache: Any, page_tokens: int) -> DevicePool:
    """The plain MHA or GQA pool of SGLang 0.5.23: for each layer one K and one V buffer, token
    slots first.

    The buffers come as k0 .. k(n-1), v0 .. v(n-1), numbered within this rank's layers, which is
    how the engine names a layer to its layer counter.

    Args:
        kvcache: What `token_to_kv_pool_allocator.get_kvcache()` returns.
        page_tokens: Tokens of a page; token slot s belongs to page s // page_tokens.

    Raises: RefusedError: any other pool or layout; names it and says what to change.
    """
    name = type(kvcache).__name__
    # A subclass lays its buffers out differently, or keeps more beside them.
    if type(kvcache) is not MHATokenToKVPool:
        why = _WHY_NOT.get(name, "tierd serves the plain MHA/GQA pool only")
        raise RefusedError(f"the engine's KV pool is a {name}: {why}")
    if kvcache.kv_cache_layout != "nhd" or kvcache.use_hnd:
        raise RefusedError(
            f"the KV pool's layout is {kvcache.kv_cache_layout!r}, and tierd serves 'nhd'; "
            "unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT"
        )
    if kvcache.post_capture_active:
        raise RefusedError(
            "the KV pool is backed after graph capture, by memory that CUDA IPC cannot share; "
            "unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
        )
    if kvcache.enable_custom_mem_pool:
        raise RefusedError(
            "the KV pool lies in a custom memory pool, which CUDA IPC cannot share; "
            "unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
        )
    if getattr(kvcache.memory_saver_adapter, "enabled", False):
        raise RefusedError(
            "the KV pool can be unmapped by the memory saver; leave out --enable-memory-saver"
        )
    if kvcache.is_quantized_kv_cache or kvcache.k_scale_buffer is not None:
        raise RefusedError(
            "the KV pool has scales beside its K and V, which tierd does not carry yet; "
            "choose another --kv-cache-dtype"
        )
    if kvcache.layer_shard_enabled or kvcache.host_transfer_translate is not None:
        raise RefusedError(
            "the KV pool shards or relocates its layers; leave out --enable-unified-memory and "
            "the flags that split KV by layer"
        )
    if kvcache.page_size != page_tokens:
        raise RefusedError(
            f"the KV pool has pages of {kvcache.page_size} tokens and the tree of {page_tokens}; "
            "tierd needs one page size for both"
        )
    buffers = [
        DeviceBuffer(tensor, layer)
        for side in (kvcache.k_buffer, kvcache.v_buffer)
        for layer, tensor in enumerate(side)
    ]
    for buffer in buffers:
        if buffer.tensor.dim() != 3 or not buffer.tensor[0].is_contiguous():
            raise RefusedError(
                f"a KV buffer of shape {tuple(buffer.tensor.shape)} and strides "
                f"{buffer.tensor.stride()}; tierd needs (token slots, heads, head size) with one "
                "token's row in one piece"
            )
    return DevicePool(KV, page_tokens, buffers)
