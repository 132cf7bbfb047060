"""Which file systems are memory, and the size of the pages that files on them are made of."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_TMPFS, _HUGETLBFS, _RAMFS = 0x01021994, 0x958458F6, 0x858458F6


def in_memory(fd: int) -> bool:
    """Does an open file or directory lie in memory, not on a disk?"""
    return _kind_and_block(fd)[0] in (_TMPFS, _HUGETLBFS, _RAMFS)


def page_bytes(fd: int) -> int:
    """The unit that files beside an open one are made of: huge pages on a hugetlbfs."""
    kind, block = _kind_and_block(fd)
    return block if kind == _HUGETLBFS else mmap.PAGESIZE


def huge_page_bytes(path: Path) -> int:
    """The page size of the hugetlbfs that a directory lies in, or would; 0 if it is none."""
    while not path.exists() and path != path.parent:
        path = path.parent
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        kind, block = _kind_and_block(fd)
    finally:
        os.close(fd)
    return block if kind == _HUGETLBFS else 0


def _kind_and_block(fd: int) -> tuple[int, int]:
    """Type and block size, as statfs(2) has them."""
    fields = (ctypes.c_long * 32)()
    if ctypes.CDLL(None).fstatfs(fd, fields):
        return 0, 0
    return fields[0], fields[1]
