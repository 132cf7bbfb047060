"""Lays out the bulk of a message: page numbers in a ring, keys in a blob. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch

from tierd.wire import messages
from tierd_client.pools import PageKeys, PoolPages, join_keys


class PoolPlace(NamedTuple):
    """A pool by its index in the registration, and the token slots of one of its pages."""

    pool: int
    page_tokens: int


Counted: TypeAlias = tuple[PoolPages, int]
"""Pages of one pool, and how many."""


class Packing:
    """The pages of one message.

    Pages of one size lie side by side in the ring, whichever nodes they belong to: their numbers
    then take as many torch operations as there are sizes, however many nodes there are. So a node's
    part of the ring may lie between another's, and is free again when the message is answered.

    Args:
        places: By pool.
        start: Absolute ring position of the first page number.
        contents: All that will be added.

    Attributes:
        end: The ring position after the last page number.
    """

    def __init__(
        self,
        places: dict[str, PoolPlace],
        start: int,
        contents: Iterable[Sequence[Counted]],
    ) -> None:
        self._places = places
        totals: dict[int, int] = {}
        for counted in contents:
            for part, pages in counted:
                tokens = places[part.pool].page_tokens
                totals[tokens] = totals.get(tokens, 0) + pages
        self._at: dict[int, int] = {}
        self.end = start
        for tokens, pages in totals.items():
            self._at[tokens] = self.end
            self.end += pages
        self._slots: dict[int, list[torch.Tensor]] = {tokens: [] for tokens in totals}
        self._keys: list[PageKeys] = []

    def add(self, counted: Sequence[Counted]) -> list[messages.Part]:
        """One node's or request's pages, as the message names them."""
        parts = []
        for part, pages in counted:
            if pages:
                pool, tokens = self._places[part.pool]
                at = self._at[tokens]
                self._at[tokens] = at + pages
                self._slots[tokens].append(part.slots)
                self._keys.append(part.keys)
                parts.append(messages.Part(pool, pages, at))
        return parts

    def keys(self) -> bytes:
        """The keys of all parts, in the order in which they were added."""
        return join_keys(self._keys)

    def slots(self) -> tuple[list[torch.Tensor], list[int]]:
        """The token slots in the order of the ring, and the page size of each tensor's."""
        tensors = [tensor for run in self._slots.values() for tensor in run]
        return tensors, [tokens for tokens, run in self._slots.items() for _ in run]
