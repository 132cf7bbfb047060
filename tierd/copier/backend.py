"""What differs between a GPU and the host stand-in: mapping memory, submitting copies, waiting.

A backend knows no sessions, jobs or messages. Copies of one direction run in the order of their
submission; the two directions are independent of each other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NewType, Protocol

from tierd.copier.plan import Batch, Direction
from tierd.memory import placement
from tierd.wire.errors import TierdError
from tierd.wire.messages import Allocation

Marker = NewType("Marker", int)
"""A point in one direction's order of work."""


class BackendError(TierdError):
    """One call failed; the device and everybody else's work are as they were."""


class DeviceLostError(TierdError):
    """The device's context cannot be used any more; only a new process gets another one."""


class SharedMemory:
    """A file's first `size` bytes, mapped shared and writable until `close`.

    Raises: BackendError: the file is shorter, or cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        actual = os.fstat(fd).st_size
        if actual < size:
            raise BackendError(f"a file of {actual} bytes was announced with {size}")
        try:
            self.memory = mmap.mmap(fd, size)
        except OSError as error:
            raise BackendError(f"cannot map {size} bytes of shared memory: {error}") from error
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        """Unmap, or let go: the memory stays until the last view of it is gone."""
        with suppress(BufferError):
            self.memory.close()


def map_chunk_file(stack: ExitStack, fd: int, size: int, *, touch: bool, node: int | None) -> int:
    """Map a host chunk; `stack` unmaps it. Returns its address.

    Args:
        touch: Every page of it must be there.
        node: The NUMA node that pages are to lie on which are not there yet; None: any.

    Raises: BackendError: the file is shorter, cannot be mapped, or there is no memory left.
    """
    actual = os.fstat(fd).st_size
    if actual < size:
        raise BackendError(f"a file of {actual} bytes was announced with {size}")
    try:
        address = placement.map_shared(fd, size)
        stack.callback(placement.unmap, address, size)
        if node is not None:
            placement.prefer_node(address, size, node)
        placement.prefer_huge(address, size)
        if touch:
            placement.populate(address, size)
    except OSError as error:
        raise BackendError(f"cannot map a chunk of {size >> 20} MiB: {error.strerror}") from error
    return address


@dataclass(frozen=True)
class Chunk:
    """A host chunk that copies may use. `resources` unwinds whatever mapped it."""

    address: int
    size: int
    resources: ExitStack

    def close(self) -> None:
        """Unpin and unmap it. No copy may be under way."""
        self.resources.close()


@dataclass(frozen=True)
class Attachment:
    """A rank's memory, mapped.

    `addresses`: where each allocation begins. `words`: where the segment begins for
    `write_words`. `resources` unwinds whatever mapped them.
    """

    addresses: tuple[int, ...]
    words: int
    resources: ExitStack

    def close(self) -> None:
        """Unmap it all. No copy may be under way."""
        self.resources.close()


class Backend(Protocol):
    """One device. Methods raise BackendError or DeviceLostError."""

    def detail(self) -> dict[str, Any]:
        """Facts about the device for `tierd status`."""

    def map_chunk(self, fd: int, size: int, touch: bool) -> Chunk:
        """Map a host chunk and make it fit for copies; its content stays. With `touch` every page
        of it is there afterwards. This, and the end of a chunk, may happen in any thread, unlike
        the rest."""

    def attach(
        self, allocations: Sequence[Allocation], fds: Sequence[int], segment: SharedMemory
    ) -> Attachment:
        """Map a rank's allocations (`fds`: of those without a handle, in order), and let
        `write_words` reach its segment."""

    def submit(self, direction: Direction, batch: Batch) -> None:
        """Enqueue copies. After an error some of them may still be under way: `record` and wait."""

    def write_words(self, attachment: Attachment, offsets: Sequence[int], value: int) -> None:
        """Store a uint32 at these byte offsets of the segment once all restores submitted so far
        have landed."""

    def record(self, direction: Direction) -> Marker:
        """Mark what has been submitted so far."""

    def retired(self, marker: Marker) -> bool:
        """Whether everything before the mark has left the wire. True forgets the marker."""

    def close(self) -> None:
        """Give the device back. Nothing may be mapped or under way any more."""


def split_fds(allocations: Sequence[Allocation], fds: Sequence[int]) -> list[int | None]:
    """Each allocation's descriptor, or None where it has a handle.

    Raises: BackendError: more or fewer descriptors than allocations without a handle.
    """
    wanted = sum(not allocation.handle for allocation in allocations)
    if wanted != len(fds):
        raise BackendError(f"{wanted} allocations without a handle, yet {len(fds)} descriptors")
    left = iter(fds)
    return [None if allocation.handle else next(left) for allocation in allocations]
