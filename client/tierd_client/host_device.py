"""A rank whose KV lies in CPU tensors: the `host` backend, for machines without a GPU."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch

from tierd.wire.errors import RefusedError
from tierd.wire.layout import TICKETS, Segment
from tierd.wire.messages import Allocation
from tierd_client.device import Exports, Ring, dense, store_slots

_SPINS = 200
"""Looks at a layer word before sleeping: a layer of a small pool lands within this time."""
_SLEEP_S = 50e-6


class HostDevice:
    """Implements `tierd_client.device.Device` with plain stores and loads.

    Whatever writes the KV of a CPU tensor has returned before the next call is made, so program
    order takes the place of the streams' order.
    """

    def __init__(self, rank: int) -> None:
        self._name = f"host:{rank}"
        self._segment: Segment | None = None

    @property
    def name(self) -> str:
        return self._name

    def export(self, tensors: Sequence[torch.Tensor]) -> Exports:
        exports = Exports([], [], [])
        index_of: dict[int, int] = {}
        try:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if not storage.nbytes():
                    raise RefusedError("a KV buffer without memory behind it; leave it out")
                # Moves the storage into shared memory in place, views included; a second call
                # returns the same descriptor, which stays the storage's.
                fd, size = storage._share_fd_cpu_()
                base = storage.data_ptr()
                if base not in index_of:
                    index_of[base] = len(exports.allocations)
                    exports.allocations.append(Allocation(size=size))
                    exports.fds.append(os.dup(fd))
                offset = tensor.storage_offset() * tensor.element_size()
                exports.places.append((index_of[base], offset))
        except BaseException:
            exports.close()
            raise
        return exports

    def adopt_segment(self, memory: mmap.mmap, segment: Segment) -> None:
        self._segment = segment

    def write_slots(self, ring: Ring, position: int, slots: Sequence[torch.Tensor]) -> None:
        segment = self._adopted()
        target = segment.backup_ring if ring == "backup" else segment.restore_ring
        for tensor in dense(slots, len(target)):
            store_slots(target, position, tensor)
            position += tensor.numel()

    def mark_ready(self, ticket: int) -> None:
        self._adopted().ready[ticket % TICKETS] = ticket

    def wait_layer(
        self, entry: int, layer: int, generation: int, give_up: Callable[[], bool]
    ) -> None:
        word = self._adopted().layers[entry, layer : layer + 1]
        spins = 0
        while not reached(int(word[0]), generation) and not give_up():
            spins += 1
            if spins > _SPINS:
                time.sleep(_SLEEP_S)

    def release_segment(self) -> None:
        self._segment = None

    def _adopted(self) -> Segment:
        if self._segment is None:
            raise RuntimeError("no segment: call adopt_segment first")
        return self._segment


def reached(word: int, generation: int) -> bool:
    """Whether a layer word has come to a generation: the cyclic comparison of 32-bit words that
    `cuStreamWaitValue32` makes with GEQ."""
    return (word - generation) & 0xFFFFFFFF < 1 << 31
