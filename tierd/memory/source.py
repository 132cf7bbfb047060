"""Where the memory of chunks comes from: one place that makes it and takes it back."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple, Protocol

_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4
_MFD_HUGETLB, _MFD_HUGE_SHIFT = 0x4, 26
"""linux/memfd.h: the page size's base-2 logarithm stands in the flags from bit 26 on."""
_NOT_TO_BE_HAD = (errno.ENOMEM, errno.EINVAL, errno.ENODEV, errno.EPERM, errno.ENOSYS)
"""What the kernel says of huge pages: none left, none of that size, none at all, not for you."""


class ChunkFile(NamedTuple):
    """A file of shared memory, all zeros, and the size of its pages. Its owner closes it."""

    fd: int
    page_bytes: int


class ChunkSource(Protocol):
    """Makes the files that chunks lie in."""

    def create(self, number: int, size: int) -> ChunkFile:
        """The file of a new chunk, of exactly that size.

        Args:
            number: The chunk's, unique in this daemon's life.

        Raises: OSError: no memory or no descriptor left.
        """

    def discard(self, number: int) -> None:
        """A chunk is given back for good: nothing maps its file any more, and it is closed."""


class AnonymousMemory:
    """A `ChunkSource`: files without a name, gone with the last process that has them.

    Args:
        huge: By size of huge pages in bytes, how much memory to take of them at most; tried in
            this order, before ordinary pages. A file is in pages of one size.
    """

    def __init__(self, huge: Mapping[int, int] | None = None) -> None:
        self._left = dict(huge or {})
        self._taken: dict[int, tuple[int, int]] = {}

    def create(self, number: int, size: int) -> ChunkFile:
        name = f"tierd-chunk-{number}"
        for page_bytes, left in self._left.items():
            if size % page_bytes or left < size:
                continue
            fd = _huge_file(name, size, page_bytes)
            if fd is not None:
                self._left[page_bytes] -= size
                self._taken[number] = page_bytes, size
                return ChunkFile(fd, page_bytes)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        _seal(fd)
        return ChunkFile(fd, mmap.PAGESIZE)

    def discard(self, number: int) -> None:
        if number in self._taken:
            page_bytes, size = self._taken.pop(number)
            self._left[page_bytes] += size


def _huge_file(name: str, size: int, page_bytes: int) -> int | None:
    """A file in huge pages that are set aside for it; None where there are not enough."""
    flags = _MFD_HUGETLB | (page_bytes.bit_length() - 1) << _MFD_HUGE_SHIFT
    fd = -1
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        os.ftruncate(fd, size)
        # A mapping reserves the pages for as long as the file lives; without one, whoever touches
        # a page that is not there is killed.
        mmap.mmap(fd, size).close()
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno in _NOT_TO_BE_HAD:
            return None
        raise
    _seal(fd)
    return fd


def _seal(fd: int) -> None:
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
