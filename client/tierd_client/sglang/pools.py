"""Every pool of an engine that a request needs to resume, or why tierd cannot serve it.

A tree has up to three components in SGLang 0.5.23, and each becomes one pool: `kv` (full
attention), `swa` and `mamba`. What shares the slots of one of them (scales, an indexer, the KV of
a draft model) is part of the same pages, so that it can neither be lost nor be restored alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tierd.wire.errors import RefusedError
from tierd_client.pools import DeviceBuffer, DevicePool
from tierd_client.sglang import deepseek_v4
from tierd_client.sglang.regions import PoolMemory, attention_memory, state_memory

KV, SWA, MAMBA = "kv", "swa", "mamba"
"""The pools' names on the wire: the values of SGLang's `PoolName`."""

_COMBINATIONS: dict[type, list[set[Any]]] = {
    SWAKVPool: [
        {ComponentType.FULL, ComponentType.SWA},
        {ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA},
    ],
    HybridLinearKVPool: [{ComponentType.FULL, ComponentType.MAMBA}],
    DeepSeekV4TokenToKVPool: [{ComponentType.FULL, ComponentType.SWA}],
}
"""The components that a tree may have over a composite pool; over any other it is FULL alone."""


@dataclass(frozen=True)
class EnginePools:
    """What an engine shares with the tier.

    Attributes:
        pools: `kv` first.
        num_layers: Layers that a restore makes usable in order. A layer's number is its place
            among those of this rank (SGLang: `layer_id - start_layer`), whichever pool it uses.
        formats: For each pool, what the bytes of a page mean where their number does not tell.
    """

    pools: Sequence[DevicePool]
    num_layers: int
    formats: Mapping[str, str]

    def describe(self) -> str:
        """The pools' geometry in words."""
        return "; ".join(_describe(pool, self.formats[pool.name]) for pool in self.pools)


def engine_pools(params: Any, components: Collection[Any]) -> EnginePools:
    """Find all pools of an engine.

    Args:
        params: SGLang's `CacheInitParams`.
        components: The tree's `ComponentType`s.

    Raises: RefusedError: a pool or a combination of them that tierd cannot carry; names it and
        says what to change.
    """
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    if isinstance(kvcache, BaseSWAKVPool):
        _check_window(kvcache, params)
    if set(components) not in _COMBINATIONS.get(type(kvcache), [{ComponentType.FULL}]):
        names = ", ".join(sorted(component.name for component in components))
        raise RefusedError(
            f"the tree has the components {names} over a {type(kvcache).__name__}; tierd does not "
            "know this combination"
        )
    parts = _attention(params, kvcache)
    if ComponentType.MAMBA in components:
        parts[MAMBA] = _states(params.req_to_token_pool, kvcache.start_layer)
    num_layers = 1 + max(region.layer for memory in parts.values() for region in memory.regions)
    carrier = SWA if type(kvcache) is DeepSeekV4TokenToKVPool else KV
    for depth, draft in enumerate(_drafts(params, kvcache)):
        parts[carrier] = _with_draft(parts[carrier], draft, depth, last_layer=num_layers - 1)
    windows = {KV: 0, SWA: _pages(params.swa_retain_window, params.page_size), MAMBA: 1}
    pools = [
        DevicePool(
            name,
            1 if name == MAMBA else params.page_size,
            [
                DeviceBuffer(region.tensor, region.layer, region.rows_are_pages)
                for region in memory.regions
            ],
            windows[name],
            memory.replicated,
        )
        for name, memory in parts.items()
    ]
    formats = {name: memory.format for name, memory in parts.items()}
    return EnginePools(pools, num_layers, formats)


def _attention(params: Any, kvcache: Any) -> dict[str, PoolMemory]:
    """What attention keeps, by pool, `kv` first; its layers are those of a transfer."""
    page_tokens = params.page_size
    if type(kvcache) is DeepSeekV4TokenToKVPool:
        allocator = params.token_to_kv_pool_allocator
        if type(allocator) is not SWATokenToKVPoolAllocator:
            raise RefusedError(
                f"the KV pool's slots are given out by a {type(allocator).__name__}, which tierd "
                "does not know"
            )
        return {
            KV: deepseek_v4.compressed_memory(kvcache, page_tokens, allocator.size_full),
            SWA: deepseek_v4.window_memory(kvcache, page_tokens),
        }
    if type(kvcache) is SWAKVPool:
        full = _layers(kvcache.layers_mapping, kvcache.start_layer, is_swa=False)
        swa = _layers(kvcache.layers_mapping, kvcache.start_layer, is_swa=True)
        if not full:
            raise RefusedError(
                "every layer of the model has a sliding window; tierd needs one with full attention"
            )
        return {
            KV: attention_memory(kvcache.full_kv_pool, page_tokens).on(full),
            SWA: attention_memory(kvcache.swa_kv_pool, page_tokens).on(swa),
        }
    if type(kvcache) is HybridLinearKVPool:
        full = [layer - kvcache.start_layer for layer in kvcache.full_attention_layer_id_mapping]
        return {KV: attention_memory(kvcache.full_kv_pool, page_tokens).on(full)}
    return {KV: attention_memory(kvcache, page_tokens)}


def _layers(
    mapping: Mapping[int, tuple[int, bool]], start_layer: int, *, is_swa: bool
) -> list[int]:
    """The transfer layer of each layer of a sub-pool, in the sub-pool's order."""
    own = [(index, layer - start_layer) for layer, (index, swa) in mapping.items() if swa is is_swa]
    return [layer for _, layer in sorted(own)]


def _states(requests: Any, start_layer: int) -> PoolMemory:
    if type(requests) is not HybridReqToTokenPool:
        raise RefusedError(
            f"the engine's states belong to a {type(requests).__name__}, which tierd does not know"
        )
    if requests.mamba_ckpt_pool is not None:
        raise RefusedError(
            "the tree keeps Mamba states in eight bits and the engine loads them in full width, "
            "and tierd copies bytes as they are; leave out --enable-int8-mamba-checkpoint"
        )
    memory = state_memory(requests.mamba_pool)
    return memory.on({region.layer: region.layer - start_layer for region in memory.regions})


def _drafts(params: Any, kvcache: Any) -> list[PoolMemory]:
    """The KV of draft models that use the target's token slots, one after the other."""
    if params.mtp_draft_mamba_pools:
        raise RefusedError("tierd does not carry the Mamba states of a draft model yet")
    pools = (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools)
    try:
        if type(kvcache) is DeepSeekV4TokenToKVPool:
            return [deepseek_v4.draft_memory(pool, kvcache) for pool in pools]
        drafts = [attention_memory(pool, params.page_size) for pool in pools]
    except RefusedError as error:
        raise RefusedError(f"the draft model's KV: {error}") from None
    size = getattr(kvcache, "full_kv_pool", kvcache).size
    for pool in pools:
        if pool.size != size:
            raise RefusedError(
                f"the draft model's KV pool has {pool.size} token slots and the target's {size}; "
                "tierd carries a draft that shares the target's"
            )
    return drafts


def _with_draft(
    target: PoolMemory, draft: PoolMemory, depth: int, *, last_layer: int
) -> PoolMemory:
    """A page of the target with that of the draft model of this depth.

    A draft model reads its KV after the target has waited for all its layers, and its layers are
    fewer; one that has more rides on the last.
    """
    placed = [
        replace(region, layer=min(depth + region.layer, last_layer)) for region in draft.regions
    ]
    return PoolMemory(
        [*target.regions, *placed],
        f"{target.format}, draft {draft.format}",
        target.replicated and draft.replicated,
    )


def _check_window(kvcache: Any, params: Any) -> None:
    if kvcache.swa_req_ring_size is not None or kvcache.request_window is not None:
        raise RefusedError(
            "the sliding window's KV belongs to requests, not to the tree, which tierd does not "
            "carry; leave out --enable-encoder-swa-bounded-replay, and unset "
            "SGLANG_HACK_FLASHMLA_BACKEND"
        )
    if kvcache.swa_uses_full_indices:
        raise RefusedError("the sliding window's KV has no slots of its own; tierd needs them")
    if params.decoder_swa_bounded_replay or not params.swa_gates_prefix_match:
        raise RefusedError(
            "the engine computes sliding windows again rather than keep them; "
            "add --no-enable-decoder-swa-bounded-replay"
        )
    if not params.swa_retain_window:
        raise RefusedError("the engine does not say how long its sliding window is")


def _pages(tokens: int | None, page_tokens: int) -> int:
    return -(-(tokens or 0) // page_tokens)


def _describe(pool: DevicePool, what: str) -> str:
    rows: dict[int, int] = {}
    for buffer in pool.buffers:
        row = buffer.tensor[:1].numel() * buffer.tensor.element_size()
        size = row * (1 if buffer.rows_are_pages else pool.page_tokens)
        rows[size] = rows.get(size, 0) + 1
    counted = " and ".join(f"{count} of {size} bytes" for size, count in rows.items())
    return f"{pool.name}: {counted} for pages of {pool.page_tokens} tokens ({what})"
