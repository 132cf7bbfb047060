"""SGLang's pools and allocators of small models of every kind, and what their memory must hold.

A layer has full attention, a sliding window or a recurrent state; in DeepSeek-V4 it has a window,
and most have compressed KV beside it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tierd_client.sglang.tree_deepseek_v4 import (
    COMPRESSED,
    compressed_kv,
    compressed_rows,
    window_kv,
    window_rows,
)
from tierd_client.sglang.tree_rows import Role, Rows

Kind = Literal["mha", "hnd", "fp4", "mxfp8", "mla", "dsa", "minimax", "dsv4", "dsv41"]

_SCALED: dict[Kind, Callable[[types.SimpleNamespace], Any]] = {
    "fp4": lambda sg: sg.MHATokenToKVPoolFP4,
    "mxfp8": lambda sg: sg.MHATokenToKVPoolMXFP8,
}


@dataclass(frozen=True)
class EngineShape:
    """Sizes of an engine.

    Attributes:
        pool_tokens: A multiple of `page_tokens`.
        core: SGLang's tree core, "python" or "rust".
        kind: What attention keeps: K and V of heads by token; the same with a page's heads first;
            both in four or eight bits with scales; one latent row; that beside an indexer's keys
            (pages of 64 tokens); K and V beside an indexer's in some layers; or compressed KV as
            DeepSeek-V4 and V4.1 have it, beside a window in each layer (`window` says how long;
            pages of 256 tokens).
        window: Tokens of a sliding window; with 0 no layer has one.
        window_pool_tokens: 0 is as many as `pool_tokens`.
        states: Slots for recurrent states; with 0 no layer has one. Needs pages of one token.
        side_states: Beside those, layers of full attention have a short convolution, and the model
            a context of n-grams.
        draft_layers: Layers of a draft model that keeps K and V in the same token slots.
        requests: How many can run at once.
        device: Where the pools lie, in torch's words.
    """

    page_tokens: int = 4
    pool_tokens: int = 256
    layers: int = 4
    heads: int = 2
    head_dim: int = 8
    core: str = "python"
    kind: Kind = "mha"
    window: int = 0
    window_pool_tokens: int = 0
    states: int = 0
    side_states: bool = False
    draft_layers: int = 0
    requests: int = 16
    device: str = "cpu"

    def role(self, layer: int) -> Role:
        """The kinds of layers take turns; full attention comes last."""
        turns: list[Role] = ["full"]
        if self.states:
            turns.insert(0, "state")
        if self.window:
            turns.insert(0, "swa")
        return turns[layer % len(turns)]

    def layers_with(self, role: Role) -> list[int]:
        """The layers of a role, ascending."""
        return [layer for layer in range(self.layers) if self.role(layer) == role]

    @property
    def windows_tokens(self) -> int:
        """Token slots of the windows' pool."""
        return self.window_pool_tokens or self.pool_tokens


class TreePools:
    """One rank's pools.

    Attributes:
        requests, kv, allocator: SGLang's `ReqToTokenPool`, `KVCache` and KV allocator.
        drafts: The `KVCache` of the draft model, if there is one.
        components: SGLang's `ComponentType`s of a tree over them.
    """

    def __init__(self, sg: types.SimpleNamespace, shape: EngineShape) -> None:
        self.shape = shape
        self.components = (
            sg.ComponentType.FULL,
            *((sg.ComponentType.SWA,) if shape.window else ()),
            *((sg.ComponentType.MAMBA,) if shape.states else ()),
        )
        self.requests = _requests(sg, shape)
        with (
            sg.envs.SGLANG_USE_HND_KVCACHE.override(True) if shape.kind == "hnd" else nullcontext()
        ):
            self.kv = _kv(sg, shape, self.requests)
        self.allocator = _allocator(sg, shape, self.kv)
        self.drafts = (_draft(sg, shape),) if shape.draft_layers else ()

    # --- token slots ------------------------------------------------------------------------

    @property
    def free_tokens(self) -> int:
        """Token slots that the allocator can give out."""
        return int(self.allocator.available_size())

    def free(self) -> dict[str, int]:
        """What is free of each pool: token slots, and states."""
        free = {"full": self.free_tokens}
        if self.shape.window:
            free["full"] = int(self.allocator.full_available_size())
            free["swa"] = int(self.allocator.swa_available_size())
        if self.shape.states:
            free["state"] = int(self.requests.mamba_allocator.available_size())
        return free

    def total(self) -> dict[str, int]:
        """What there is of each pool, by the names of `free`."""
        total = {"full": self.shape.pool_tokens}
        if self.shape.window:
            total["swa"] = self.shape.windows_tokens
        if self.shape.states:
            total["state"] = self.shape.states
        return total

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Token slots of whole pages, in every pool of tokens; None: there are not enough.

        Shape: (tokens,), int64.
        """
        if not self.shape.window:
            slots = self.allocator.alloc(tokens)
            return None if slots is None else slots.to(torch.int64)
        if self.free_tokens < tokens:
            return None
        slots = self.allocator.full_attn_allocator.alloc(tokens)
        window_slots = self.allocator.swa_attn_allocator.alloc(tokens)
        self.allocator.set_full_to_swa_mapping(slots, window_slots)
        return slots.to(torch.int64)

    def slots_in(self, role: Role, slots: torch.Tensor) -> torch.Tensor:
        """The slots of these tokens in the pool of a layer of that role; 0 is none."""
        if role == "full":
            return slots
        return self.kv.translate_loc_from_full_to_swa(slots).to(torch.int64)

    def spoil(self, slots: torch.Tensor, kv: Any) -> None:
        """Leave nothing right where a restore will write: what it forgets must not be there from
        before.

        Args:
            slots: The token slots that it fills.
            kv: The request's `ReqKvInfo`.
        """
        window = self.slots_in("swa", slots) if self.shape.window else slots
        filled = {"full": slots, "swa": window[window > 0]}  # no slot: it has left the window
        if self.shape.states:
            filled["state"] = kv.mamba_pool_idx.reshape(1).to(torch.int64)
        for rows in self.kept():
            rows.spoil(filled[rows.role])

    def start_states(self, kv: Any) -> None:
        """Bring a request's state to where its prefix ends, as a batch does before its forward
        pass.

        Args: `kv`: the request's `ReqKvInfo`.
        """
        if not self.shape.states:
            return
        if kv.mamba_cow_src_index is not None:
            self.requests.copy_mamba_state(kv.mamba_cow_src_index, kv.mamba_pool_idx.unsqueeze(0))
            kv.mamba_cow_src_index = None
        elif kv.mamba_needs_clear:
            self.requests.mamba_pool.clear_slots(kv.mamba_pool_idx.unsqueeze(0))
        kv.mamba_needs_clear = False

    # --- contents ---------------------------------------------------------------------------

    def kept(self) -> Iterator[Rows]:
        """What a forward pass reads and writes: layer by layer, each once it is there, as SGLang's
        accessors wait for it; then the draft model's, which waits for nothing, because the target
        has waited for every layer."""
        for number, rows in enumerate(self._in_turn()):
            yield replace(rows, number=number)

    def _in_turn(self) -> Iterator[Rows]:
        for layer in range(self.shape.layers):
            role = self.shape.role(layer)
            yield from self._states(layer) if role == "state" else self._attention(layer, role)
            if self.shape.side_states:
                yield from self._side_states(layer)
        for draft in self.drafts:
            if self.shape.kind in COMPRESSED:
                yield from window_rows(draft)
            else:
                yield from map(Rows, (*draft.k_buffer, *draft.v_buffer))

    def _attention(self, layer: int, role: Role) -> list[Rows]:
        kind = self.shape.kind
        if kind in COMPRESSED:
            return compressed_rows(self.kv, layer)
        if kind in _SCALED:
            # The accessors hand out copies in full width, after the same wait.
            self.kv.layer_transfer_counter.wait_until(layer)
            sides = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
            return [Rows(getattr(self.kv, side)[layer]) for side in sides]
        if kind in ("mla", "dsa"):
            latent = Rows(self.kv.get_key_buffer(layer), role)
            if kind == "mla":
                return [latent]
            pages = self.kv.get_index_k_with_scale_buffer(layer)
            keys = pages.view(len(pages), 1, self.shape.page_tokens, -1)
            return [latent, Rows(keys, role, self.shape.page_tokens)]
        page_tokens = self.shape.page_tokens if kind == "hnd" else 0
        kept = [Rows(tensor, role, page_tokens) for tensor in self.kv.get_kv_buffer(layer)]
        if layer in _indexed(self.shape):
            kept.append(Rows(self.kv.get_index_k_buffer(layer)))
            if layer in self.kv.index_kv_layer_id_mapping:
                kept.append(Rows(self.kv.get_index_kv_buffer(layer)[1]))
        return kept

    def _states(self, layer: int) -> list[Rows]:
        index = self.requests.mamba2_layer_index(layer)
        cache = self.requests.mamba_pool.mamba_cache
        return [
            Rows(tensor, "state")
            for tensor in (cache.temporal[index], *(conv[index] for conv in cache.conv))
        ]

    def _side_states(self, layer: int) -> list[Rows]:
        if layer in self.requests.short_conv_pool.layer_map:
            return [Rows(self.requests.short_conv_layer_cache(layer), "state")]
        if layer == min(self.requests.mamba_map):
            # Handed out as a copy, once this layer's state is there.
            return [Rows(self.requests.ngram_pool.context, "state")]
        return []


def _requests(sg: types.SimpleNamespace, shape: EngineShape) -> Any:
    sizes = {
        "size": shape.requests,
        "max_context_len": shape.pool_tokens + shape.page_tokens,
        "device": shape.device,
        "enable_memory_saver": False,
    }
    if not shape.states:
        return sg.ReqToTokenPool(**sizes)
    layers = shape.layers_with("state")
    state = sg.Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=shape.heads * shape.head_dim,
        n_groups=1,
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        state_size=32,
        conv_kernel=4,
    )
    side_states = {
        "short_conv_layer_ids": shape.layers_with("full"),
        "short_conv_state_shape": (shape.head_dim, 3),
        "ngram_context_len": 2,
    }
    return sg.HybridReqToTokenPool(
        **sizes,
        **(side_states if shape.side_states else {}),
        mamba_size=shape.states,
        mamba_spec_state_size=shape.requests,
        cache_params=sg.Mamba2CacheParams(shape=state, layers=layers),
        mamba_layer_ids=layers,
        enable_mamba_extra_buffer=False,
    )


def _kv(sg: types.SimpleNamespace, shape: EngineShape, requests: Any) -> Any:
    sizes = {
        "size": shape.pool_tokens,
        "page_size": shape.page_tokens,
        "dtype": torch.bfloat16,
        "device": shape.device,
        "enable_memory_saver": False,
    }
    heads = {"head_num": shape.heads, "head_dim": shape.head_dim}
    if shape.kind in COMPRESSED:
        return compressed_kv(sg, shape)
    latent = {"kv_lora_rank": shape.heads * shape.head_dim, "qk_rope_head_dim": shape.head_dim}
    if shape.window:
        return sg.SWAKVPool(
            **sizes,
            **heads,
            size_swa=shape.windows_tokens,
            full_attention_layer_ids=shape.layers_with("full"),
            swa_attention_layer_ids=shape.layers_with("swa"),
        )
    if shape.states:
        return sg.HybridLinearKVPool(
            **sizes,
            **heads,
            full_attention_layer_ids=shape.layers_with("full"),
            mamba_pool=requests.mamba_pool,
            **({**latent, "use_mla": True} if shape.kind == "mla" else {}),
        )
    if shape.kind == "mla":
        return sg.MLATokenToKVPool(**sizes, **latent, layer_num=shape.layers)
    if shape.kind == "dsa":
        return sg.DSATokenToKVPool(
            **sizes,
            **latent,
            layer_num=shape.layers,
            kv_cache_dim=sum(latent.values()),
            index_head_dim=128,
            index_buf_size=shape.pool_tokens,
        )
    if shape.kind == "minimax":
        indexed = _indexed(shape)
        return sg.MiniMaxSparseKVPool(
            **sizes,
            **heads,
            idx_head_dim=shape.head_dim,
            dense_layer_ids=[layer for layer in range(shape.layers) if layer not in indexed],
            sparse_layer_ids=indexed,
            disable_value_sparse_layer_ids=indexed[::2],
            start_layer=0,
            end_layer=shape.layers,
        )
    pool = _SCALED[shape.kind](sg) if shape.kind in _SCALED else sg.MHATokenToKVPool
    return pool(**sizes, **heads, layer_num=shape.layers)


def _indexed(shape: EngineShape) -> list[int]:
    """The layers with an indexer's keys beside K and V; all but the first."""
    return list(range(1, shape.layers)) if shape.kind == "minimax" else []


def _draft(sg: types.SimpleNamespace, shape: EngineShape) -> Any:
    if shape.kind in COMPRESSED:
        return window_kv(sg, shape)
    return sg.MHATokenToKVPool(
        size=shape.pool_tokens,
        page_size=shape.page_tokens,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=shape.head_dim,
        layer_num=shape.draft_layers,
        device=shape.device,
        enable_memory_saver=False,
    )


def _allocator(sg: types.SimpleNamespace, shape: EngineShape, kv: Any) -> Any:
    if shape.window:
        return sg.SWATokenToKVPoolAllocator(
            size=shape.pool_tokens,
            size_swa=shape.windows_tokens,
            page_size=shape.page_tokens,
            dtype=torch.bfloat16,
            device=shape.device,
            kvcache=kv,
            need_sort=False,
        )
    if shape.page_tokens == 1:
        return sg.TokenToKVPoolAllocator(shape.pool_tokens, torch.bfloat16, shape.device, kv, False)
    return sg.PagedTokenToKVPoolAllocator(
        shape.pool_tokens, shape.page_tokens, torch.bfloat16, shape.device, kv, False
    )
