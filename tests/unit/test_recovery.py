"""An index that is rebuilt from slot headers knows what the one before it knew; and pages whose
bytes have changed are found no more."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.control.keys import MISSING, Keys
from tierd.control.pages import PagePool
from tierd.control.recovery import complete
from tierd.memory.chunks import ChunkRows, ChunkStore
from tierd.memory.source import AnonymousMemory
from tierd.wire import layout
from tierd.wire.geometry import HostLayout, host_layout

SMALL = 64 << 10
HOST: HostLayout = host_layout([6 << 10], chunk_bytes=SMALL)
SHARDS = 2


def chain(name: int, pages: int) -> Keys:
    """A chain of pages; chains of different names share nothing."""
    return Keys.of(hashlib.sha256(b"%d %d" % (name, n)).digest() for n in range(pages))


class Memory:
    """Chunks with headers, and a pool over them."""

    def __init__(self, rows: int = 3) -> None:
        self.store = ChunkStore(rows * SHARDS * SMALL, AnonymousMemory(), SMALL)
        self.rows = ChunkRows(HOST)
        for ordinal in range(rows):
            chunks = []
            for shard in range(SHARDS):
                chunk = self.store.create(SMALL, "host:0")
                assert chunk is not None
                chunk.lay_out(
                    HOST,
                    shard=shard,
                    shards=SHARDS,
                    ordinal=ordinal,
                    namespace=bytes(32),
                    pool="kv",
                )
                chunks.append(chunk)
            self.rows.rows[ordinal] = chunks
        self.pool = self.new_pool()

    def new_pool(self) -> PagePool:
        pool = PagePool("kv", 16, HOST, SHARDS, self.rows)
        for ordinal in self.rows.rows:
            pool.chunks.add(ordinal)
        return pool

    def back_up(self, keys: Keys, now: int, *, first: int = 0, commit: bool = True) -> None:
        mine = keys[first:]
        known = self.pool.find_all(mine)
        lack = int(np.count_nonzero(known == MISSING)) - self.pool.free_slots
        if lack > 0:
            self.pool.evict(lack)
            known = self.pool.find_all(mine)
        if np.count_nonzero(known == MISSING) > self.pool.free_slots:
            return
        slots = self.pool.reserve(mine, keys[first - 1] if first else b"", known, now)
        if commit:
            self.pool.commit(slots[known == MISSING])

    def shards(self, ordinal: int) -> list[np.ndarray[tuple[int], np.dtype[np.void]]]:
        return [chunk.headers.copy() for chunk in self.rows.rows[ordinal]]

    def recover(self) -> int:
        """What the next daemon does; returns how many pages it has."""
        self.pool = self.new_pool()
        slots, keys, parents, stale = [], [], [], []
        for ordinal in self.rows.rows:
            shards = self.shards(ordinal)
            whole = complete(shards)
            for within, header in enumerate(shards[0]):
                slot = ordinal * HOST.chunk_slots + within
                flags = int(header["flags"])
                if whole[within]:
                    slots.append(slot)
                    keys.append(bytes(header["key"]))
                    known = flags & layout.PARENT_KNOWN
                    before = bytes(header["parent"]) if flags & layout.HAS_PARENT else b""
                    parents.append(before if known else None)
                elif any(shard[within]["state"] != layout.FREE for shard in shards):
                    stale.append(slot)
        return self.pool.recover(
            np.array(slots, np.int64), keys, parents, np.array(stale, np.int64), 1
        )

    def found(self, chains: Sequence[Keys]) -> list[int]:
        return [len(self.pool.prefix(keys)) for keys in chains]

    def header_states(self) -> list[int]:
        counts = [0, 0, 0]
        for ordinal in self.rows.rows:
            for header in self.shards(ordinal)[0]:
                counts[int(header["state"])] += 1
        return counts

    def close(self) -> None:
        for row in self.rows.rows.values():
            for chunk in row:
                chunk.close()


steps = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 8), st.integers(0, 7), st.booleans()), max_size=25
)
"""Backups: (chain, pages, the first of them, whether it is over when the daemon dies)."""


@settings(max_examples=60, deadline=None)
@given(steps)
def test_what_could_be_hit_before_can_be_hit_after(
    backups: list[tuple[int, int, int, bool]],
) -> None:
    memory = Memory()
    for now, (name, pages, first, commit) in enumerate(backups, start=1):
        memory.back_up(chain(name, pages), now, first=min(first, pages - 1), commit=commit)
    chains = [chain(name, 8) for name in range(5)]
    before, pages = memory.found(chains), memory.pool.pages
    assert memory.recover() == pages
    assert memory.found(chains) == before
    assert memory.pool.free_slots == memory.pool.capacity - pages
    assert memory.header_states() == [memory.pool.free_slots, 0, pages]
    # It is an index like any other: all of it can be evicted, the deepest pages first.
    while memory.pool.pages:
        longest = memory.found(chains)
        assert memory.pool.evict(1) == 1
        assert sum(longest) - sum(memory.found(chains)) <= 1
    assert memory.header_states() == [memory.pool.capacity, 0, 0]
    memory.close()


def test_a_page_that_is_not_the_same_in_every_shard_is_dropped() -> None:
    for name in ("state", "generation", "key", "parent", "flags"):
        memory = Memory()
        memory.back_up(chain(1, 4), 1)
        slot = memory.pool.find(chain(1, 4)[2])
        assert slot is not None
        row, within = divmod(slot, HOST.chunk_slots)
        other = b"\1" * 32 if name in ("key", "parent") else 0
        memory.rows.rows[row][1].headers[name][within] = other
        assert memory.recover() == 3, name
        assert memory.found([chain(1, 4)]) == [2]
        assert memory.header_states()[layout.COMMITTED] == 3
        memory.close()


def test_a_checksum_in_one_shard_alone_is_no_difference() -> None:
    memory = Memory()
    memory.back_up(chain(1, 4), 1)
    memory.rows.rows[0][1].headers["flags"] |= layout.HAS_CHECKSUM
    assert memory.recover() == 4
    memory.close()


def test_a_page_that_has_changed_is_gone_at_once_and_its_followers_wait_for_it() -> None:
    memory = Memory()
    keys = chain(1, 6)
    memory.back_up(keys, 1)
    slots = memory.pool.prefix(keys)
    assert memory.pool.spoil(slots[2:3]) == 1
    assert memory.pool.spoil(slots[2:3]) == 0, "it has gone already"
    assert memory.found([keys]) == [2]
    memory.back_up(keys[:3], 2)
    assert memory.found([keys]) == [6]
    assert memory.pool.pages == 6
    memory.close()


def test_a_changed_page_s_slot_is_not_reused_while_it_is_loaded() -> None:
    memory = Memory(rows=1)
    keys = chain(1, HOST.chunk_slots)
    memory.back_up(keys, 1)
    slots = memory.pool.prefix(keys)
    memory.pool.hold(slots[2:4])
    assert memory.pool.spoil(slots[2:4]) == 2
    assert memory.pool.free_slots == 0
    assert memory.header_states()[layout.COMMITTED] == len(keys) - 2
    memory.pool.release(slots[2:4])
    assert memory.pool.free_slots == 2
    assert memory.pool.held == 0
    memory.back_up(chain(2, 2), 2)
    assert memory.found([chain(2, 2)]) == [2]
    memory.close()
