"""Lays out the bulk of a message: page numbers in a ring, keys in a blob. Pure.

Works on columns, because a step of an engine can offer hundreds of nodes at once on the thread that
schedules it: what is done for all of them in one call costs a fraction of a call for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, groupby, islice
from operator import mul
from typing import NamedTuple

import torch

from tierd.wire import messages
from tierd.wire.limits import KEY_BYTES
from tierd_client.device import SlotRun
from tierd_client.pools import PageKeys, PoolPages, join_keys, keys_to_send


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
    """Where parts lie in a ring, and what goes into it for them.

    Attributes:
        ring: By part, the position of its first page number.
        runs: Token slots in the order of the ring.
        end: The ring position after the last page number.
    """

    ring: list[int]
    runs: list[SlotRun]
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
        pages = list(map(len, keys))
        whole = True
        if bytes in set(map(type, keys)):
            blobs = [isinstance(k, bytes) for k in keys]
            whole = not any(n % KEY_BYTES for n in compress(pages, blobs))
            pages = [n // KEY_BYTES if b else n for n, b in zip(pages, blobs, strict=True)]
        sizes = map(self._page_tokens.__getitem__, pools)
        fit = list(map(mul, pages, sizes))
        # Their number of elements costs a third of what their shape does.
        if not whole or fit != list(map(torch.Tensor.numel, slots)):
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
            *ring, end = accumulate(pages, initial=start)
            return Layout(ring, [SlotRun(self._one_size, slots)] if slots else [], end)
        sizes = [self._page_tokens[pool] for pool in pools]
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        ring, end = [0] * len(order), start
        for i in order:
            ring[i] = end
            end += pages[i]
        by_size = groupby(order, sizes.__getitem__)
        runs = [SlotRun(size, [slots[i] for i in those]) for size, those in by_size]
        return Layout(ring, runs, end)

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
            if slot.numel() != wanted:
                raise ValueError(
                    f"{what}: {slot.numel()} slots for pages that have {wanted}; a page has "
                    f"{self._page_tokens[pool]}"
                )


def key_blob(parts: Parts) -> bytes:
    """The keys of all parts, one after the other."""
    return join_keys(parts.keys)


def shared_keys(parts: Parts, counts: Sequence[int]) -> tuple[bytes | str, list[int]]:
    """The keys of a step's nodes, of which node i has the next `counts[i]` parts.

    A part whose keys are the last ones of its node's first part, as those of a window are, shares
    them: they are sent once.

    Returns: the keys, as digits if all of them are; and by part, which of them is its first. The
        others follow.
    """
    _, keys, _, pages = parts
    if len(keys) == len(counts) and max(counts, default=0) <= 1:
        *first, _ = accumulate(pages, initial=0)
        return keys_to_send(keys), first
    runs: list[PageKeys] = []
    first, end, node = [], 0, 0
    for count in counts:
        for part in range(node, node + count):
            if part > node and _ends_with(keys[node], keys[part]):
                first.append(first[node] + pages[node] - pages[part])
            else:
                runs.append(keys[part])
                first.append(end)
                end += pages[part]
        node += count
    return keys_to_send(runs), first


def _ends_with(keys: PageKeys, last: PageKeys) -> bool:
    """False also where they are not of one kind."""
    if isinstance(keys, bytes):
        return isinstance(last, bytes) and keys.endswith(last)
    return keys == last or keys[max(0, len(keys) - len(last)) :] == last


def named_parts(parts: Parts, layout: Layout) -> list[messages.Part]:
    """Parts as a restore names them."""
    return list(map(messages.Part, parts.pools, parts.pages, layout.ring))


def grouped(parts: list[messages.Part], counts: Sequence[int]) -> list[list[messages.Part]]:
    """The parts of each request, of which the next one has `counts[i]`."""
    rest = iter(parts)
    return [list(islice(rest, count)) for count in counts]
