"""What differs between a rank whose KV lies on a GPU and one whose KV lies in CPU memory.

A `Device` exports the rank's tensors, and orders the words and rings of its segment with the
work that the engine has under way. Nothing in the hot path (`write_page_numbers`, `mark_ready`,
`wait_layer`) makes the calling thread wait for a GPU.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierd.wire.layout import Segment
from tierd.wire.messages import Allocation

Ring = Literal["backup", "restore"]


class SlotRun(NamedTuple):
    """Token slots of pages of one size: what is made into page numbers at once.

    Attributes:
        page_tokens: Tokens of a page.
        slots: Whole pages in page order. Each: shape (pages * page_tokens,), int64; all on the
            rank's device, or all on the CPU.
    """

    page_tokens: int
    slots: Sequence[torch.Tensor]


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

    def write_page_numbers(self, ring: Ring, position: int, runs: Sequence[SlotRun]) -> int:
        """Put page numbers into a ring, in order, from absolute `position` on.

        Asynchronous: they are there when the current stream has got so far. A run takes one copy,
        two around the end of the ring.

        Returns: how many page numbers were written.
        Raises: ValueError: more than the ring holds, or a run of pages that are not whole; nothing
            has been written then.
        """

    def mark_ready(self, ticket: int) -> None:
        """Set a ticket's ready words: the page numbers' in the order of the current stream, the
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


def page_numbers(runs: Sequence[SlotRun], ring_size: int) -> list[torch.Tensor]:
    """The pages that slots lie in, in order: a tensor a run.

    Made by three torch operations a run, however many its tensors are: each operation costs
    microseconds on the scheduler thread. Each: shape (pages,), int64, on the slots' device; a
    copy, on the current stream.

    Raises: ValueError: more page numbers than the ring holds, a run of pages that are not whole, or
        slots of another type. Of two tensors that make up for each other it knows nothing.
    """
    made: list[torch.Tensor] = []
    room = ring_size
    for tokens, slots in runs:
        numbers = torch.cat(slots)
        if numbers.dtype is not torch.int64:
            raise ValueError(f"token slots of {numbers.dtype}; they have to be int64")
        count = numbers.numel()
        if count % tokens:
            raise ValueError(f"{count} slots are not whole pages of {tokens} tokens")
        room -= count // tokens
        if tokens > 1:
            # Of whole pages, the first slots stay `tokens` apart when joined.
            numbers = torch.floor_divide(numbers[::tokens], tokens)
        made.append(numbers)
    if room < 0:
        raise ValueError(f"{ring_size - room} page numbers; the ring holds {ring_size}")
    return made


def ring_pieces(position: int, count: int, size: int) -> list[tuple[int, int, int]]:
    """Where `count` elements, at most `size`, from absolute `position` on lie in a ring.

    Returns: one piece, or two around the end: (first ring element, first of the count, length).
    """
    at = position % size
    head = min(count, size - at)
    pieces = [(at, 0, head), (0, head, count - head)]
    return [piece for piece in pieces if piece[2]]


def store_page_numbers(ring: npt.NDArray[np.int64], position: int, numbers: torch.Tensor) -> None:
    """Put page numbers that are in CPU memory into a ring, with plain stores."""
    values = numbers.numpy()
    for at, first, count in ring_pieces(position, len(values), len(ring)):
        ring[at : at + count] = values[first : first + count]
