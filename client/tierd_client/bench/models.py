"""The KV of real models, as their engines lay it out: shapes only, with no model behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tierd_client.pools import DeviceBuffer, DevicePool

Placement = Literal["arena", "stock"]
"""All layers of a pool in one allocation, or one allocation a layer as SGLang makes them."""


@dataclass(frozen=True)
class PoolShape:
    """One pool of a model.

    Attributes:
        name: As on the wire: `kv`, `swa`, `mamba`.
        layers: The layers that it serves.
        rows: Bytes of a token, or of a state, in each of a layer's tensors (K and V; a latent).
        window_tokens: Tokens of a sliding window; 0 is none.
        is_state: Its slots are states, not tokens. SGLang has one tensor a part for all layers.
    """

    name: str
    layers: Sequence[int]
    rows: Sequence[int]
    window_tokens: int = 0
    is_state: bool = False

    @property
    def unit_bytes(self) -> int:
        """Bytes of a token, or of a state, in all layers."""
        return len(self.layers) * sum(self.rows)


@dataclass(frozen=True)
class Model:
    """A model's pools, `kv` first."""

    name: str
    pools: Sequence[PoolShape]

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes on the device."""
        return sum(pool.unit_bytes for pool in self.pools if not pool.is_state)


QWEN3_8B = Model("Qwen3-8B", [PoolShape("kv", range(36), (2048, 2048))])
GPT_OSS_20B = Model(
    "gpt-oss-20b",
    [
        PoolShape("kv", range(1, 24, 2), (1024, 1024)),
        PoolShape("swa", range(0, 24, 2), (1024, 1024), window_tokens=128),
    ],
)
DEEPSEEK_V3 = Model("DeepSeek-V3", [PoolShape("kv", range(61), (1152,))])
QWEN3_NEXT = Model(
    "Qwen3-Next",
    [
        PoolShape("kv", range(3, 48, 4), (1024, 1024)),
        PoolShape("mamba", [n for n in range(48) if n % 4 != 3], (2 << 20, 48 << 10), 0, True),
    ],
)


@dataclass
class DeviceMemory:
    """A model's pools on a device, not initialized.

    Args:
        tokens: Token slots of each pool; a whole number of pages of every size that is measured.
        states: Slots of each state pool.
    """

    model: Model
    placement: Placement
    tokens: int
    states: int
    device: torch.device
    _tensors: dict[str, list[tuple[int, torch.Tensor]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._tensors = {shape.name: list(self._allocate(shape)) for shape in self.model.pools}

    def pools(self, page_tokens: int) -> list[DevicePool]:
        """The same memory as pages of this size."""
        return [
            DevicePool(
                shape.name,
                1 if shape.is_state else page_tokens,
                [DeviceBuffer(tensor, layer) for layer, tensor in self._tensors[shape.name]],
                1 if shape.is_state else -(-shape.window_tokens // page_tokens),
            )
            for shape in self.model.pools
        ]

    def _allocate(self, shape: PoolShape) -> list[tuple[int, torch.Tensor]]:
        """A tensor of shape (slots, row bytes) for each layer and part, layer by layer."""
        slots = self.states if shape.is_state else self.tokens
        count, rows = len(shape.layers), shape.rows
        if shape.is_state:
            parts = [self._empty(count, slots, row) for row in rows]
            return [(n, part[i]) for part in parts for i, n in enumerate(shape.layers)]
        if self.placement == "arena":
            every = self._empty(count, len(rows), slots, rows[0])
            return [(n, half) for i, n in enumerate(shape.layers) for half in every[i]]
        return [(n, half) for n in shape.layers for half in self._empty(len(rows), slots, rows[0])]

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self.device)
