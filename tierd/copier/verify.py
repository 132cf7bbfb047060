"""Checksums of pages in host memory: written to a slot's header when its page has arrived, compared
before its page is believed again.

They find what changes in memory between a backup and a restore. What goes wrong on the link is not
seen: there is nothing on the GPU to compare with, because the copier launches no kernel.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.copier.operations import U64
from tierd.wire import layout
from tierd.wire.geometry import HostLayout

THREADS = 4
"""zlib lets go of the GIL; one thread makes one to three GB/s."""
TASK_BYTES = 16 << 20
"""What a thread is given at a time, roughly."""
SAMPLE = 16
"""`sample` takes every page whose key's first byte is a multiple of this: always the same ones, in
all shards."""


@dataclass(frozen=True)
class Places:
    """Pages of one pool in host memory. `chunks`: address of each page's chunk; `slots`: its slot
    there. Shapes: (n,). `part`: which part of the job they are."""

    part: int
    host: HostLayout
    chunks: U64
    slots: U64


Bad = list[tuple[int, int]]
"""Pages whose bytes have changed: (part, position in it)."""


class Verifier:
    """Computes checksums on threads of its own.

    Args:
        mode: "off", "sample" or "always" (`tierd serve --verify`).
    """

    def __init__(self, mode: str) -> None:
        self._every = {"off": 0, "sample": SAMPLE, "always": 1}[mode]
        self._threads = ThreadPoolExecutor(THREADS, "verify") if self._every else None

    def seal(self, places: Sequence[Places]) -> list[Future[Bad]]:
        """Write the checksums of pages that have just arrived; nobody reads or writes them yet."""
        return self._spread(places, self._seal)

    def check(self, places: Sequence[Places]) -> list[Future[Bad]]:
        """Compare pages with their checksums. A page that has none passes."""
        return self._spread(places, self._check)

    def check_chunk(self, address: int, host: HostLayout) -> list[int]:
        """The committed slots of a chunk whose bytes have changed. On the caller's thread."""
        if not self._every:
            return []
        headers = _headers(address, host)
        committed = np.flatnonzero(headers["state"] == layout.COMMITTED).astype(np.uint64)
        chunks = np.full(len(committed), address, np.uint64)
        places = Places(0, host, chunks, committed)
        return [int(committed[n]) for _, n in self._check(places, range(len(committed)))]

    def close(self) -> None:
        """End the threads. No check may be under way."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _spread(self, places: Sequence[Places], work: Any) -> list[Future[Bad]]:
        if self._threads is None:
            return []
        futures = []
        for each in places:
            step = max(1, TASK_BYTES // each.host.slot_bytes)
            for start in range(0, len(each.slots), step):
                positions = range(start, min(start + step, len(each.slots)))
                futures.append(self._threads.submit(work, each, positions))
        return futures

    def _seal(self, places: Places, positions: range) -> Bad:
        for _, header, page in self._chosen(places, positions):
            header["checksum"] = checksum(page)
            header["flags"] |= layout.HAS_CHECKSUM
        return []

    def _check(self, places: Places, positions: range) -> Bad:
        return [
            (places.part, position)
            for position, header, page in self._chosen(places, positions)
            if header["flags"] & layout.HAS_CHECKSUM and header["checksum"] != checksum(page)
        ]

    def _chosen(
        self, places: Places, positions: range
    ) -> Iterator[tuple[int, np.void, list[npt.NDArray[np.uint8]]]]:
        """Those of some pages that are checked: position, header (a view), rows."""
        groups = row_groups(places.host)
        for position in positions:
            address, slot = int(places.chunks[position]), int(places.slots[position])
            header = _headers(address, places.host)[slot]
            if self._every and bytes(header["key"])[0] % self._every == 0:
                yield position, header, page_rows(address, slot, places.host, groups)


def checksum(page: Sequence[npt.NDArray[np.uint8]]) -> int:
    """CRC-32 of a page's rows in their order."""
    value = 0
    for rows in page:
        # One long buffer: zlib keeps the GIL for short ones.
        value = zlib.crc32(np.ascontiguousarray(rows).data, value)
    return value


def row_groups(host: HostLayout) -> list[tuple[int, int, int]]:
    """Equal rows of a page, one after the other: (rows, row bytes, where in a slot they begin)."""
    groups, at = [], 0
    for row_bytes, alike in groupby(host.rows):
        count = len(list(alike))
        groups.append((count, row_bytes, at))
        at += count * row_bytes
    return groups


def page_rows(
    address: int, slot: int, host: HostLayout, groups: Sequence[tuple[int, int, int]]
) -> list[npt.NDArray[np.uint8]]:
    """A page's bytes, as a view of each of its `row_groups`, of shape (rows, row bytes).

    Args: `address`: where the slot's chunk is mapped.
    """
    wide = host.block_slots
    block, position = divmod(slot, wide)
    start = address + host.data_offset + block * wide * host.slot_bytes
    views = []
    for count, row_bytes, offset in groups:
        stride = wide * row_bytes
        size = (count - 1) * stride + row_bytes
        memory = _bytes(start + wide * offset + position * row_bytes, size)
        views.append(np.lib.stride_tricks.as_strided(memory, (count, row_bytes), (stride, 1)))
    return views


def _headers(address: int, host: HostLayout) -> npt.NDArray[np.void]:
    end = layout.PAGE + host.chunk_slots * layout.SLOT_HEADER.itemsize
    return layout.slot_headers(_bytes(address, end), host.chunk_slots)


def _bytes(address: int, size: int) -> npt.NDArray[np.uint8]:
    memory = memoryview((ctypes.c_char * size).from_address(address))
    view: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return view
