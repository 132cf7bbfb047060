"""Every pool of an engine that a request needs to resume, or why tierd cannot serve it.

A tree has up to three components in SGLang 0.5.23, and each becomes one pool: `kv` (full
attention), `swa` and `mamba`. What shares the slots of one of them (scales, an indexer, the KV of
a draft model) is part of the same pages, so that it can neither be lost nor be restored alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tierd.wire.errors import RefusedError
from tierd_client.pools import DeviceBuffer, DevicePool
from tierd_client.sglang.regions import PoolMemory, attention_memory, state_memory

KV, SWA, MAMBA = "kv", "swa", "mamba"
"""The pools' names on the wire: the values of SGLang's `PoolName`."""

_COMBINATIONS: dict[type, list[set[Any]]] = {
    SWAKVPool: [
        {ComponentType.FULL, ComponentType.SWA},
        {ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA},
    ],
    HybridLinearKVPool: [{ComponentType.FULL, ComponentType.MAMBA}],
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
    page_tokens = params.page_size
    if set(components) not in _COMBINATIONS.get(type(kvcache), [{ComponentType.FULL}]):
        names = ", ".join(sorted(component.name for component in components))
        raise RefusedError(
            f"the tree has the components {names} over a {type(kvcache).__name__}; tierd does not "
            "know this combination"
        )
    parts: dict[str, tuple[PoolMemory, Sequence[int]]] = {}
    if type(kvcache) is SWAKVPool:
        _check_window(kvcache, params)
        full = _layers(kvcache.layers_mapping, kvcache.start_layer, is_swa=False)
        swa = _layers(kvcache.layers_mapping, kvcache.start_layer, is_swa=True)
        full_pool = kvcache.full_kv_pool
        if not full:
            raise RefusedError(
                "every layer of the model has a sliding window; tierd needs one with full attention"
            )
        parts[KV] = attention_memory(full_pool, page_tokens), full
        parts[SWA] = attention_memory(kvcache.swa_kv_pool, page_tokens), swa
    elif type(kvcache) is HybridLinearKVPool:
        full_pool = kvcache.full_kv_pool
        full = [layer - kvcache.start_layer for layer in kvcache.full_attention_layer_id_mapping]
        parts[KV] = attention_memory(full_pool, page_tokens), full
    else:
        full_pool = kvcache
        parts[KV] = attention_memory(kvcache, page_tokens), range(kvcache.layer_num)
    if ComponentType.MAMBA in components:
        parts[MAMBA] = _states(params.req_to_token_pool, kvcache.start_layer)
    num_layers = 1 + max(max(layers) for _, layers in parts.values())
    drafts = _draft_memory(params, full_pool, page_tokens)
    windows = {KV: 0, SWA: _pages(params.swa_retain_window, page_tokens), MAMBA: 1}
    pools = []
    formats = {}
    for name, (memory, layers) in parts.items():
        buffers = [
            DeviceBuffer(region.tensor, layers[region.layer], region.rows_are_pages)
            for region in memory.regions
        ]
        formats[name] = memory.format
        if name == KV:
            # A draft model reads its KV after the target has waited for all its layers, and its
            # layers are fewer; one that has more rides on the last.
            for depth, draft in enumerate(drafts):
                buffers += [
                    DeviceBuffer(
                        region.tensor,
                        min(depth + region.layer, num_layers - 1),
                        region.rows_are_pages,
                    )
                    for region in draft.regions
                ]
                formats[name] += f", draft {draft.format}"
        tokens = 1 if name == MAMBA else page_tokens
        pools.append(DevicePool(name, tokens, buffers, windows[name]))
    return EnginePools(pools, num_layers, formats)


def _layers(
    mapping: Mapping[int, tuple[int, bool]], start_layer: int, *, is_swa: bool
) -> list[int]:
    """The transfer layer of each layer of a sub-pool, in the sub-pool's order."""
    own = [(index, layer - start_layer) for layer, (index, swa) in mapping.items() if swa is is_swa]
    return [layer for _, layer in sorted(own)]


def _states(requests: Any, start_layer: int) -> tuple[PoolMemory, Sequence[int]]:
    if type(requests) is not HybridReqToTokenPool:
        raise RefusedError(
            f"the engine's states belong to a {type(requests).__name__}, which tierd does not know"
        )
    if requests.mamba_ckpt_pool is not None:
        raise RefusedError(
            "tierd does not carry int8 checkpoints of Mamba states yet; "
            "leave out --enable-int8-mamba-checkpoint"
        )
    layers = sorted(requests.mamba_map, key=requests.mamba_map.__getitem__)
    return state_memory(requests.mamba_pool), [layer - start_layer for layer in layers]


def _draft_memory(params: Any, full_pool: Any, page_tokens: int) -> list[PoolMemory]:
    """The KV of draft models that use the target's token slots, one after the other."""
    if params.mtp_draft_mamba_pools:
        raise RefusedError("tierd does not carry the Mamba states of a draft model yet")
    drafts = []
    for pool in (*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools):
        try:
            memory = attention_memory(pool, page_tokens)
        except RefusedError as error:
            raise RefusedError(f"the draft model's KV: {error}") from None
        if pool.size != full_pool.size:
            raise RefusedError(
                f"the draft model's KV pool has {pool.size} token slots and the target's "
                f"{full_pool.size}; tierd carries a draft that shares the target's"
            )
        drafts.append(memory)
    return drafts


def _check_window(kvcache: Any, params: Any) -> None:
    if kvcache.swa_req_ring_size is not None or kvcache.request_window is not None:
        raise RefusedError(
            "the sliding window's KV belongs to requests, not to the tree, which tierd does not "
            "carry"
        )
    if kvcache.swa_uses_full_indices:
        raise RefusedError("the sliding window's KV has no slots of its own; tierd needs them")
    if params.decoder_swa_bounded_replay or not params.swa_gates_prefix_match:
        raise RefusedError(
            "the engine computes sliding windows again rather than keep them; "
            "leave out --enable-decoder-swa-bounded-replay"
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
