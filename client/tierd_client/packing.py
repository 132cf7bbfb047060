"""Lays out the bulk of a message: page numbers in a ring, keys in a blob. Pure.

Works on columns, because a step of an engine can offer hundreds of nodes at once on the thread that
schedules it: what is done for all of them in one call costs a fraction of a call for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import torch

from tierd.wire import messages
from tierd.wire.limits import KEY_BYTES
from tierd_client.pools import PageKeys, PoolPages, join_keys


class Parts(NamedTuple):
    """Pages of one pool each, by columns: row i of each list is part i.

    Attributes:
        pools: Index of its pool in the registration.
        keys: Its pages' keys.
        slots: Their token slots, int64, shape (pages[i] * tokens of a page,).
        pages: How many they are.
    """

    pools: list[int]
    keys: list[PageKeys]
    slots: list[torch.Tensor]
    pages: list[int]


class Layout(NamedTuple):
    """Parts as a message names them, and what goes into the ring for them.

    Attributes:
        parts: In the order of the `Parts`.
        slots, page_tokens: Token slots in the order of the ring, and the size of their pages.
        end: The ring position after the last page number.
    """

    parts: list[messages.Part]
    slots: list[torch.Tensor]
    page_tokens: list[int]
    end: int


class Pools:
    """The pools of a rank: turns pages into parts, and parts into a message's layout.

    Args:
        page_tokens: By name, in the order of the registration.
    """

    def __init__(self, page_tokens: dict[str, int]) -> None:
        self._index = {name: i for i, name in enumerate(page_tokens)}
        self._names = list(page_tokens)
        self._page_tokens = list(page_tokens.values())
        self._one_size = self._page_tokens[0] if len(set(self._page_tokens)) == 1 else 0

    def indices(self, names: Iterable[str] | None) -> list[int]:
        """Raises: ValueError: no such pool."""
        try:
            return [self._index[name] for name in (self._names if names is None else names)]
        except KeyError as error:
            raise ValueError(f"no pool {error}; there are {', '.join(self._names)}") from None

    def parts(self, names: Iterable[str], keys: list[PageKeys], slots: list[torch.Tensor]) -> Parts:
        """Columns of parts, checked.

        Raises: ValueError: keys and slots that do not fit together, or no such pool.
        """
        pools = self.indices(names)
        pages = [len(k) // KEY_BYTES if isinstance(k, bytes) else len(k) for k in keys]
        sizes = self._page_tokens
        fit = [n * sizes[pool] for n, pool in zip(pages, pools, strict=True)]
        if fit != [s.shape[0] for s in slots] or any(
            isinstance(k, bytes) and len(k) % KEY_BYTES for k in keys
        ):
            self._refuse(pools, keys, slots, fit)
        return Parts(pools, keys, slots, pages)

    def parts_of(self, pages: Iterable[PoolPages]) -> Parts:
        """Raises: ValueError: as `parts`."""
        names, keys, slots = [], [], []
        for part in pages:
            names.append(part.pool)
            keys.append(part.keys)
            slots.append(part.slots)
        return self.parts(names, keys, slots)

    def lay_out(self, parts: Parts, start: int) -> Layout:
        """Place a message's page numbers in a ring from absolute position `start` on.

        Pages of one size lie side by side, whichever nodes they belong to: their numbers then take
        as many torch operations as there are sizes, however many nodes there are. So a node's part
        of the ring may lie between another's, and is free again when the message is answered.
        """
        pools, _, slots, pages = parts
        if self._one_size:
            ends = list(accumulate(pages, initial=start))
            named = list(map(messages.Part, pools, pages, ends))
            return Layout(named, slots, [self._one_size] * len(slots), ends[-1])
        sizes = [self._page_tokens[pool] for pool in pools]
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        ends = list(accumulate([pages[i] for i in order], initial=start))
        at = [0] * len(order)
        for place, i in enumerate(order):
            at[i] = ends[place]
        named = list(map(messages.Part, pools, pages, at))
        return Layout(named, [slots[i] for i in order], [sizes[i] for i in order], ends[-1])

    def _refuse(
        self,
        pools: Sequence[int],
        keys: Sequence[PageKeys],
        slots: Sequence[torch.Tensor],
        fit: Sequence[int],
    ) -> None:
        for pool, key, slot, wanted in zip(pools, keys, slots, fit, strict=True):
            what = f"pool {self._names[pool]!r}"
            if isinstance(key, bytes) and len(key) % KEY_BYTES:
                raise ValueError(f"{what}: {len(key)} bytes of keys; a key has {KEY_BYTES}")
            if slot.shape[0] != wanted:
                raise ValueError(
                    f"{what}: {slot.shape[0]} slots for pages that have {wanted}; a page has "
                    f"{self._page_tokens[pool]}"
                )


def key_blob(parts: Parts) -> bytes:
    """The keys of all parts, one after the other."""
    return join_keys(parts.keys)


def grouped(parts: list[messages.Part], counts: Sequence[int]) -> list[list[messages.Part]]:
    """The parts of each node or request, of which the next one has `counts[i]`."""
    rest = iter(parts)
    return [list(islice(rest, count)) for count in counts]
