"""Lays out the bulk of a message: token slots in a ring, keys in a blob. Pure.

Works on columns, because a step of an engine can offer hundreds of nodes at once on the thread that
schedules it: what is done for all of them in one call costs a fraction of a call for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, islice
from operator import mul
from typing import NamedTuple

import torch

from tierd.wire import messages
from tierd.wire.limits import KEY_BYTES
from tierd_client.pools import PageKeys, PoolPages, join_keys, keys_to_send


class Parts(NamedTuple):
    """Pages of one pool each, by columns: row i of each list is part i.

    Attributes:
        pools: Index of its pool in the registration.
        keys: Its pages' keys.
        slots: Their token slots, int64, shape (tokens[i],).
        pages: How many they are.
        tokens: How many slots they have.
    """

    pools: list[int]
    keys: list[PageKeys]
    slots: list[torch.Tensor]
    pages: list[int]
    tokens: list[int]

    def ring_positions(self, start: int) -> list[int]:
        """Where each part's token slots begin in a ring, if the first one's begin at absolute
        position `start`; and last, where all of them end."""
        return list(accumulate(self.tokens, initial=start))


def no_parts() -> Parts:
    """Nothing, to add to."""
    return Parts([], [], [], [], [])


class Pools:
    """The pools of a rank: turns pages into parts.

    Args:
        page_tokens: By name, in the order of the registration.
    """

    def __init__(self, page_tokens: dict[str, int]) -> None:
        self._index = {name: i for i, name in enumerate(page_tokens)}
        self._names = list(page_tokens)
        self._page_tokens = list(page_tokens.values())

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
        tokens = list(map(mul, pages, sizes))
        # Their number of elements costs a third of what their shape does.
        if not whole or tokens != list(map(torch.Tensor.numel, slots)):
            self._refuse(pools, keys, slots, tokens)
        return Parts(pools, keys, slots, pages, tokens)

    def parts_of(self, pages: Iterable[PoolPages]) -> Parts:
        """Raises: ValueError: as `parts`."""
        names, keys, slots = [], [], []
        for part in pages:
            names.append(part.pool)
            keys.append(part.keys)
            slots.append(part.slots)
        return self.parts(names, keys, slots)

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
    keys, pages = parts.keys, parts.pages
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
    if isinstance(last, bytes) or not 0 < len(last) <= len(keys):
        return False
    # Each is a sum over all that comes before it: what lies between is the same, too.
    return keys[-1] == last[-1] and keys[-len(last)] == last[0]


def named_parts(parts: Parts, ring: Iterable[int]) -> list[messages.Part]:
    """Parts as a restore names them, of which each begins there in the ring."""
    return list(map(messages.Part, parts.pools, parts.pages, ring))


def grouped(parts: list[messages.Part], counts: Sequence[int]) -> list[list[messages.Part]]:
    """The parts of each request, of which the next one has `counts[i]`."""
    rest = iter(parts)
    return [list(islice(rest, count)) for count in counts]
