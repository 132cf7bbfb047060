"""Memory of which somebody uses a little everywhere: it is cleared for a pool that has none, what
was granted is kept, and nobody is kept waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machines import LARGE, Machine

from tierd.control.catalog import Catalog
from tierd.control.keys import MISSING, Keys
from tierd.control.leases import Leases
from tierd.control.pages import PagePool
from tierd.eviction.policy import Slots
from tierd.wire.geometry import host_layout
from tierd.wire.layout import COMMITTED, FREE
from tierd.wire.limits import KEY_BYTES

SMALL = host_layout([64 << 10])
LEASE_S = 30.0
CHUNKS = 8
LATER = 100.0
"""A pool that has something is not given more before it has lacked it for a while."""


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(chunks=CHUNKS)
    yield machine
    machine.close()


def key(catalog: Catalog, page: int) -> Keys:
    """Of a page that `Machine.fill` has made: each is a chain of its own."""
    return Keys(catalog.digest[:1] + page.to_bytes(KEY_BYTES - 1, "little"))


def full_tier(machine: Machine) -> tuple[Catalog, PagePool]:
    """A namespace whose pages fill all there is."""
    catalog, pool = machine.pool()
    machine.grow(catalog, CHUNKS)
    return catalog, pool


def hold_some_everywhere(catalog: Catalog, pool: PagePool) -> list[Slots]:
    """One page in every chunk."""
    found = (pool.prefix(key(catalog, n)) for n in range(0, CHUNKS * LARGE.chunk_slots, 3))
    held = [slots for slots in found if len(slots)]
    for slots in held:
        pool.hold(slots)
    return held


def chain_of(pool: PagePool, name: int, pages: int, now: int = 1) -> Keys:
    """A chain that is kept in a pool."""
    end = bytes(KEY_BYTES - 3)
    keys = Keys(b"".join(bytes([name]) + n.to_bytes(2, "little") + end for n in range(pages)))
    pool.commit(pool.reserve(keys, b"", np.full(pages, MISSING), now))
    return keys


# --- who waits, and for how long ------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True], ids=["renewed", "another request each time"])
def test_leases_that_follow_each_other_for_ever_keep_nobody_from_a_first_chunk(
    machine: Machine, fresh: bool
) -> None:
    catalog, pool = full_tier(machine)
    leases = Leases(lease_s=LEASE_S, max_share=0.5)
    everywhere = range(0, CHUNKS * LARGE.chunk_slots, LARGE.chunk_slots)

    def lease_all(now: float) -> None:
        for page in everywhere:
            rid = f"{page} {now if fresh else ''}"
            leases.lookup(rid, key(catalog, page), [pool], now=now)

    new, other = machine.pool()
    lease_all(0.0)
    refused_s = 0.0
    for now in range(1, int(3 * LEASE_S)):
        if now % (LEASE_S - 1) == 0:
            lease_all(float(now))
        leases.expire(float(now))
        machine.room.rebalance(float(now))
        machine.answer()
        assert pool.held > 0
        if machine.make_room(new):
            break
        refused_s = float(now)
    assert refused_s <= LEASE_S
    assert other.free_slots == LARGE.chunk_slots
    assert pool.pages == (CHUNKS - 1) * LARGE.chunk_slots, "the other chunks are as they were"


def test_pins_that_follow_each_other_for_ever_keep_nobody_from_a_first_chunk(
    machine: Machine,
) -> None:
    catalog, pool = full_tier(machine)
    leases = Leases(lease_s=LEASE_S, max_share=0.5)
    everywhere = range(0, CHUNKS * LARGE.chunk_slots, LARGE.chunk_slots)

    def load_all(step: int) -> None:
        for page in everywhere:
            want = [("no lease", [(pool, key(catalog, page))])]
            leases.pin(step * 1000 + page, want, b"", {0}, deadline=0.0, tick=step)

    new, _ = machine.pool()
    load_all(0)
    assert machine.make_room(new) is False
    for step in range(1, 4):
        load_all(step)
        for page in everywhere:
            leases.retire((step - 1) * 1000 + page, 0)
        assert pool.held > 0
        if made := machine.make_room(new):
            break
    assert made, "once the loads have retired that were there when it asked"
    assert step == 1


def test_backups_that_never_come_keep_nobody_from_a_first_chunk(machine: Machine) -> None:
    catalog, pool = full_tier(machine)
    pool.evict(pool.pages)
    writing = []
    for n in range(CHUNKS):
        slots = pool.reserve(key(catalog, 1000 + n), b"", np.array([MISSING]), 1)
        writing.append(slots)
        fill = LARGE.chunk_slots - 1
        machine.fill(catalog, fill)
    new, _ = machine.pool()
    assert machine.make_room(new) is False
    again = pool.find_all(key(catalog, 1000))
    pool.abort(writing[0])
    more = pool.free_slots
    assert more == 0, "no page comes to where one has failed"
    assert machine.make_room(new) is True
    assert again.tolist() == writing[0].tolist()


def test_a_pool_that_has_some_memory_waits_before_others_lose_what_is_in_use(
    machine: Machine,
) -> None:
    old, full = machine.pool()
    machine.grow(old, CHUNKS - 1)
    new, pool = machine.pool()
    machine.grow(new, 1)
    held = hold_some_everywhere(old, full)
    wanted = 2 * LARGE.chunk_slots
    assert machine.make_room(new, wanted) is False
    assert full.pages == full.capacity, "its own pages may be there in a moment"
    machine.room.rebalance(now=LATER)
    assert machine.make_room(new, wanted) is False
    assert full.pages == (CHUNKS - 2) * LARGE.chunk_slots
    for slots in held:
        full.release(slots)
    assert machine.make_room(new, wanted) is True
    assert pool.free_slots == wanted


def test_two_that_want_more_than_the_leases_of_a_third_leave_do_not_rob_each_other_for_ever(
    machine: Machine,
) -> None:
    old, full = machine.pool()
    machine.grow(old, CHUNKS - 1)
    held = hold_some_everywhere(old, full)
    (first, one), (second, other) = machine.pool(), machine.pool()
    machine.grow(first, 1)
    assert machine.make_room(second) is True, "what has not been taken from another may be taken"
    machine.fill(second, 1)
    for _ in range(3):
        assert machine.make_room(first) is None
    assert other.pages == 1, "what it has just kept can be found again"
    assert full.pages == (CHUNKS - 2) * LARGE.chunk_slots
    for slots in held:
        full.release(slots)
    assert machine.make_room(first) is True
    assert (one.capacity, other.capacity) == (LARGE.chunk_slots, LARGE.chunk_slots)


def test_pages_do_not_go_for_a_chunk_that_its_pool_has_just_got(machine: Machine) -> None:
    old, full = full_tier(machine)
    second, other = machine.pool(SMALL)
    assert machine.make_room(second) is True
    chain = chain_of(other, 1, SMALL.chunk_slots)
    hold_some_everywhere(old, full)
    new, _ = machine.pool()
    for _ in range(3):
        assert machine.make_room(new) is None
    assert len(other.prefix(chain)) == SMALL.chunk_slots
    machine.room.rebalance(now=10.0)
    assert machine.make_room(new) is True


def test_what_was_cleared_is_left_to_the_pool_for_as_long_as_that_took(machine: Machine) -> None:
    old, full = full_tier(machine)
    held = hold_some_everywhere(old, full)
    new, pool = machine.pool()
    assert machine.make_room(new) is False
    machine.room.rebalance(now=LATER)
    for slots in held:
        full.release(slots)
    machine.room.rebalance(now=LATER)
    assert full.capacity == (CHUNKS - 1) * LARGE.chunk_slots
    machine.room.rebalance(now=1.9 * LATER)
    assert machine.make_room(old, LARGE.chunk_slots) is True, "of its own"
    assert full.capacity == (CHUNKS - 1) * LARGE.chunk_slots
    assert machine.make_room(new) is True
    assert pool.free_slots == LARGE.chunk_slots


def test_chunks_move_on_between_others_while_what_was_cleared_is_kept_for_one(
    machine: Machine,
) -> None:
    (old, full), (third, active) = machine.pool(), machine.pool()
    machine.grow(old, CHUNKS - 1)
    machine.grow(third, 1)
    held = [*hold_some_everywhere(old, full), *hold_some_everywhere(third, active)]
    new, _ = machine.pool()
    assert machine.make_room(new) is False
    machine.room.rebalance(now=LATER)
    for slots in held[: len(held) - 1]:
        full.release(slots)
    active.release(held[-1])
    machine.room.rebalance(now=LATER)
    assert machine.make_room(third) is True, "of its own"
    machine.fill(third, active.free_slots)
    machine.room.rebalance(now=LATER + 10.0)
    assert full.capacity == (CHUNKS - 3) * LARGE.chunk_slots
    assert machine.make_room(third, active.free_slots + 1) is True
    assert active.capacity == 2 * LARGE.chunk_slots
    assert machine.make_room(new) is True


def test_what_nobody_asks_for_any_more_is_anybodys_later(machine: Machine) -> None:
    old, full = full_tier(machine)
    held = hold_some_everywhere(old, full)
    new, _ = machine.pool()
    assert machine.make_room(new) is False
    for slots in held:
        full.release(slots)
    machine.room.rebalance(now=1.0)
    machine.room.rebalance(now=LATER)
    assert machine.make_room(old, full.free_slots + 1) is True
    assert full.capacity == CHUNKS * LARGE.chunk_slots


def test_pools_of_one_model_are_cleared_for_together(machine: Machine) -> None:
    old, full = full_tier(machine)
    held = hold_some_everywhere(old, full)
    catalog, kv = machine.pool()
    machine.room.open_pool(catalog, "swa", 16, LARGE, window=2)
    swa = catalog.pools["swa"]
    assert machine.make_room(catalog) is False
    assert full.pages == (CHUNKS - 2) * LARGE.chunk_slots
    for slots in held:
        full.release(slots)
    assert machine.make_room(catalog) is True
    machine.fill(catalog, 1)
    assert machine.make_room(old) is True
    assert machine.room.make_room(swa, 1, machine.sharers) is True
    assert (kv.capacity, swa.capacity) == (LARGE.chunk_slots, LARGE.chunk_slots)


def test_a_row_of_two_shards_is_cleared_as_a_whole() -> None:
    machine = Machine(chunks=4, devices=2)
    old, full = machine.pool(shards=1)
    for _ in range(4):
        assert machine.make_room(old) is None
        machine.answer()
        machine.fill(old, full.free_slots)
    held = hold_some_everywhere(old, full)
    new, pool = machine.pool()
    assert machine.make_room(new) is False
    assert full.pages == 2 * LARGE.chunk_slots
    full.release(held[0])
    full.release(held[2])
    full.release(held[3])
    machine.room.rebalance(now=1.0)
    full.release(held[1])
    while machine.make_room(new) is None:
        assert machine.told
        machine.answer()
    assert pool.free_slots == LARGE.chunk_slots
    machine.close()


def test_a_pool_at_its_cap_costs_others_nothing() -> None:
    machine = Machine(chunks=4, shares={"swa": 0.25})
    catalog, kv = machine.pool()
    machine.room.open_pool(catalog, "swa", 16, LARGE, window=2)
    swa = catalog.pools["swa"]
    machine.grow(catalog, 3)
    assert machine.room.make_room(swa, 1, machine.sharers) is None
    machine.answer()
    keys = Keys(b"".join(bytes([n + 1]) * KEY_BYTES for n in range(swa.capacity)))
    swa.commit(swa.reserve(keys, None, np.full(len(keys), MISSING), 1))
    swa.hold(swa.present(keys))
    for now in (0.0, LATER):
        machine.room.rebalance(now)
        assert machine.room.make_room(swa, 1, machine.sharers) is False
    assert kv.pages == kv.capacity == 3 * LARGE.chunk_slots
    machine.close()


def test_what_could_never_fit_costs_others_nothing(machine: Machine) -> None:
    old, full = machine.pool()
    machine.grow(old, CHUNKS - 1)
    new, _ = machine.pool()
    machine.grow(new, 1)
    for now in (0.0, LATER):
        machine.room.rebalance(now)
        assert machine.make_room(new, CHUNKS * LARGE.chunk_slots + 1) is False
    assert full.pages == (CHUNKS - 1) * LARGE.chunk_slots


# --- what was granted is kept ---------------------------------------------------------------------


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
        pool.add_chunk(ordinal)
    return pool, records


def test_whoever_has_leased_a_page_may_load_it_and_nobody_else_finds_it() -> None:
    pool, records = pool_of(2)
    keys = chain_of(pool, 1, 3)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    assert max(leases.lookup("r", keys, [pool], now=0.0)) == 3
    slots = pool.find_all(keys)
    assert pool.withdraw_chunk(0) == 3
    assert not pool.is_vacant(0)
    assert (pool.pages, pool.held, len(pool.prefix(keys))) == (0, 0, 0)
    assert leases.lookup("s", keys, [pool], now=1.0) == []
    assert leases.pin(1, [("s", [(pool, keys)])], b"s", {0}, deadline=9.0, tick=2).plan is None
    assert (records.states[slots] == COMMITTED).all(), "they outlive the daemon, as before"
    plan = leases.pin(2, [("r", [(pool, keys)])], b"r", {0}, deadline=9.0, tick=3).plan
    assert plan is not None
    assert plan[0][0][1].tolist() == slots.tolist()
    again = chain_of(pool, 1, 3)
    assert not np.isin(pool.find_all(again), slots).any(), "another copy lies elsewhere"
    leases.retire(2, 0)
    assert pool.is_vacant(0)
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
        swa.withdraw_chunk(ordinal)
    pins = leases.pin(1, [("r", [(kv, keys), (swa, keys[3:5])])], b"", {0}, deadline=9.0, tick=2)
    assert pins.plan is not None
    assert pins.plan[0][1][1].tolist() == slots.tolist()
    leases.retire(1, 0)
    assert swa.is_vacant(0)
    assert swa.is_vacant(1)


def test_pages_of_a_window_that_no_lease_holds_are_not_loaded_with_it() -> None:
    kv, _ = pool_of(3)
    swa, _ = pool_of(3, window=1)
    keys = chain_of(kv, 1, 9)
    swa.commit(swa.reserve(keys, None, np.full(9, MISSING), 1))
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    lengths = leases.lookup("r", keys, [kv, swa], now=0.0)
    assert lengths == [6, 7, 8, 9]
    swa.withdraw_chunk(0)
    want = [("r", [(kv, keys[:3]), (swa, keys[2:3])])]
    assert leases.pin(1, want, b"", {0}, deadline=9.0, tick=2).plan is None


def test_a_lease_on_withdrawn_pages_is_answered_as_before_and_lasts_no_longer() -> None:
    pool, _ = pool_of(2)
    keys = chain_of(pool, 1, 3)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    left: list[float] = []

    def look(now: float) -> list[int]:
        return leases.lookup("r", keys, [pool], now=now, answer=lambda _, s: left.append(s))

    first = look(0.0)
    assert look(10.0) == first
    pool.withdraw_chunk(0)
    assert look(25.0) == first, "the same for every rank that asks the same"
    assert left == [LEASE_S, LEASE_S, 15.0]
    leases.expire(40.0)
    assert pool.is_vacant(0)
    assert look(40.0) == []


def test_a_withdrawn_page_that_turns_out_corrupt_is_not_loaded_again() -> None:
    pool, records = pool_of(1)
    keys = chain_of(pool, 1, 3)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    for rid in ("r", "s"):
        leases.lookup(rid, keys, [pool], now=0.0)
    slots = pool.find_all(keys)
    pool.withdraw_chunk(0)
    assert pool.spoil(slots[1:2]) == 1
    assert pool.spoil(slots[1:2]) == 0
    assert records.states[slots].tolist() == [COMMITTED, FREE, COMMITTED]
    assert leases.pin(1, [("r", [(pool, keys)])], b"", {0}, deadline=9.0, tick=2).plan is None
    leases.cancel("s")
    assert pool.is_vacant(0)


def test_what_is_being_written_goes_once_it_has_come() -> None:
    pool, _ = pool_of(2)
    keys = Keys(b"".join(bytes([n + 1]) * KEY_BYTES for n in range(2)))
    slots = pool.reserve(keys, b"", np.full(2, MISSING), 1)
    pool.withdraw_chunk(0)
    shown: list[Keys] = []
    pool.on_drop = lambda gone, visible: shown.append(gone) if visible else None
    pool.commit(slots)
    assert sum(map(len, shown)) == 2, "whoever was shown them is told"
    assert pool.is_vacant(0)
    assert (pool.pages, pool.free_slots, pool.capacity) == (0, 3, 3)


def test_what_follows_waits_for_its_beginning_to_come_back() -> None:
    pool, _ = pool_of(3)
    keys = chain_of(pool, 1, 6)
    pool.withdraw_chunk(0)
    assert pool.pages == 3
    assert len(pool.prefix(keys)) == 0
    known = pool.find_all(keys)
    pool.commit(pool.reserve(keys, b"", known, 2)[known == MISSING])
    assert len(pool.prefix(keys)) == 6
    pool.remove_chunk(0)
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
        pins = self.leases.pin(
            number, [(rid, [(self.pool, keys)])], b"", {0}, deadline=9.0, tick=number
        )
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
            self.pool.withdraw_chunk(ordinal)
            self.leaving.add(ordinal)

    @rule()
    def a_chunk_leaves_and_another_comes(self) -> None:
        for ordinal in [n for n in self.leaving if self.pool.is_vacant(n)]:
            self.pool.remove_chunk(ordinal)
            self.pool.add_chunk(ordinal)
            self.leaving.discard(ordinal)

    @invariant()
    def what_is_loaded_is_what_was_asked_for(self) -> None:
        for pages in self.running.values():
            for wanted, slot in pages:
                assert self.bytes[slot] == wanted

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        used = self.pool.pages + self.pool.withdrawn + sum(map(len, self.writing))
        assert self.pool.capacity == self.pool.free_slots + used

    def teardown(self) -> None:
        for number in list(self.running):
            self.leases.retire(number, 0)
        self.leases.end_all()
        while self.writing:
            self.pool.abort(self.writing.pop())
        assert (self.pool.held, self.pool.withdrawn) == (0, 0)
        assert all(self.pool.is_vacant(ordinal) for ordinal in self.leaving)
        self.pool.evict(self.pool.pages)
        assert self.pool.pages == 0, "nothing is in the way of eviction"
        left = (4 - len(self.leaving)) * LARGE.chunk_slots
        assert self.pool.free_slots == self.pool.capacity == left
        assert (self.records.states == FREE).all()


TestWithdrawals = Withdrawals.TestCase
TestWithdrawals.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
