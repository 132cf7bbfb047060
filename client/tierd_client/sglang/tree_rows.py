"""What one tensor of an engine keeps of tokens, written and compared without a model.

It is a fixed function of the tokens up to each, of the tensor and of the weights' version, so that
every byte can be checked, and one from another place or another context is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

Role = Literal["full", "swa", "state"]
Tokens: TypeAlias = torch.Tensor | slice


@dataclass(frozen=True)
class Rows:
    """What one layer keeps of tokens in one tensor.

    Attributes:
        tensor: Shape (token slots, ...), or with `page_tokens` (pages, heads, page_tokens, ...).
        role: Whose slots its rows are.
        number: Unlike that of any other tensor of the engine.
    """

    tensor: torch.Tensor
    role: Role = "full"
    page_tokens: int = 0
    number: int = 0

    def write(self, slots: torch.Tensor, states: U64) -> None:
        """Store what these slots must hold."""
        written = self._written(slots)
        slots, states = slots[written], states[_numpy(written)]
        if not len(slots):
            return
        memory = self.tensor.view(torch.uint8)
        shape = memory[self._at(slots[:1])].shape[1:]
        rows = torch.from_numpy(token_rows(states, self.number, math.prod(shape)))
        memory[self._at(slots)] = rows.reshape(-1, *shape).to(memory.device)

    def spoil(self, slots: torch.Tensor) -> None:
        """Leave nothing right in these slots."""
        self.tensor.view(torch.uint8)[self._at(slots)] = 0xA5

    def compare(self, slots: torch.Tensor, states: U64) -> tuple[int, int]:
        """Bytes that differ from what these slots must hold, and bytes read."""
        read = self._read(slots)
        slots, states = slots[read], states[_numpy(read)]
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

    def _written(self, slots: torch.Tensor) -> Tokens:
        """Which of these tokens, written one after the other, leave a row."""
        return slice(None)

    def _read(self, slots: torch.Tensor) -> Tokens:
        """Which of these tokens, the last ones of a prefix, are read to go on with it."""
        return slice(None)


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


def _numpy(tokens: Tokens) -> Any:
    return tokens if isinstance(tokens, slice) else tokens.cpu().numpy()
