"""All layers of an SGLang KV pool in one device allocation, so that a page is one strided copy.

SGLang 0.5.23 allocates layer by layer, and a copy engine's strided call does not reach from one
allocation into the next. Here a pool's own code runs twice: on the meta device, to learn which
tensors it makes, then for good, with each of them a part of one allocation. Sizes, shapes and
strides of the tensors stay what they are.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4IndexerPool,
    DeepSeekV4SingleKVPool,
    DeepSeekV4UniformFP8KVPool,
)
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

ALIGNMENT = 512
"""Bytes. What torch's allocator gives every tensor. No more: K and V of a layer are halves of one
tensor, and only where layers follow without a gap do all halves lie at one stride."""

KNOWN = frozenset(
    {
        DSATokenToKVPool,
        DeepSeekV4IndexerPool,
        DeepSeekV4SingleKVPool,
        DeepSeekV4UniformFP8KVPool,
        MHATokenToKVPool,
        MHATokenToKVPoolFP4,
        MHATokenToKVPoolMXFP8,
        MLATokenToKVPool,
        MLATokenToKVPoolFP4,
    }
)
"""Pools by their exact class: a subclass may allocate in another way."""

_FACTORIES = (torch.zeros, torch.empty)


class Extent(NamedTuple):
    """A tensor that a pool makes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


class ArenaDiffersError(Exception):
    """A pool made other tensors than in its rehearsal."""


def place(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """Where each tensor begins in an arena that holds them in this order, and the arena's size;
    in bytes."""
    offsets = []
    end = 0
    for extent in extents:
        offsets.append(end)
        end += -(-extent.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def rehearse(create: Callable[[Any], Any], pool: Any) -> list[Extent]:
    """The tensors that `create(pool)` is going to make on the pool's device, in order.

    Runs it on a copy of the pool whose device is `meta`, which takes no memory.
    """
    rehearsing = copy.copy(pool)
    rehearsing.device = "meta"
    recorder = _Recorder()
    with recorder:
        create(rehearsing)
    return recorder.extents


def create_in_arena(create: Callable[[Any], Any], pool: Any) -> Any:
    """Call `create(pool)`, with all tensors that it makes in one allocation.

    Where that cannot be, they are allocated as SGLang does, and the log says why.

    Args:
        create: The pool's own method that makes its tensors with `torch.zeros` or `torch.empty`
            on `pool.device`.
        pool: SGLang's `KVCache`, so far without the tensors.

    Returns: what `create` returns.
    """
    reason = _why_stock(pool)
    if not reason:
        try:
            extents = rehearse(create, pool)
        # It is the engine's own code, on a device that it was not written for: whatever it raises
        # there says nothing about the engine, which starts as it would without us.
        except Exception as error:
            reason = f"its rehearsal failed: {type(error).__name__}: {error}"
        else:
            if len(extents) > 1:
                return _carve(create, pool, extents)
            reason = "it makes one tensor"
    log.info("tierd: a %s is allocated as usual: %s", type(pool).__name__, reason)
    return create(pool)


def _why_stock(pool: Any) -> str:
    """Why a pool's memory must not be touched; empty if it may."""
    if type(pool) not in KNOWN:
        return "tierd does not know this class"
    if pool.post_capture_active:
        return "its memory comes after graph capture"
    if pool.enable_custom_mem_pool:
        return "it has a memory pool of its own"
    if getattr(pool.memory_saver_adapter, "enabled", False):
        return "the memory saver manages it"
    return ""


def _carve(create: Callable[[Any], Any], pool: Any, extents: Sequence[Extent]) -> Any:
    before = dict(vars(pool))
    try:
        result = _created_in(place(extents)[1], create, pool, extents)
    except torch.OutOfMemoryError:
        reason = "no allocation of its whole size is to be had"
    except ArenaDiffersError as error:
        reason = str(error)
    else:
        log.info("tierd: the layers of a %s lie in one allocation", type(pool).__name__)
        return result
    log.warning("tierd: a %s is allocated as usual: %s", type(pool).__name__, reason)
    # What it has made so far must be gone before it is made again.
    vars(pool).clear()
    vars(pool).update(before)
    return create(pool)


def _created_in(
    nbytes: int, create: Callable[[Any], Any], pool: Any, extents: Sequence[Extent]
) -> Any:
    arena = torch.zeros(nbytes, dtype=torch.uint8, device=pool.device)
    carver = _Carver(arena, extents)
    with carver:
        result = create(pool)
    carver.check_complete()
    return result


class _Recorder(TorchFunctionMode):  # type: ignore[misc]
    """Notes the tensors that are made on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.extents: list[Extent] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES and result.is_meta:
            self.extents.append(Extent(tuple(result.shape), result.dtype))
        return result


class _Carver(TorchFunctionMode):  # type: ignore[misc]
    """Hands out an arena, part by part, in place of the tensors that are made on its device."""

    def __init__(self, arena: torch.Tensor, extents: Sequence[Extent]) -> None:
        super().__init__()
        self._arena = arena
        self._extents = extents
        self._offsets, _ = place(extents)
        self._next = 0

    def check_complete(self) -> None:
        """Raises: ArenaDiffersError: fewer tensors have been made than were to come."""
        if self._next < len(self._extents):
            raise ArenaDiffersError(
                f"it made {self._next} of {len(self._extents)} tensors of its rehearsal"
            )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func not in _FACTORIES or device is None:
            return func(*args, **kwargs)
        if torch.device(device).type != self._arena.device.type:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta"})
        return self._take(Extent(tuple(like.shape), like.dtype))

    def _take(self, extent: Extent) -> torch.Tensor:
        number = self._next
        if number >= len(self._extents) or self._extents[number] != extent:
            raise ArenaDiffersError(f"its tensor {number} is another one than in its rehearsal")
        self._next += 1
        # Not a view of the arena but a tensor of its own over the same memory, as it would be
        # anywhere else; the memory lives as long as one of them does.
        tensor = torch.empty(0, dtype=extent.dtype, device=self._arena.device)
        offset = self._offsets[number] // extent.dtype.itemsize
        return tensor.set_(self._arena.untyped_storage(), offset, extent.shape)
