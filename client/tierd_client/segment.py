"""Creates the shared memory of a rank: a memfd whose size is sealed, mapped and formatted."""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass

from tierd.wire.layout import Segment, SegmentSpec


@dataclass
class SharedSegment:
    """A rank's segment: its descriptor (to send at registration), its mapping, its fields."""

    fd: int
    memory: mmap.mmap
    fields: Segment

    def close(self) -> None:
        """Close the descriptor. Idempotent.

        The mapping goes with the last reference to it and to its fields: unmapping earlier would
        turn a late read of a word into a crash of the engine.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def create_segment(spec: SegmentSpec) -> SharedSegment:
    """Create, seal, map and format a segment.

    The size is sealed because a segment that shrinks would kill whoever else has mapped it.

    Raises: OSError: no memory or no descriptor left.
    """
    fd = os.memfd_create("tierd-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, spec.nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        memory = mmap.mmap(fd, spec.nbytes)
        fields = Segment(memory, spec)
        fields.format()
    except BaseException:
        os.close(fd)
        raise
    return SharedSegment(fd, memory, fields)
