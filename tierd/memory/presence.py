"""Owns the presence table's memory: written here alone, mapped read-only by every rank."""

from __future__ import annotations

import fcntl
import mmap
import os

from tierd.wire import presence
from tierd.wire.presence import PresenceTable

PAGE_BYTES = 64 << 10
"""The table is sized for pages of at least this size; smaller ones spill, which costs questions."""
MAX_BUCKETS = 1 << 20
_F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h since 5.1: mappings made from now on are read-only."""


class SharedPresence:
    """A presence table in shared memory.

    Args:
        memory_bytes: What the pages of all pools may take.

    Raises: OSError: no memory or no descriptor left.
    """

    def __init__(self, memory_bytes: int) -> None:
        buckets = min(presence.buckets_for(memory_bytes // PAGE_BYTES), MAX_BUCKETS)
        size = presence.nbytes(buckets)
        self.fd = os.memfd_create("tierd-presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)
        self.table = PresenceTable.format(self._memory, buckets)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def close(self) -> None:
        """Idempotent."""
        if self.fd < 0:
            return
        self.table.release()
        self._memory.close()
        os.close(self.fd)
        self.fd = -1
