"""What differs between a rank whose KV lies on a GPU and one whose KV lies in CPU memory.

A `Device` exports the rank's tensors, and orders the words and rings of its segment with the
work that the engine has under way. Nothing in the hot path (`write_slots`, `mark_ready`,
`wait_layer`) makes the calling thread wait for a GPU.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierd.wire.layout import Segment
from tierd.wire.messages import Allocation

Ring = Literal["backup", "restore"]

FEW_TENSORS = 8
"""So many tensors are copied one by one: joining them takes a kernel, and longer."""


@dataclass
class Exports:
    """A rank's tensors as another process can map them.

    Attributes:
        allocations: The distinct pieces of memory behind the tensors, in order of first use.
        fds: The descriptors of those without an IPC handle, in order; the caller's to close.
        places: For each tensor, its allocation's index and the byte offset of its first element.
    """

    allocations: list[Allocation]
    fds: list[int]
    places: list[tuple[int, int]]

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self.fds:
            os.close(self.fds.pop())


class Device(Protocol):
    """Where a rank's KV lies."""

    @property
    def name(self) -> str:
        """The GPU's UUID as nvidia-smi prints it ("GPU-..."), or "host:<rank>"."""

    def export(self, tensors: Sequence[torch.Tensor]) -> Exports:
        """Make the memory behind these tensors mappable by another process.

        May be called again, after a reconnection, and for other tensors.

        Raises: RefusedError: memory that cannot be shared; says what to change.
        """

    def adopt_segment(self, memory: mmap.mmap, segment: Segment) -> None:
        """Prepare the rank's segment for the calls below. One segment at a time.

        Raises: RefusedError: it cannot be registered with the GPU; says what to change.
        """

    def write_slots(self, ring: Ring, position: int, slots: Sequence[torch.Tensor]) -> None:
        """Put token slots into a ring, in order, from absolute `position` on.

        Asynchronous: they are there when the current stream has got so far. Many tensors take one
        copy in all, two around the end of the ring.

        Args:
            slots: int64, shape (n,) each; all on the rank's device, or all on the CPU.

        Raises: ValueError: more than the ring holds, or slots of another type; nothing has been
            written then.
        """

    def mark_ready(self, ticket: int) -> None:
        """Set a ticket's ready words: the token slots' in the order of the current stream, the
        KV's in the order of the forward stream."""

    def wait_layer(
        self, entry: int, layer: int, generation: int, give_up: Callable[[], bool]
    ) -> None:
        """Let nothing that follows read a layer before it has been restored, or was given up.

        On a GPU the current stream waits and the caller does not; somebody must release the word
        (`give_up` is not asked). On the CPU the caller waits until `give_up()` is true.
        """

    def release_segment(self) -> None:
        """Undo `adopt_segment`. Idempotent. No stream may still wait on the segment's words."""


def open_device(
    tensors: Sequence[torch.Tensor], *, rank: int, forward_stream: torch.cuda.Stream | None = None
) -> Device:
    """The device that holds these tensors.

    Args:
        forward_stream: The stream whose kernels write the KV; None if it is the current one.

    Raises: RefusedError: tensors on several devices, or on one that tierd cannot serve.
    """
    from tierd.wire.errors import RefusedError

    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise RefusedError(
            f"the KV buffers lie on {len(devices)} devices ({sorted(map(str, devices))}); "
            "a rank registers the buffers of one"
        )
    (device,) = devices
    if device.type == "cpu":
        from tierd_client.host_device import HostDevice

        return HostDevice(rank)
    if device.type == "cuda":
        from tierd_client.cuda_device import CudaDevice

        return CudaDevice(device.index, forward_stream)
    raise RefusedError(f"KV buffers on a {device.type!r} device; tierd serves CUDA and CPU tensors")


def dense(slots: Sequence[torch.Tensor], ring_size: int) -> Sequence[torch.Tensor]:
    """The same token slots in the same order, in few tensors, each without gaps.

    One torch operation, on the current stream, however many there are, and none for few: each costs
    microseconds on the scheduler thread.

    Raises: ValueError: more than the ring holds, or slots of another type than int64. Narrower ones
        among int64 ones are taken, however many there are.
    """
    if len(slots) <= FEW_TENSORS and all(map(_is_dense, slots)):
        tensors = slots
    else:
        joined = torch.cat(list(slots))
        if joined.dtype is not torch.int64:
            raise ValueError(f"token slots of {joined.dtype}; they have to be int64")
        tensors = [joined]
    count = sum(map(torch.Tensor.numel, tensors))
    if count > ring_size:
        raise ValueError(f"{count} token slots; the ring holds {ring_size}")
    return tensors


def _is_dense(slots: torch.Tensor) -> bool:
    return slots.dtype is torch.int64 and slots.is_contiguous()


def ring_pieces(position: int, count: int, size: int) -> list[tuple[int, int, int]]:
    """Where `count` elements, at most `size`, from absolute `position` on lie in a ring.

    Returns: one piece, or two around the end: (first ring element, first of the count, length).
    """
    at = position % size
    head = min(count, size - at)
    pieces = [(at, 0, head), (0, head, count - head)]
    return [piece for piece in pieces if piece[2]]


def store_slots(ring: npt.NDArray[np.int64], position: int, slots: torch.Tensor) -> None:
    """Put token slots that are in CPU memory into a ring, with plain stores."""
    values = slots.numpy()
    for at, first, count in ring_pieces(position, len(values), len(ring)):
        ring[at : at + count] = values[first : first + count]
