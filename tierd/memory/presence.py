"""Owns the presence table's memory: written here alone, mapped read-only by every rank."""

from __future__ import annotations

import fcntl
import mmap
import os

from tierd.wire import presence
from tierd.wire.presence import PresenceTable, Salt

PAGE_BYTES = 64 << 10
"""The first table is sized for pages of this size, as most models' tokens have."""
MAX_BUCKETS = 1 << 20
"""Eight million fingerprints in 72 MiB, of which what is not used is not there."""
_F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h since 5.1: mappings made from now on are read-only."""


class SharedPresence:
    """A presence table in shared memory, replaced by a larger one when smaller pages come.

    Args:
        memory_bytes: What the pages of all pools may take.

    Attributes:
        table: The table as it is now.
        fd: Its memory, to be handed over.

    Raises: OSError: no memory or no descriptor left.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._buckets = _buckets(memory_bytes // PAGE_BYTES)
        self.fd, self._memory, self.table = _make(self._buckets)

    def outgrown_by(self, page_bytes: int, keys: int) -> bool:
        """Make a table for more pages, if pages of this size need one.

        Args:
            page_bytes: Host memory of a page in all its pools.
            keys: How many of these pools have an entry for it.

        Returns: whether there is another table: an empty one, to which the caller adds all pages.
            Where none can be made, the one there is serves on: more lookups have to ask.
        """
        buckets = _buckets(keys * self._memory_bytes // page_bytes)
        if buckets <= self._buckets:
            return False
        try:
            made = _make(buckets)
        except OSError:
            return False
        self.table.supersede()
        self.close()
        self.fd, self._memory, self.table = made
        self._buckets = buckets
        return True

    def add(self, keys: bytes, salt: Salt) -> None:
        """As `PresenceTable.add`."""
        self.table.add(keys, salt)

    def remove(self, keys: bytes, salt: Salt) -> None:
        """As `PresenceTable.remove`."""
        self.table.remove(keys, salt)

    def close(self) -> None:
        """Idempotent."""
        if self.fd < 0:
            return
        self.table.release()
        self._memory.close()
        os.close(self.fd)
        self.fd = -1


def _make(buckets: int) -> tuple[int, mmap.mmap, PresenceTable]:
    """A sealed file, its mapping and the empty table in it.

    Raises: OSError: no memory or no descriptor left; nothing is left open.
    """
    size = presence.nbytes(buckets)
    fd = os.memfd_create("tierd-presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
        table = PresenceTable.format(memory, buckets)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory, table


def _buckets(pages: int) -> int:
    return min(presence.buckets_for(pages), MAX_BUCKETS)
