"""Checksums cover every byte of a page and no other, and find it changed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.copier.verify import SAMPLE, Places, Verifier
from tierd.wire import layout
from tierd.wire.geometry import HostLayout, host_layout

ROWS = st.lists(st.sampled_from([64, 96, 1000, 4096, 70_000]), min_size=1, max_size=6)


class Memory:
    """A chunk with pages in all its slots; keys differ in their first byte."""

    def __init__(self, rows: list[int]) -> None:
        self.host: HostLayout = host_layout(rows, chunk_bytes=256 << 10)
        self.bytes = np.random.default_rng(1).integers(0, 256, self.host.chunk_bytes, np.uint8)
        self.headers = layout.slot_headers(self.bytes, self.host.chunk_slots)
        for slot in range(self.host.chunk_slots):
            self.headers[slot] = (layout.COMMITTED, 1, bytes([slot % 256]) * 32, b"", 0, 0, b"")

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def places(self, slots: list[int]) -> list[Places]:
        chunks = np.full(len(slots), self.address, np.uint64)
        return [Places(0, self.host, chunks, np.array(slots, np.uint64))]

    def bytes_of(self, slot: int) -> set[int]:
        """Offsets of a slot's bytes in the chunk, by the formula of HostLayout."""
        host = self.host
        block, within = divmod(slot, host.block_slots)
        start = host.data_offset + block * host.block_slots * host.slot_bytes
        return {
            start + host.block_slots * offset + within * row + i
            for offset, row in zip(host.row_offsets, host.rows, strict=True)
            for i in range(row)
        }


def bad(verifier: Verifier, memory: Memory, slots: list[int]) -> list[int]:
    """Those of some slots whose pages fail."""
    found = [page for check in verifier.check(memory.places(slots)) for page in check.result()]
    return [slots[position] for _, position in found]


def seal(verifier: Verifier, memory: Memory, slots: list[int]) -> None:
    for future in verifier.seal(memory.places(slots)):
        assert future.result() == []


@settings(max_examples=40, deadline=None)
@given(ROWS, st.data())
def test_a_changed_byte_fails_its_own_page_and_no_other(
    rows: list[int], data: st.DataObject
) -> None:
    memory = Memory(rows)
    slots = list(range(memory.host.chunk_slots))[:200]
    verifier = Verifier("always")
    try:
        seal(verifier, memory, slots)
        assert bad(verifier, memory, slots) == []
        victim = data.draw(st.sampled_from(slots))
        where = data.draw(st.sampled_from(sorted(memory.bytes_of(victim))))
        memory.bytes[where] ^= data.draw(st.integers(1, 255))
        assert bad(verifier, memory, slots) == [victim]
        assert verifier.check_chunk(memory.address, memory.host) == [victim]
    finally:
        verifier.close()


def test_a_page_without_a_checksum_passes() -> None:
    memory, verifier = Memory([4096]), Verifier("always")
    seal(verifier, memory, [0])
    memory.bytes[memory.host.data_offset :] ^= 1
    assert bad(verifier, memory, [0, 1]) == [0]
    verifier.close()


def test_slots_without_a_page_are_not_looked_at() -> None:
    memory, verifier = Memory([4096]), Verifier("always")
    seal(verifier, memory, [0, 1])
    memory.headers["state"][0] = layout.FREE
    memory.bytes[memory.host.data_offset :] ^= 1
    assert verifier.check_chunk(memory.address, memory.host) == [1]
    verifier.close()


@pytest.mark.parametrize(
    ("mode", "chosen"),
    [("off", lambda key: False), ("sample", lambda key: key % SAMPLE == 0), ("always", bool)],
)
def test_the_mode_says_which_pages_get_one(mode: str, chosen: Callable[[int], bool]) -> None:
    memory, verifier = Memory([1000]), Verifier(mode)
    slots = list(range(1, memory.host.chunk_slots))
    seal(verifier, memory, slots)
    sealed = np.flatnonzero(memory.headers["flags"] & layout.HAS_CHECKSUM).tolist()
    assert sealed == [slot for slot in slots if chosen(slot)]
    memory.bytes[memory.host.data_offset :] ^= 1
    assert bad(verifier, memory, slots) == sealed
    verifier.close()


def test_what_control_wrote_in_a_header_stays() -> None:
    memory, verifier = Memory([64, 64]), Verifier("always")
    memory.headers["flags"] = layout.PARENT_KNOWN | layout.HAS_PARENT
    before = memory.headers[5].copy()
    seal(verifier, memory, [5])
    after = memory.headers[5]
    assert [after[name] for name in ("state", "generation", "key", "parent")] == [
        before[name] for name in ("state", "generation", "key", "parent")
    ]
    assert after["flags"] == before["flags"] | layout.HAS_CHECKSUM
    verifier.close()
