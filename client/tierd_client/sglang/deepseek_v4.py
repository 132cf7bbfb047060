"""What a page of DeepSeek-V4 is made of, in SGLang 0.5.23.

Layers keep no KV of their own for every token. All have a sliding window; some compress groups of
tokens into one entry each, 4 or 128 of them (V4.1 also 1 or 2), of which some have an indexer.
A page of the tree holds whole groups, so at its end nothing is half compressed but the overlap
of groups of 4, whose raw tail lies in a ring beside each page of the window.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4IndexerPool,
    DeepSeekV4SingleKVPool,
    DeepSeekV4TokenToKVPool,
    DeepSeekV4UniformFP8KVPool,
)

from tierd.wire.errors import RefusedError
from tierd_client.sglang.regions import (
    PoolMemory,
    Region,
    check_allocator,
    check_backing,
    refuse_class,
    refuse_shape,
)

_KEYS = (DeepSeekV4SingleKVPool, DeepSeekV4UniformFP8KVPool)


def compressed_memory(kvcache: Any, page_tokens: int, slots: int) -> PoolMemory:
    """What a page of full attention consists of: compressed KV, then its indexer's keys.

    Layers are those of a transfer. The layers of V4.1 that read the KV of one before them add
    nothing.

    Args:
        kvcache: A `DeepSeekV4TokenToKVPool`.
        slots: Token slots of full attention; one page more is there, which is no request's.

    Raises: RefusedError: another class, layout or backing; names it and says what to change.
    """
    pages = slots // page_tokens + 1
    regions = []
    formats = []
    for ratio, owners in kvcache.sources_by_ratio.items():
        if page_tokens % ratio:
            raise RefusedError(
                f"the model compresses groups of {ratio} tokens, which pages of {page_tokens} "
                "would cut; set --page-size 256"
            )
        pool = kvcache.kv_pools[ratio]
        _check_class(pool, *_KEYS)
        parts = [(pool, pool.kv_buffer)]
        indexer = kvcache.index_pools.get(ratio)
        if indexer is not None:
            _check_class(indexer, DeepSeekV4IndexerPool)
            if indexer.index_k_with_scale_buffer is None:
                raise RefusedError("the indexer's keys are laid out as on ROCm; tierd serves CUDA")
            parts.append((indexer, indexer.index_k_with_scale_buffer))
            bits = 4 if indexer.use_fp4_indexer else 8
            formats.append(f"indexer of {indexer.index_head_dim} in {bits} bits")
        for part, buffers in parts:
            check_backing(part)
            regions += [
                Region(
                    _by_page(part, tensor, page_tokens // ratio // part.page_size, pages),
                    layer - kvcache.start_layer,
                    rows_are_pages=True,
                )
                for layer, tensor in zip(owners, buffers, strict=True)
            ]
    if not regions:
        raise RefusedError(
            "every layer of the model has a sliding window alone; tierd needs one with more"
        )
    return PoolMemory(regions, ", ".join([_kind(kvcache), *formats]))


def window_memory(kvcache: Any, page_tokens: int) -> PoolMemory:
    """What a page of the window consists of: KV of every layer, then the rings of what groups of
    4 tokens have not used yet. What groups of 128 have not is empty where a page ends, and lies
    with the request.

    Layers are those of a transfer.

    Raises: RefusedError: as `compressed_memory`.
    """
    if kvcache.swa_page_size != page_tokens:
        raise RefusedError(
            f"the sliding window has pages of {kvcache.swa_page_size} tokens and the tree of "
            f"{page_tokens}; tierd needs one page size for both"
        )
    pages = kvcache.swa_size // page_tokens + 1
    regions = _windows(kvcache, pages)
    formats = [_kind(kvcache)]
    for what, states in (
        ("states", kvcache.compress_state_pools),
        ("indexer's states", kvcache.indexer_compress_state_pools),
    ):
        for layer, pool in enumerate(states):
            if pool is None or pool.request_scoped:
                continue
            _check_class(pool, CompressStatePool)
            check_allocator(pool, "the compressors' states")
            rows = pool.kv_score_buffer.kv_score
            regions.append(
                Region(
                    _by_page(pool, rows, pool.ring_size, pages),
                    layer - kvcache.start_layer,
                    rows_are_pages=True,
                )
            )
            form = f"{what} {rows.dtype} of {pool.ring_size} tokens"
            if form not in formats:
                formats.append(form)
    return PoolMemory(regions, ", ".join(formats))


def draft_memory(pool: Any, target: Any) -> PoolMemory:
    """What a draft model keeps beside a page of the target's window: its own window's KV, at the
    same slots.

    Raises: RefusedError: a draft that keeps anything else.
    """
    if type(pool) is not DeepSeekV4TokenToKVPool:
        refuse_class(pool)
    if pool.sources_by_ratio or pool.swa_uses_full_indices:
        raise RefusedError("it keeps more than a sliding window, or has it in slots of its own")
    if pool.swa_req_ring_size is not None or pool.request_window is not None:
        raise RefusedError("its sliding window belongs to requests, not to the tree")
    if (pool.swa_size, pool.swa_page_size) != (target.swa_size, target.swa_page_size):
        raise RefusedError(
            f"its window has {pool.swa_size} token slots in pages of {pool.swa_page_size}, and the "
            f"target's {target.swa_size} in pages of {target.swa_page_size}"
        )
    return PoolMemory(_windows(pool, pool.swa_size // pool.swa_page_size + 1), _kind(pool))


def _windows(kvcache: Any, pages: int) -> list[Region]:
    """The window's KV of every layer. On SM120 a page is several rows."""
    pool = kvcache.swa_kv_pool
    _check_class(pool, *_KEYS)
    check_backing(pool)
    rows = kvcache.swa_page_size // pool.page_size
    return [
        Region(_by_page(pool, tensor, rows, pages), layer, rows_are_pages=True)
        for layer, tensor in enumerate(pool.kv_buffer)
    ]


def _by_page(pool: Any, tensor: torch.Tensor, rows: int, pages: int) -> torch.Tensor:
    """A view with a row a page, where a page is `rows` rows of the tensor. Shape: (pages, ...)."""
    if not rows or len(tensor) < pages * rows:
        refuse_shape(pool, tensor, f"{pages} pages of {rows} rows")
    return tensor[: pages * rows].view(pages, -1)


def _check_class(pool: Any, *known: type) -> None:
    if type(pool) not in known:
        refuse_class(pool)


def _kind(kvcache: Any) -> str:
    return f"{type(kvcache).__name__} {kvcache.dtype} {kvcache.pd_kv_layout()}"
