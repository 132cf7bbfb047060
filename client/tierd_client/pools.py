"""A rank's KV pools as the engine has them, and as the daemon is told of them."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from tierd.wire.errors import RefusedError
from tierd.wire.limits import KEY_BYTES
from tierd.wire.messages import BufferSpec, PoolSpec

PageKeys: TypeAlias = bytes | Sequence[str]
"""Keys of pages in chain order: of 32 bytes each, one after the other; or as many strings of 64
hexadecimal digits, which a flush leaves to the daemon to make bytes of."""


@dataclass(frozen=True)
class DeviceBuffer:
    """One layer's K, V, scale or state.

    Attributes:
        tensor: Shape (rows, ...), any dtype: row i belongs to token slot i, or to page i. Rows must
            be dense; they may stand apart.
        layer: The transfer layer it belongs to, from 0; a restore makes layers usable in order.
        rows_are_pages: A row holds all tokens of a page, in an order of its own.
    """

    tensor: torch.Tensor
    layer: int
    rows_are_pages: bool = False


@dataclass(frozen=True)
class DevicePool:
    """One component of the KV cache.

    Attributes:
        name: `kv`, `swa`, `mamba`, ...
        page_tokens: Token slots of a page; page p is slots p * page_tokens and on.
        buffers: In an order that is the same in every engine that shares pages.
        window: How many pages before a boundary it takes to resume there: 0 is all of them (KV),
            more for a sliding window, 1 for a state.
        replicated: Every rank of the group holds the same bytes (MLA's latent KV): one copy of a
            page serves them all, and each rank backs up a part of the pages.
    """

    name: str
    page_tokens: int
    buffers: Sequence[DeviceBuffer]
    window: int = 0
    replicated: bool = False


class PoolPages(NamedTuple):
    """Pages of one pool.

    Attributes:
        pool: Its name.
        keys: The pages' keys, each a sum over all pages of its chain up to its own. A list of them
            must not be changed before it is sent.
        slots: Their token slots, int64, shape (pages * page_tokens,), whole pages in the same
            order. Must not be changed before the backup or restore is over.
    """

    pool: str
    keys: PageKeys
    slots: torch.Tensor


def count_keys(keys: PageKeys) -> int:
    """How many pages these keys name.

    Raises: ValueError: the last one is not whole.
    """
    if not isinstance(keys, bytes):
        return len(keys)
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes of keys; a key has {KEY_BYTES}")
    return len(keys) // KEY_BYTES


def key_at(keys: PageKeys, page: int) -> bytes:
    """The key of one page; `page` may count from the end, as an index does."""
    if not isinstance(keys, bytes):
        return unhexlify(keys[page])
    at = range(len(keys) // KEY_BYTES)[page] * KEY_BYTES
    return keys[at : at + KEY_BYTES]


def key_bytes(keys: PageKeys) -> bytes:
    """The keys as one blob of 32 bytes each.

    Raises: ValueError: digits that are not hexadecimal.
    """
    return keys if isinstance(keys, bytes) else unhexlify("".join(keys))


def describe(pool: DevicePool, places: Sequence[tuple[int, int]]) -> PoolSpec:
    """What the daemon is told of a pool.

    Args:
        places: For each buffer, its allocation and the byte offset of its first element.

    Raises: RefusedError: rows that are not dense, or pages that are not.
    """
    specs = []
    num_pages = []
    for number, (buffer, (allocation, offset)) in enumerate(zip(pool.buffers, places, strict=True)):
        tensor = buffer.tensor
        page_rows = 1 if buffer.rows_are_pages else pool.page_tokens
        where = f"pool {pool.name!r}, buffer {number}"
        if tensor.dim() < 1 or not tensor[:1].is_contiguous():
            raise RefusedError(
                f"{where}: a row of shape {tuple(tensor.shape[1:])} is not dense in memory "
                f"(strides {tensor.stride()}); only dense rows can be carried"
            )
        row = tensor[:1].numel() * tensor.element_size()
        stride = tensor.stride(0) * tensor.element_size()
        if page_rows > 1 and stride != row:
            raise RefusedError(
                f"{where}: rows of {row} bytes stand {stride} bytes apart; pages of "
                f"{pool.page_tokens} tokens need them side by side"
            )
        num_pages.append(len(tensor) // page_rows)
        specs.append(
            BufferSpec(
                allocation=allocation,
                offset=offset,
                page_stride=stride * page_rows,
                row_bytes=row * page_rows,
                layer=buffer.layer,
            )
        )
    if len(set(num_pages)) != 1:
        raise RefusedError(f"pool {pool.name!r}: its buffers have {sorted(set(num_pages))} pages")
    return PoolSpec(
        name=pool.name,
        num_pages=num_pages[0],
        page_tokens=pool.page_tokens,
        window=pool.window,
        replicated=pool.replicated,
        buffers=specs,
    )
