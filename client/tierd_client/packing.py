"""Lays out the bulk of a message: token slots in a ring, keys in a blob. Pure.

Works on columns, because a step of an engine can offer hundreds of nodes at once on the thread that
schedules it: what is done for all of them in one call costs a fraction of a call for each.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from operator import mul
from typing import NamedTuple, TypeAlias

import torch

from tierd.wire import messages
from tierd.wire.limits import KEY_BYTES, MAX_PAGES_PER_MESSAGE
from tierd_client.pools import PageKeys, PoolPages

KeyBlob: TypeAlias = bytes | str
"""Keys one after the other: of 32 bytes each, or of 64 hexadecimal digits each."""
_KEY_DIGITS = 2 * KEY_BYTES
MOST_DIGITS = MAX_PAGES_PER_MESSAGE // 4 * _KEY_DIGITS
"""What a flush has of them at most."""


class Parts(NamedTuple):
    """Pages of one pool each, by columns: row i of each list is part i.

    Attributes:
        pools: Index of its pool in the registration.
        keys: Its pages' keys: of 32 bytes each, or of 64 digits each. Empty if it shares those of
            its node.
        slots: Their token slots, int64, shape (tokens[i],).
        pages: How many they are.
        tokens: How many slots they have.
        first: Which of all parts' keys is its first; the others follow.
    """

    pools: list[int]
    keys: list[KeyBlob]
    slots: list[torch.Tensor]
    pages: list[int]
    tokens: list[int]
    first: list[int]

    def ring_positions(self, start: int) -> list[int]:
        """Where each part's token slots begin in a ring, if the first one's begin at absolute
        position `start`; and last, where all of them end."""
        return list(accumulate(self.tokens, initial=start))


def no_parts() -> Parts:
    """Nothing, to add to."""
    return Parts([], [], [], [], [], [])


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
        blobs: list[KeyBlob] = [k if isinstance(k, bytes) else "".join(k) for k in keys]
        pages = [len(k) // (KEY_BYTES if isinstance(k, bytes) else _KEY_DIGITS) for k in blobs]
        sizes = map(self._page_tokens.__getitem__, pools)
        tokens = list(map(mul, pages, sizes))
        # Their number of elements costs a third of what their shape does.
        fit = tokens == list(map(torch.Tensor.numel, slots))
        if not fit or not all(map(_is_whole, keys, blobs)):
            self._refuse(pools, keys, slots, tokens)
        *first, _ = accumulate(pages, initial=0)
        return Parts(pools, blobs, slots, pages, tokens, first)

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
            if isinstance(key, bytes):
                if len(key) % KEY_BYTES:
                    raise ValueError(f"{what}: {len(key)} bytes of keys; a key has {KEY_BYTES}")
            elif not all(len(digits) == _KEY_DIGITS for digits in key):
                raise ValueError(f"{what}: a key that has not {_KEY_DIGITS} digits")
            if slot.numel() != wanted:
                raise ValueError(
                    f"{what}: {slot.numel()} slots for pages that have {wanted}; a page has "
                    f"{self._page_tokens[pool]}"
                )


def _is_whole(keys: PageKeys, blob: KeyBlob) -> bool:
    """Whether a blob is made of whole keys."""
    if isinstance(keys, bytes):
        return not len(keys) % KEY_BYTES
    return len(blob) == len(keys) * _KEY_DIGITS


def key_blob(parts: Parts) -> bytes:
    """The keys of all parts, one after the other.

    Raises: ValueError: digits that are not hexadecimal.
    """
    return _bytes_of(parts.keys)


def _bytes_of(blobs: Sequence[KeyBlob]) -> bytes:
    if bytes in set(map(type, blobs)):
        return b"".join(blob if isinstance(blob, bytes) else unhexlify(blob) for blob in blobs)
    return unhexlify("".join(blobs))  # type: ignore[arg-type]


def keys_to_send(blobs: Sequence[KeyBlob]) -> KeyBlob:
    """All these keys as a flush has them: digits stay digits, if all of them are and they are not
    so many that only half of them would fit into a message."""
    if bytes in set(map(type, blobs)) or sum(map(len, blobs)) > MOST_DIGITS:
        return _bytes_of(blobs)
    return "".join(blobs)  # type: ignore[arg-type]


def share_keys(parts: Parts, counts: Sequence[int]) -> Parts:
    """Have each part whose keys are the last ones of its node's first part, as those of a window
    are, share them: it is left without keys of its own.

    Args: `counts`: how many of the parts are each node's: the next ones.
    """
    if max(counts, default=0) <= 1:
        return parts
    keys = list(parts.keys)
    node = 0
    for count in counts:
        for part in range(node + 1, node + count):
            if type(keys[node]) is type(keys[part]) and keys[node].endswith(keys[part]):  # type: ignore[arg-type]
                keys[part] = keys[part][:0]
        node += count
    return number_keys(parts._replace(keys=keys), counts)


def number_keys(parts: Parts, counts: Sequence[int]) -> Parts:
    """Parts that may share keys, with their `first` as it is if there are no others."""
    keys, pages = parts.keys, parts.pages
    first, end, node = [], 0, 0
    for count in counts:
        shared_end = end + pages[node] if count else 0
        for part in range(node, node + count):
            if keys[part]:
                first.append(end)
                end += pages[part]
            else:
                first.append(shared_end - pages[part])
        node += count
    return parts._replace(first=first)


def named_parts(parts: Parts, ring: Iterable[int]) -> list[messages.Part]:
    """Parts as a restore names them, of which each begins there in the ring."""
    return list(map(messages.Part, parts.pools, parts.pages, ring))


def grouped(parts: list[messages.Part], counts: Sequence[int]) -> list[list[messages.Part]]:
    """The parts of each request, of which the next one has `counts[i]`."""
    rest = iter(parts)
    return [list(islice(rest, count)) for count in counts]
