"""SGLang's pools of a small DeepSeek-V4 or V4.1, and what their memory must hold.

An entry of compressed KV belongs to the last token of its group. What groups of 4 tokens have not
used yet is in a ring beside each page of the window.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierd_client.sglang.tree_rows import Rows, Tokens

if TYPE_CHECKING:
    from tierd_client.sglang.tree_pools import EngineShape

COMPRESSED = ("dsv4", "dsv41")
"""The kinds of engines that are built here."""

_RATIOS = {"dsv4": (0, 4, 128), "dsv41": (1, 1, 2, 0, 4)}
"""Tokens of a group, by layer, in turns; 0 is a window alone."""

_RING_TOKENS = 8


@dataclass(frozen=True)
class _CompressedRows(Rows):
    """One row a group of `ratio` tokens."""

    ratio: int = 1

    def _at(self, slots: torch.Tensor) -> tuple[Any, ...]:
        return super()._at(slots // self.ratio)

    def _written(self, slots: torch.Tensor) -> Tokens:
        return (slots + 1) % self.ratio == 0

    _read = _written


@dataclass(frozen=True)
class _RingRows(Rows):
    """The last tokens of each page, or of what there is of one. `pool`: a `CompressStatePool`."""

    pool: Any = None

    def _at(self, slots: torch.Tensor) -> tuple[Any, ...]:
        return (self.pool.translate_from_swa_loc_to_state_loc(slots),)

    def _written(self, slots: torch.Tensor) -> Tokens:
        (rows,) = self._at(slots)
        backwards = rows.flip(0).cpu().numpy()
        _, last = np.unique(backwards, return_index=True)
        return torch.from_numpy(len(backwards) - 1 - last).to(slots.device)

    def _read(self, slots: torch.Tensor) -> Tokens:
        if not len(slots):
            return slice(None)
        # The group before, and what has been begun of one (0.5.23, `c4_state_transfer_indices`).
        return slice(-(4 + (int(slots[-1]) + 1) % 4), None)


def compressed_kv(sg: types.SimpleNamespace, shape: EngineShape) -> Any:
    """A `DeepSeekV4TokenToKVPool`, sized as SGLang does from the slots of full attention."""
    turns = _RATIOS[shape.kind]
    ratios = [turns[layer % len(turns)] for layer in range(shape.layers)]
    # Each layer with a group of 1 or 2 reads the KV of the nearest of these.
    sources = [
        layer
        for layer, ratio in enumerate(ratios)
        if ratio in (1, 2) and (not layer or ratios[layer - 1] != ratio)
    ]
    return _pool(
        sg,
        shape,
        ratios,
        kv_source_layers=sources,
        kv_layout="v41" if shape.kind == "dsv41" else "v4",
    )


def window_kv(sg: types.SimpleNamespace, shape: EngineShape) -> Any:
    """What a draft model keeps: windows in each layer, and no more."""
    return _pool(sg, shape, [0] * shape.draft_layers, is_draft_worker=True)


def compressed_rows(kvcache: Any, layer: int) -> list[Rows]:
    """What a layer reads and writes, once it is there: SGLang's accessors wait for it."""
    kept: list[Rows] = [
        _page_rows(kvcache.get_swa_key_buffer_radix(layer), kvcache.swa_page_size, "swa")
    ]
    ratio = kvcache.compression_ratios[layer]
    if layer not in kvcache.sources_by_ratio.get(ratio, ()):
        return kept
    kept.append(_group_rows(kvcache.get_extra_key_buffer(layer), kvcache.kv_pools[ratio], ratio))
    indexer = kvcache.index_pools.get(ratio)
    if indexer is not None:
        keys = kvcache.get_index_k_with_scale_buffer(layer)
        kept.append(_group_rows(keys, indexer, ratio))
    if ratio == 4:
        for pool in (
            kvcache.get_attention_compress_states(layer),
            kvcache.get_indexer_compress_states(layer),
        ):
            kept.append(_RingRows(pool.kv_score_buffer.kv_score, "swa", pool=pool))
    return kept


def window_rows(kvcache: Any) -> list[Rows]:
    """What a draft model reads and writes."""
    return [
        _page_rows(tensor, kvcache.swa_page_size, "swa") for tensor in kvcache.swa_kv_pool.kv_buffer
    ]


def _pool(sg: types.SimpleNamespace, shape: EngineShape, ratios: list[int], **changes: Any) -> Any:
    page = shape.page_tokens
    return sg.DeepSeekV4TokenToKVPool(
        max_num_reqs=shape.requests,
        swa_size=shape.windows_tokens,
        c4_size=shape.pool_tokens // 4,
        c128_size=shape.pool_tokens // 128,
        c4_state_pool_size=shape.windows_tokens // page * _RING_TOKENS,
        c128_state_pool_size=0,
        full_size=shape.pool_tokens,
        page_size=page,
        swa_page_size=page,
        sliding_window=shape.window,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=max(128, shape.heads * shape.head_dim),
        layer_num=len(ratios),
        compression_ratios=ratios,
        start_layer=0,
        end_layer=len(ratios),
        device=shape.device,
        enable_memory_saver=False,
        **changes,
    )


def _group_rows(tensor: torch.Tensor, pool: Any, ratio: int) -> Rows:
    rows = _page_rows(tensor, pool.page_size, "full")
    return _CompressedRows(rows.tensor, "full", pool.page_size, ratio=ratio)


def _page_rows(tensor: torch.Tensor, entries: int, role: Any) -> Rows:
    """A tensor with a row a page, cut into as many equal parts as the page has entries."""
    pages = tensor.view(torch.uint8)
    each = pages.shape[1] // entries
    return Rows(pages[:, : each * entries].view(len(pages), 1, entries, each), role, entries)
