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
        self._buckets = 0
        self.fd = -1
        self._make(_buckets(memory_bytes // PAGE_BYTES))

    def outgrown_by(self, page_bytes: int, keys: int) -> bool:
        """Make a table for more pages, if pages of this size need one.

        Args:
            page_bytes: Host memory of a page in all its pools.
            keys: How many of these pools have an entry for it.

        Returns: whether there is another table: an empty one, to which the caller adds all pages.
        """
        buckets = _buckets(keys * self._memory_bytes // page_bytes)
        if buckets <= self._buckets:
            return False
        self.table.supersede()
        self.close()
        self._make(buckets)
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

    def _make(self, buckets: int) -> None:
        size = presence.nbytes(buckets)
        self.fd = os.memfd_create("tierd-presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)
        self.table = PresenceTable.format(self._memory, buckets)
        self._buckets = buckets
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)


def _buckets(pages: int) -> int:
    return min(presence.buckets_for(pages), MAX_BUCKETS)
