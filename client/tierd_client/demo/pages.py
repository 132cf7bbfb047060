"""A rank's KV pages on its device; their contents tell which page, shard and buffer they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierd_client import DeviceBuffer, DevicePool

POISON = -0x5A5A5A5A5A5A5A5B
"""What a page holds before a restore: one that never arrives is then wrong in every byte."""
_SPREAD, _BUFFER = 0x1E3779B97F4A7C15, 0x632BE59BD9B4E019
"""Odd, and without a pattern in their bits: two pages, or two buffers, share next to no byte."""


@dataclass(frozen=True)
class Geometry:
    """One rank's share of a model's KV cache."""

    layers: int
    heads: int
    head_dim: int
    page_tokens: int
    pages: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one page in one buffer (bf16)."""
        return self.page_tokens * self.heads * self.head_dim * 2

    @property
    def page_bytes(self) -> int:
        """K and V of all layers."""
        return 2 * self.layers * self.row_bytes


class DevicePages:
    """K and V of every layer. Page p is token slots p * page_tokens ... (p + 1) * page_tokens - 1
    of every buffer.

    Args:
        arena: One allocation for all layers, which the copy engines like best. Otherwise one a
            layer, with K and V as its halves, as SGLang's pool makes them.
    """

    def __init__(self, geometry: Geometry, rank: int, device: torch.device, arena: bool) -> None:
        self.geometry = geometry
        self.device = device
        tokens = geometry.pages * geometry.page_tokens
        shape = (2, tokens, geometry.heads, geometry.head_dim)
        if arena:
            every = torch.zeros((geometry.layers, *shape), dtype=torch.bfloat16, device=device)
            self._layers = list(every)
        else:
            self._layers = [
                torch.zeros(shape, dtype=torch.bfloat16, device=device)
                for _ in range(geometry.layers)
            ]
        words = geometry.row_bytes // 8
        self._words = [
            layer.view(torch.int64).view(2, geometry.pages, words) for layer in self._layers
        ]
        self._ramp = torch.arange(words, dtype=torch.int64, device=device) * _SPREAD
        self._rank = rank
        self._offsets = torch.arange(geometry.page_tokens, dtype=torch.int64, device=device)

    def pool(self) -> DevicePool:
        """What the client is told of them."""
        buffers = [
            DeviceBuffer(layer[half], index)
            for index, layer in enumerate(self._layers)
            for half in (0, 1)
        ]
        return DevicePool("kv", self.geometry.page_tokens, buffers)

    def slots(self, pages: Sequence[int]) -> torch.Tensor:
        """Token slots of pages. Shape: (len(pages) * page_tokens,), int64, on the device."""
        first = self._index(pages) * self.geometry.page_tokens
        return (first[:, None] + self._offsets).flatten()

    def compute(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Fill pages with what belongs to their keys: the demo's forward pass."""
        index, seeds = self._index(pages), self._seeds(keys)
        for layer in range(self.geometry.layers):
            for half in (0, 1):
                self._words[layer][half, index] = self._expected(seeds, layer, half)

    def poison(self, pages: Sequence[int]) -> None:
        """Leave nothing right in these pages."""
        index = self._index(pages)
        for layer in self._words:
            layer[:, index] = POISON

    def wrong_bytes(self, pages: Sequence[int], keys: Sequence[bytes], layer: int) -> torch.Tensor:
        """How many bytes of a layer of these pages are not what belongs to their keys. A scalar on
        the device, so that counting waits for nothing."""
        index, seeds = self._index(pages), self._seeds(keys)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for half in (0, 1):
            found = self._words[layer][half, index]
            expected = self._expected(seeds, layer, half)
            if self.device.type == "cpu" and torch.equal(found, expected):
                continue
            wrong += (found.view(torch.uint8) != expected.view(torch.uint8)).sum()
        return wrong

    def _expected(self, seeds: torch.Tensor, layer: int, half: int) -> torch.Tensor:
        """Shape: (pages, row_bytes // 8), int64; sums wrap."""
        buffer = (self._rank * self.geometry.layers + layer) * 2 + half + 1
        return (seeds ^ (buffer * _BUFFER % (1 << 63)))[:, None] + self._ramp

    def _seeds(self, keys: Sequence[bytes]) -> torch.Tensor:
        seeds = np.frombuffer(b"".join(key[:8] for key in keys), np.int64)
        return torch.from_numpy(seeds.copy()).to(self.device, non_blocking=True)

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64).to(self.device, non_blocking=True)
