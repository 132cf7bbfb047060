"""A chunk that is withdrawn while somebody uses its pages: what was granted is kept, and nobody
else finds them any more."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machines import LARGE, chain_of

from tierd.control.keys import MISSING, Keys
from tierd.control.leases import Leases
from tierd.control.pages import PagePool
from tierd.eviction.policy import Slots
from tierd.wire.layout import COMMITTED, FREE
from tierd.wire.limits import KEY_BYTES

LEASE_S = 30.0


class Records:
    """The headers of a pool's slots."""

    def __init__(self, slots: int) -> None:
        self.states = np.full(slots, FREE)

    def writing(self, slots: Slots, keys: bytes, parents: bytes, flags: object) -> None: ...

    def committed(self, slots: Slots) -> None:
        self.states[slots] = COMMITTED

    def freed(self, slots: Slots) -> None:
        self.states[slots] = FREE


def pool_of(chunks: int, window: int = 0) -> tuple[PagePool, Records]:
    records = Records(chunks * LARGE.chunk_slots)
    pool = PagePool("kv", 16, LARGE, 1, records, window)
    for ordinal in range(chunks):
        pool.chunks.add(ordinal)
    return pool, records


def test_whoever_has_leased_a_page_may_load_it_and_nobody_else_finds_it() -> None:
    pool, records = pool_of(2)
    keys = chain_of(pool, 1, 3)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    assert max(leases.lookup("r", keys, [pool], now=0.0)) == 3
    slots = pool.find_all(keys)
    assert pool.chunks.withdraw(0) == 3
    assert not pool.slots.is_vacant(0)
    assert (pool.pages, pool.held, len(pool.prefix(keys))) == (0, 0, 0)
    assert leases.lookup("s", keys, [pool], now=1.0) == []
    assert leases.pin(1, [("s", [(pool, keys)])], b"s", {0}, deadline=9.0).plan is None
    assert (records.states[slots] == COMMITTED).all(), "they outlive the daemon, as before"
    plan = leases.pin(2, [("r", [(pool, keys)])], b"r", {0}, deadline=9.0).plan
    assert plan is not None
    assert plan[0][0][1].tolist() == slots.tolist()
    again = chain_of(pool, 1, 3)
    assert not np.isin(pool.find_all(again), slots).any(), "another copy lies elsewhere"
    leases.retire(2, 0)
    assert pool.slots.is_vacant(0)
    assert (records.states[slots] == FREE).all()
    assert pool.capacity == LARGE.chunk_slots
    assert (pool.pages, pool.held) == (3, 0)


def test_a_leased_window_may_be_loaded_though_its_pages_are_withdrawn() -> None:
    kv, _ = pool_of(2)
    swa, _ = pool_of(2, window=2)
    keys = chain_of(kv, 1, 5)
    swa.commit(swa.reserve(keys, None, np.full(5, MISSING), 1))
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    assert leases.lookup("r", keys, [kv, swa], now=0.0)[-1] == 5
    slots = swa.find_all(keys[3:5])
    for ordinal in (0, 1):
        swa.chunks.withdraw(ordinal)
    pins = leases.pin(1, [("r", [(kv, keys), (swa, keys[3:5])])], b"", {0}, deadline=9.0)
    assert pins.plan is not None
    assert pins.plan[0][1][1].tolist() == slots.tolist()
    leases.retire(1, 0)
    assert swa.slots.is_vacant(0)
    assert swa.slots.is_vacant(1)


def test_pages_of_a_window_that_no_lease_holds_are_not_loaded_with_it() -> None:
    kv, _ = pool_of(3)
    swa, _ = pool_of(3, window=1)
    keys = chain_of(kv, 1, 9)
    swa.commit(swa.reserve(keys, None, np.full(9, MISSING), 1))
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    lengths = leases.lookup("r", keys, [kv, swa], now=0.0)
    assert lengths == [6, 7, 8, 9]
    swa.chunks.withdraw(0)
    want = [("r", [(kv, keys[:3]), (swa, keys[2:3])])]
    assert leases.pin(1, want, b"", {0}, deadline=9.0).plan is None


def test_a_lease_on_withdrawn_pages_is_answered_as_before_and_lasts_no_longer() -> None:
    pool, _ = pool_of(2)
    keys = chain_of(pool, 1, 3)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    left: list[float] = []

    def look(now: float) -> list[int]:
        return leases.lookup("r", keys, [pool], now=now, answer=lambda _, s: left.append(s))

    first = look(0.0)
    assert look(10.0) == first
    pool.chunks.withdraw(0)
    assert look(25.0) == first, "the same for every rank that asks the same"
    assert left == [LEASE_S, LEASE_S, 15.0]
    leases.expire(40.0)
    assert pool.slots.is_vacant(0)
    assert look(40.0) == []


def test_a_withdrawn_page_that_turns_out_corrupt_is_not_loaded_again() -> None:
    pool, records = pool_of(1)
    keys = chain_of(pool, 1, 3)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    for rid in ("r", "s"):
        leases.lookup(rid, keys, [pool], now=0.0)
    slots = pool.find_all(keys)
    pool.chunks.withdraw(0)
    assert pool.spoil(slots[1:2]) == 1
    assert pool.spoil(slots[1:2]) == 0
    assert records.states[slots].tolist() == [COMMITTED, FREE, COMMITTED]
    assert leases.pin(1, [("r", [(pool, keys)])], b"", {0}, deadline=9.0).plan is None
    leases.cancel("s")
    assert pool.slots.is_vacant(0)


def test_what_is_being_written_goes_once_it_has_come() -> None:
    pool, _ = pool_of(2)
    keys = Keys(b"".join(bytes([n + 1]) * KEY_BYTES for n in range(2)))
    slots = pool.reserve(keys, b"", np.full(2, MISSING), 1)
    pool.chunks.withdraw(0)
    shown: list[Keys] = []
    pool.on_drop = lambda gone, visible: shown.append(gone) if visible else None
    pool.commit(slots)
    assert sum(map(len, shown)) == 2, "whoever was shown them is told"
    assert pool.slots.is_vacant(0)
    assert (pool.pages, pool.free_slots, pool.capacity) == (0, 3, 3)


def test_what_follows_waits_for_its_beginning_to_come_back() -> None:
    pool, _ = pool_of(3)
    keys = chain_of(pool, 1, 6)
    pool.chunks.withdraw(0)
    assert pool.pages == 3
    assert len(pool.prefix(keys)) == 0
    known = pool.find_all(keys)
    pool.commit(pool.reserve(keys, b"", known, 2)[known == MISSING])
    assert len(pool.prefix(keys)) == 6
    pool.chunks.remove(0)
    assert pool.evict(6) == 6
    assert pool.free_slots == pool.capacity == 2 * LARGE.chunk_slots


NAMES = st.integers(0, 3)


class Withdrawals(RuleBasedStateMachine):
    """Chains come, are leased, loaded and evicted, while chunks are withdrawn and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.records = pool_of(4)
        self.leases = Leases(lease_s=LEASE_S, max_share=0.8)
        self.now = 0.0
        self.tick = 1
        self.leaving: set[int] = set()
        self.running: dict[int, list[tuple[bytes, int]]] = {}
        self.bytes: dict[int, bytes] = {}
        """By slot, the key of the page whose bytes are there."""
        self.writing: list[Slots] = []

    def keys(self, name: int, pages: int) -> Keys:
        return Keys(b"".join(bytes([name + 1, n]) + bytes(KEY_BYTES - 2) for n in range(pages)))

    @rule(name=NAMES, pages=st.integers(1, 4), at_once=st.booleans())
    def a_chain_comes(self, name: int, pages: int, at_once: bool) -> None:
        keys = self.keys(name, pages)
        known = self.pool.find_all(keys)
        lack = int(np.count_nonzero(known == MISSING)) - self.pool.free_slots
        if lack > 0:
            self.pool.evict(lack)
            known = self.pool.find_all(keys)
        if not self.pool.free_slots >= int(np.count_nonzero(known == MISSING)) > 0:
            return
        self.tick += 1
        fresh = self.pool.reserve(keys, b"", known, self.tick)[known == MISSING]
        names = [k for k, slot in zip(keys.split(), known.tolist(), strict=True) if slot < 0]
        for slot, written in zip(fresh.tolist(), names, strict=True):
            loading = {s for pages in self.running.values() for _, s in pages}
            assert slot not in loading, "somebody reads there"
            assert slot // LARGE.chunk_slots not in self.leaving
            self.bytes[slot] = written
        if at_once:
            self.pool.commit(fresh)
        else:
            self.writing.append(fresh)

    @rule(ok=st.booleans())
    def what_is_written_comes_or_fails(self, ok: bool) -> None:
        if self.writing:
            (self.pool.commit if ok else self.pool.abort)(self.writing.pop(0))

    @rule(rid=st.sampled_from("rst"), name=NAMES, pages=st.integers(1, 4))
    def looks(self, rid: str, name: int, pages: int) -> None:
        self.leases.lookup(rid, self.keys(name, pages), [self.pool], now=self.now)

    @rule(rid=st.sampled_from("rst"), name=NAMES, pages=st.integers(1, 4))
    def loads(self, rid: str, name: int, pages: int) -> None:
        number = self.tick = self.tick + 1
        keys = self.keys(name, pages)
        lease = self.leases._leases.get(rid)
        granted = lease is not None and lease.keys == keys and lease.lengths[-1] == pages
        pins = self.leases.pin(number, [(rid, [(self.pool, keys)])], b"", {0}, deadline=9.0)
        self.leases.note_load(number, number)
        assert pins.plan is not None or not granted, "what was granted can be loaded"
        if pins.plan is None:
            self.leases.retire(number, 0)
            return
        ((_, slots),) = pins.plan[0]
        self.running[number] = list(zip(keys.split(), slots.tolist(), strict=True))

    @rule()
    def a_load_ends(self) -> None:
        if self.running:
            number = min(self.running)
            del self.running[number]
            self.leases.retire(number, 0)

    @rule(seconds=st.sampled_from([5.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)

    @rule(ordinal=st.integers(0, 3))
    def a_chunk_is_withdrawn(self, ordinal: int) -> None:
        if ordinal not in self.leaving:
            self.pool.chunks.withdraw(ordinal)
            self.leaving.add(ordinal)

    @rule()
    def a_chunk_leaves_and_another_comes(self) -> None:
        for ordinal in [n for n in self.leaving if self.pool.slots.is_vacant(n)]:
            self.pool.chunks.remove(ordinal)
            self.pool.chunks.add(ordinal)
            self.leaving.discard(ordinal)

    @invariant()
    def what_is_loaded_is_what_was_asked_for(self) -> None:
        for pages in self.running.values():
            for wanted, slot in pages:
                assert self.bytes[slot] == wanted

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        used = self.pool.pages + self.pool.slots.withdrawn + sum(map(len, self.writing))
        assert self.pool.capacity == self.pool.free_slots + used

    def teardown(self) -> None:
        for number in list(self.running):
            self.leases.retire(number, 0)
        self.leases.end_all()
        while self.writing:
            self.pool.abort(self.writing.pop())
        assert (self.pool.held, self.pool.slots.withdrawn) == (0, 0)
        assert all(self.pool.slots.is_vacant(ordinal) for ordinal in self.leaving)
        self.pool.evict(self.pool.pages)
        assert self.pool.pages == 0, "nothing is in the way of eviction"
        left = (4 - len(self.leaving)) * LARGE.chunk_slots
        assert self.pool.free_slots == self.pool.capacity == left
        assert (self.records.states == FREE).all()


TestWithdrawals = Withdrawals.TestCase
TestWithdrawals.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
