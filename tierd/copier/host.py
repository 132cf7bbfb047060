"""The backend without a GPU: shared memory stands in for the device, memory copies for DMA."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tierd.copier.backend import (
    Attachment,
    BackendError,
    Chunk,
    Marker,
    SharedMemory,
    map_chunk_file,
    split_fds,
)
from tierd.copier.operations import Records
from tierd.copier.plan import Batch, Direction
from tierd.wire.messages import Allocation


class HostBackend:
    """A `Backend` that copies inside `submit`: all has retired when the next call is made."""

    def detail(self) -> dict[str, Any]:
        return {"backend": "host"}

    def map_chunk(self, fd: int, size: int, touch: bool) -> Chunk:
        with ExitStack() as stack:
            address = map_chunk_file(stack, fd, size, touch=touch, node=None)
            return Chunk(address, size, stack.pop_all())

    def attach(
        self, allocations: Sequence[Allocation], fds: Sequence[int], segment: SharedMemory
    ) -> Attachment:
        with ExitStack() as stack:
            addresses = []
            for number, (allocation, fd) in enumerate(
                zip(allocations, split_fds(allocations, fds), strict=True)
            ):
                if fd is None:
                    raise BackendError(
                        f"allocation {number} is GPU memory; this copier serves the host backend"
                    )
                mapping = SharedMemory(fd, allocation.size)
                stack.callback(mapping.close)
                addresses.append(mapping.address)
            return Attachment(tuple(addresses), segment.address, stack.pop_all())

    def submit(self, direction: Direction, batch: Batch) -> None:
        for ops in (batch.boxes, batch.rows):
            copy(direction, ops)

    def write_words(self, attachment: Attachment, offsets: Sequence[int], value: int) -> None:
        for offset in offsets:
            ctypes.c_uint32.from_address(attachment.words + offset).value = value

    def record(self, direction: Direction) -> Marker:
        return Marker(0)

    def retired(self, marker: Marker) -> bool:
        return True

    def close(self) -> None:
        pass


def copy(direction: Direction, ops: Records) -> None:
    """Carry out operations of dtype `operations.OPS` between two places in this process."""
    to_host = direction is Direction.BACKUP
    for device, host, width, depth, device_stride, host_stride in ops.tolist():
        for _ in range(depth):
            if to_host:
                ctypes.memmove(host, device, width)
            else:
                ctypes.memmove(device, host, width)
            device += device_stride
            host += host_stride
