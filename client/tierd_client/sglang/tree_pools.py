"""SGLang's pools and allocators of small models of every kind, and what their memory must hold.

A layer has full attention, a sliding window or a recurrent state. What it keeps of a token is a
fixed function of the tokens up to it, of the layer and of the weights' version, so that every byte
can be checked, and one from another place or another context is wrong.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

Kind = Literal["mha", "hnd", "fp4", "mxfp8", "mla", "dsa"]
Role = Literal["full", "swa", "state"]

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
            both in four or eight bits with scales; one latent row; or that beside an indexer's
            keys (pages of 64 tokens).
        window: Tokens of a sliding window; with 0 no layer has one.
        window_pool_tokens: 0 is as many as `pool_tokens`.
        states: Slots for recurrent states; with 0 no layer has one. Needs pages of one token.
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
        return [layer for layer in range(self.layers) if self.role(layer) == role]

    @property
    def windows_tokens(self) -> int:
        return self.window_pool_tokens or self.pool_tokens


class Rows(NamedTuple):
    """What one layer keeps of tokens in one tensor.

    `tensor`: shape (token slots, ...), or with `page_tokens` (pages, heads, page_tokens, ...).
    `number`: unlike that of any other tensor of the engine.
    """

    tensor: torch.Tensor
    number: int
    page_tokens: int = 0

    def write(self, slots: torch.Tensor, states: U64) -> None:
        """Store what these slots must hold."""
        memory = self.tensor.view(torch.uint8)
        shape = memory[self._at(slots[:1])].shape[1:]
        rows = torch.from_numpy(token_rows(states, self.number, math.prod(shape)))
        memory[self._at(slots)] = rows.reshape(-1, *shape).to(memory.device)

    def spoil(self, slots: torch.Tensor) -> None:
        """Leave nothing right in these slots."""
        self.tensor.view(torch.uint8)[self._at(slots)] = 0xA5

    def compare(self, slots: torch.Tensor, states: U64) -> tuple[int, int]:
        """Bytes that differ from what these slots must hold, and bytes read."""
        if not len(slots):
            return 0, 0
        memory = self.tensor.view(torch.uint8)
        found = memory[self._at(slots)].reshape(len(slots), -1).cpu().numpy()
        want = token_rows(states, self.number, found.shape[1])
        same = np.array_equal(found, want)
        return 0 if same else int(np.count_nonzero(found != want)), found.size

    def _at(self, slots: torch.Tensor) -> tuple[Any, ...]:
        if not self.page_tokens:
            return (slots,)
        return (slots // self.page_tokens, slice(None), slots % self.page_tokens)


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
        for layer in range(self.shape.layers):
            role = self.shape.role(layer)
            if role == "state":
                filled = kv.mamba_pool_idx.reshape(1).to(torch.int64)
            else:
                filled = self.slots_in(role, slots)
                filled = filled[filled > 0]  # no slot: it has left the window
            for rows in self.tensors(layer):
                rows.spoil(filled)
        for rows in self.draft_tensors():
            rows.spoil(slots)

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

    def tensors(self, layer: int) -> list[Rows]:
        """What a layer reads and writes, once it is there: SGLang's accessors wait for it."""
        role = self.shape.role(layer)
        number = 16 * layer
        if role == "state":
            index = self.requests.mamba2_layer_index(layer)
            cache = self.requests.mamba_pool.mamba_cache
            states = [cache.temporal[index], *(conv[index] for conv in cache.conv)]
            return [Rows(tensor, number + n) for n, tensor in enumerate(states)]
        if self.shape.kind in _SCALED:
            # The accessors hand out copies in full width, after the same wait.
            self.kv.layer_transfer_counter.wait_until(layer)
            sides = ("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer")
            tensors = [getattr(self.kv, side)[layer] for side in sides]
            return [Rows(tensor, number + n) for n, tensor in enumerate(tensors)]
        if self.shape.kind in ("mla", "dsa"):
            latent = Rows(self.kv.get_key_buffer(layer), number)
            if self.shape.kind == "mla":
                return [latent]
            pages = self.kv.get_index_k_with_scale_buffer(layer)
            keys = pages.view(len(pages), 1, self.shape.page_tokens, -1)
            return [latent, Rows(keys, number + 1, self.shape.page_tokens)]
        page_tokens = self.shape.page_tokens if self.shape.kind == "hnd" else 0
        return [
            Rows(tensor, number + n, page_tokens)
            for n, tensor in enumerate(self.kv.get_kv_buffer(layer))
        ]

    def draft_tensors(self) -> list[Rows]:
        """What a draft model reads and writes of the same tokens."""
        number = 16 * self.shape.layers
        tensors = [tensor for draft in self.drafts for tensor in (*draft.k_buffer, *draft.v_buffer)]
        return [Rows(tensor, number + n) for n, tensor in enumerate(tensors)]


def chain_states(tokens: Sequence[int], weights_version: int) -> U64:
    """A number for each token that depends on all tokens up to it. Shape: (len(tokens),)."""

    def chain() -> Iterator[int]:
        state = weights_version + 1
        for token in tokens:
            state = ((state ^ token) * 0x9E3779B97F4A7C15 + 1) & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 29
            yield state

    return np.fromiter(chain(), np.uint64, len(tokens))


def token_rows(states: U64, number: int, row_bytes: int) -> U8:
    """What tensor `number` must hold for these tokens. Shape: (len(states), row_bytes)."""
    words = np.arange(1, -(-row_bytes // 8) + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (states + np.uint64(number))[:, None] * (words | np.uint64(1))
    mixed ^= mixed >> np.uint64(31)
    return np.ascontiguousarray(mixed.view(np.uint8)[:, :row_bytes])


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
    return sg.HybridReqToTokenPool(
        **sizes,
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
    pool = _SCALED[shape.kind](sg) if shape.kind in _SCALED else sg.MHATokenToKVPool
    return pool(**sizes, **heads, layer_num=shape.layers)


def _draft(sg: types.SimpleNamespace, shape: EngineShape) -> Any:
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
