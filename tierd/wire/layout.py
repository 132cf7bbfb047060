"""The layout of shared memory: a client's segment, and the headers of a host chunk.

Both are views over a mapped buffer; nothing here maps one. All words are little-endian and
naturally aligned, so that a store is seen whole by the other processes (x86-64, AArch64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.wire.errors import ProtocolError

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

PAGE = 4096
SEGMENT_MAGIC = 0x6765735F64726574  # "terd_seg"
CHUNK_MAGIC = 0x6B6E75685F647274

RESTORE_ENTRIES = 8
"""Restores that a rank can have between start and verdict."""
TICKETS = 4096
"""Pairs of ready words. A pair is reused 4,096 flushes and restores later."""

MAX_RING = 1 << 26
"""Elements of a ring at most."""

PENDING, LANDED, FAILED = 0, 1, 2


@dataclass(frozen=True)
class SegmentSpec:
    """Sizes of a client's segment. `max_layers` is at most 4,096."""

    backup_ring: int = 1 << 20
    restore_ring: int = 1 << 20
    max_layers: int = 256

    @property
    def nbytes(self) -> int:
        """Size of the segment, a multiple of PAGE."""
        return _offsets(self)["end"]


def _offsets(spec: SegmentSpec) -> dict[str, int]:
    offsets: dict[str, int] = {}
    at = PAGE

    def place(name: str, nbytes: int) -> None:
        nonlocal at
        offsets[name] = at
        at += -(-nbytes // PAGE) * PAGE

    place("ready", TICKETS * 8)
    place("layers", RESTORE_ENTRIES * spec.max_layers * 4)
    place("backup_ring", spec.backup_ring * 8)
    place("restore_ring", spec.restore_ring * 8)
    offsets["end"] = at
    return offsets


class Segment:
    """The words and rings that a rank shares with control and its copier.

    | field | type | written by | read by |
    |---|---|---|---|
    | `fence` | uint32 | client | copier: what it wanted before a bump is not wanted any more |
    | `consumed` | uint64 (2,) | copier | client: ring positions free again (backup, restore) |
    | `verdict` | uint64 (entries,) | copier or control | client: `generation << 2 \\| state` |
    | `awaited` | uint32 (entries,) | client | whoever releases waiting streams: the generation |
    | `ready` | uint32 (tickets, 2) | streams of the client | copier: token slots, KV written |
    | `layers` | uint32 (entries, max_layers) | copier's stream | streams of the client |
    | `backup_ring`, `restore_ring` | int64 (n,) | client | copier: token slots |

    Ring positions count up for ever; position p is element p % n. Ticket t's words hold t once
    ready, in element t % TICKETS. A layer word holds its restore's generation once the layer may
    be read.

    Raises: ProtocolError: the buffer is smaller than such a segment.
    """

    def __init__(self, buffer: Any, spec: SegmentSpec) -> None:
        memory = np.frombuffer(buffer, np.uint8)
        if memory.nbytes < spec.nbytes:
            raise ProtocolError(
                f"segment of {memory.nbytes} bytes; its own header needs {spec.nbytes}"
            )
        at = _offsets(spec)
        self.spec = spec
        self.offsets = at
        self._head: U64 = memory[:64].view(np.uint64)
        self.fence: U32 = memory[128:132].view(np.uint32)
        self.consumed: U64 = memory[192:208].view(np.uint64)
        self.verdict: U64 = memory[256 : 256 + RESTORE_ENTRIES * 8].view(np.uint64)
        self.awaited: U32 = memory[512 : 512 + RESTORE_ENTRIES * 4].view(np.uint32)
        self.ready: U32 = (
            memory[at["ready"] : at["ready"] + TICKETS * 8].view(np.uint32).reshape(TICKETS, 2)
        )
        layers = RESTORE_ENTRIES * spec.max_layers * 4
        self.layers: U32 = (
            memory[at["layers"] : at["layers"] + layers]
            .view(np.uint32)
            .reshape(RESTORE_ENTRIES, spec.max_layers)
        )
        self.backup_ring: I64 = memory[
            at["backup_ring"] : at["backup_ring"] + spec.backup_ring * 8
        ].view(np.int64)
        self.restore_ring: I64 = memory[
            at["restore_ring"] : at["restore_ring"] + spec.restore_ring * 8
        ].view(np.int64)

    def format(self) -> None:
        """Write the header of a fresh (zeroed) segment."""
        spec = self.spec
        self._head[1:4] = (spec.backup_ring, spec.restore_ring, spec.max_layers)
        self._head[0] = SEGMENT_MAGIC

    def ready_offset(self, ticket: int, word: int) -> int:
        """Byte offset in the segment of a ready word (0: token slots, 1: KV)."""
        return self.offsets["ready"] + (ticket % TICKETS) * 8 + word * 4

    def layer_offset(self, entry: int, layer: int) -> int:
        """Byte offset in the segment of a layer word."""
        return self.offsets["layers"] + (entry * self.spec.max_layers + layer) * 4

    def release(self, entry: int) -> None:
        """Let every stream that waits on an entry's layers go on, with the value it awaits."""
        self.layers[entry] = self.awaited[entry]

    def set_verdict(self, entry: int, generation: int, landed: bool) -> None:
        """Say how a restore has ended. Nothing of it may be on the wire any more."""
        # int(): a generation that comes out of the segment is a uint32, and would lose its top.
        self.verdict[entry] = int(generation) << 2 | (LANDED if landed else FAILED)

    def get_verdict(self, entry: int, generation: int) -> int:
        """PENDING, LANDED or FAILED."""
        word = int(self.verdict[entry])
        return word & 3 if word >> 2 == generation else PENDING


def read_segment_spec(buffer: Any) -> SegmentSpec:
    """The sizes that a segment claims, checked before anything is built on them.

    Raises: ProtocolError: not a segment, or larger than the memory behind it.
    """
    memory = np.frombuffer(buffer, np.uint8)
    if memory.nbytes < PAGE:
        raise ProtocolError("segment is shorter than its header")
    magic, backup, restore, layers = (int(x) for x in memory[:32].view(np.uint64))
    if magic != SEGMENT_MAGIC:
        raise ProtocolError("the first descriptor is not a tierd segment")
    if not (1 <= backup <= MAX_RING and 1 <= restore <= MAX_RING and 1 <= layers <= 4096):
        raise ProtocolError(f"segment sizes out of range: {backup}, {restore}, {layers}")
    spec = SegmentSpec(backup, restore, layers)
    if spec.nbytes > memory.nbytes:
        raise ProtocolError(f"segment of {memory.nbytes} bytes claims {spec.nbytes}")
    return spec


# --- host chunks ------------------------------------------------------------------------------

FREE, WRITING, COMMITTED = 0, 1, 2

SLOT_HEADER = np.dtype(
    [
        ("state", "<u4"),
        ("generation", "<u4"),
        ("key", "V32"),
        ("parent", "V32"),
        ("flags", "<u4"),
        ("checksum", "<u4"),
        ("reserved", "V48"),
    ]
)
"""One slot's record: 128 bytes. The copier writes `checksum` and its flag, control the rest.

`generation` counts the pages that the slot has had, the same in every shard.
"""
PARENT_KNOWN, HAS_PARENT, HAS_CHECKSUM = 1, 2, 4
"""`flags` of a slot's record."""

CHUNK_VERSION = 1
"""Of the headers and of where the slots lie. Chunks of another version are not taken over."""

CHUNK_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u4"),
        ("shard", "<u4"),
        ("world_size", "<u4"),
        ("slots", "<u4"),
        ("ordinal", "<u8"),
        ("block_slots", "<u8"),
        ("slot_bytes", "<u8"),
        ("data_offset", "<u8"),
        ("namespace", "V32"),
        ("pool", "S1024"),
    ]
)
"""What a chunk holds, at its start: one shard of one pool of one namespace."""


def chunk_data_offset(slots: int) -> int:
    """Where the blocks of a chunk of so many slots begin: after its headers, page-aligned."""
    end = PAGE + slots * SLOT_HEADER.itemsize
    return -(-end // PAGE) * PAGE


def slot_headers(buffer: Any, slots: int) -> npt.NDArray[np.void]:
    """A view of a chunk's slot headers. Shape: (slots,), dtype SLOT_HEADER."""
    return np.frombuffer(buffer, SLOT_HEADER, count=slots, offset=PAGE)


def chunk_header(buffer: Any) -> npt.NDArray[np.void]:
    """A view of a chunk's own header. Shape: (1,), dtype CHUNK_HEADER."""
    return np.frombuffer(buffer, CHUNK_HEADER, count=1)
