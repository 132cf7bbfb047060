"""The eviction policy and the index above it: no hole, no lost slot, whatever is asked of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierd.control.keys import MISSING, Keys
from tierd.control.pages import PagePool
from tierd.eviction import ChainLru
from tierd.eviction.chain_reuse import ChainReuse
from tierd.eviction.policy import NO_PARENT, EvictionPolicy, Slots
from tierd.eviction.window_lru import WindowLru
from tierd.wire.geometry import host_layout
from tierd.wire.limits import KEY_BYTES

CHUNK = 8


class Records:
    """Slot headers in plain memory: what a restart would find."""

    def __init__(self) -> None:
        self.state: dict[int, str] = {}
        self.keys: dict[int, bytes] = {}

    def writing(
        self, slots: Slots, keys: bytes, parents: bytes, flags: npt.NDArray[np.uint32]
    ) -> None:
        assert len(keys) == len(parents) == KEY_BYTES * len(flags)
        for slot, key in zip(slots.tolist(), Keys(keys), strict=True):
            assert self.state.get(slot, "free") == "free"
            self.state[slot], self.keys[slot] = "writing", key

    def committed(self, slots: Slots) -> None:
        for slot in slots.tolist():
            assert self.state[slot] == "writing"
            self.state[slot] = "committed"

    def freed(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.state[slot] = "free"


def key(chain: tuple[int, ...]) -> bytes:
    """The key of the last page of a chain: it names all that comes before it."""
    return hashlib.sha256(bytes(chain)).digest()


def keys(chain: tuple[int, ...], first: int = 0) -> Keys:
    return Keys.of(key(chain[: i + 1]) for i in range(first, len(chain)))


def make_pool(
    chunks: int, policy: Callable[[], EvictionPolicy] = ChainLru
) -> tuple[PagePool, Records]:
    host = host_layout([1 << 20], chunk_bytes=(CHUNK << 20) + (1 << 20))
    assert host.chunk_slots == CHUNK
    records = Records()
    pool = PagePool("kv", 64, host, 1, records, policy=policy())
    for ordinal in range(chunks):
        pool.chunks.add(ordinal)
    return pool, records


def store(
    pool: PagePool, chain: tuple[int, ...], now: int, *, first: int = 0, parent: bytes | None = b""
) -> Slots:
    """Back a chain up, as a backup that finds room does."""
    names = keys(chain, first)
    if first and parent == b"":
        parent = key(chain[:first])
    known = pool.find_all(names)
    slots = pool.reserve(names, parent, known, now)
    pool.commit(slots[known == MISSING])
    return slots


def test_the_deepest_page_of_the_coldest_chain_goes_first() -> None:
    pool, _ = make_pool(2)
    store(pool, (1, 2, 3), now=1)
    store(pool, (9, 8), now=2)
    assert pool.evict(1) == 1
    assert pool.find(key((1, 2, 3))) is None
    assert len(pool.prefix(keys((1, 2, 3)))) == 2
    assert pool.evict(2) == 2
    assert pool.find(key((1,))) is None
    assert len(pool.prefix(keys((9, 8)))) == 2


def test_a_prefix_is_as_recent_as_what_was_built_on_it() -> None:
    pool, _ = make_pool(2)
    store(pool, (1, 2), now=1)
    store(pool, (5, 6), now=2)
    store(pool, (1, 2, 3), now=3, first=2)
    pool.evict(1)  # the descendant of (1, 2) is younger than (5, 6)
    assert pool.find(key((5, 6))) is None
    pool.evict(1)
    pool.evict(1)  # now the chain of three: its descendant goes, its own age is the descendant's
    assert len(pool.prefix(keys((1, 2, 3)))) == 2


def test_a_page_whose_beginning_is_missing_goes_before_all_others() -> None:
    pool, _ = make_pool(2)
    store(pool, (7, 7), now=1)
    store(pool, (1, 2, 3), now=9, first=2)  # (1, 2) is not here
    pool.evict(1)
    assert pool.find(key((1, 2, 3))) is None
    assert len(pool.prefix(keys((7, 7)))) == 2


def test_a_beginning_that_comes_later_is_linked_to_what_waits_for_it() -> None:
    pool, _ = make_pool(2)
    tail = store(pool, (1, 2, 3), now=5, first=2)
    head = store(pool, (1, 2), now=6)
    assert pool.policy.parent[tail[0]] == head[-1]
    pool.evict(1)
    assert len(pool.prefix(keys((1, 2, 3)))) == 2


def test_a_held_page_and_all_before_it_stay() -> None:
    pool, _ = make_pool(1)
    slots = store(pool, (1, 2, 3, 4), now=1)
    pool.hold(slots[:3])
    assert pool.evict(10) == 1
    assert len(pool.prefix(keys((1, 2, 3, 4)))) == 3
    pool.release(slots[:3])
    assert pool.evict(10) == 3


def test_a_page_being_written_is_found_and_not_visible() -> None:
    pool, _ = make_pool(1)
    names = keys((1, 2))
    slots = pool.reserve(names, b"", np.full(2, MISSING), 1)
    assert pool.find(names[0]) == slots[0]
    assert len(pool.prefix(names)) == 0
    assert pool.evict(5) == 0
    pool.abort(slots)
    assert pool.find(names[0]) is None
    assert pool.free_slots == CHUNK


def test_a_chunk_goes_with_all_that_follows_its_pages() -> None:
    pool, _ = make_pool(2)
    long = tuple(range(1, CHUNK + 4))
    store(pool, long, now=1)  # fills chunk 0, three pages in chunk 1
    store(pool, (99,), now=2)
    assert pool.chunks.coldest() == (1, 0)
    assert pool.chunks.remove(0) == len(long)
    assert pool.find(key(long)) is None
    assert len(pool.prefix(keys((99,)))) == 1
    assert pool.capacity == CHUNK


def test_a_chunk_that_too_many_others_follow_may_stay() -> None:
    pool, _ = make_pool(2)
    store(pool, tuple(range(1, CHUNK + 4)), now=1)  # fills chunk 0, three pages in chunk 1
    assert not pool.chunks.may_remove(0, most=2)
    assert pool.chunks.may_remove(0, most=3)
    assert pool.chunks.may_remove(0), "where it must go, however many they are"
    assert pool.chunks.may_remove(1, most=0)


def test_keys_that_claim_to_follow_each_other_in_a_ring_do_not_stop_eviction() -> None:
    pool, _ = make_pool(1)
    a, b = key((1,)), key((2,))
    pool.commit(pool.reserve(Keys(a), b, np.array([MISSING]), 1))
    pool.commit(pool.reserve(Keys(b), a, np.array([MISSING]), 2))
    assert pool.evict(5) == 2
    assert pool.free_slots == CHUNK


def test_the_leaf_list_does_not_grow_with_use() -> None:
    policy = ChainLru()
    policy.grow(4)
    policy.insert(np.array([0]), NO_PARENT, 1)
    for _ in range(5000):
        policy.orphan(0)
        policy.evict(1, lambda slots: np.zeros(len(slots), np.bool_), lambda _: None)
    assert len(policy._leaves) <= 64 + 2 * 4 + 1


@pytest.mark.parametrize("make", [ChainLru, ChainReuse, WindowLru])
def test_pages_that_must_stay_are_looked_at_once_and_not_at_every_eviction(
    make: Callable[[], EvictionPolicy],
) -> None:
    policy, held, free = make(), 1000, 300
    policy.grow(held + free)
    for slot in range(held + free):
        policy.insert(np.array([slot]), NO_PARENT, slot + 1)
    stays, asked, gone = np.arange(held + free) < held, 0, []

    def evictable(slots: Slots) -> npt.NDArray[np.bool_]:
        nonlocal asked
        asked += len(slots)
        return ~stays[slots]

    def drop(run: Slots) -> None:
        gone.extend(run.tolist())
        policy.remove(run)

    for _ in range(100):
        assert policy.evict(2, evictable, drop) == 2
    assert asked <= held + 100 * 2 * 2, "not a hundred times all that are held"
    assert gone == list(range(held, held + 200)), "the oldest of those that may go"
    for slot in (7, 3):  # two are let go of: as old as they are, they are next
        stays[slot] = False
        policy.allow(np.array([slot]))
    assert policy.evict(3, evictable, drop) == 3
    assert gone[200:] == [3, 7, held + 200]


class IndexMachine(RuleBasedStateMachine):
    """Everything that control asks of a pool, in any order."""

    policy: type[ChainLru] = ChainLru

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.records = make_pool(2, self.policy)
        self.now = 0
        self.writing: list[Slots] = []
        self.holds: list[Slots] = []

    chains = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)

    def tick(self) -> int:
        self.now += 1
        return self.now

    @rule(chain=chains, first=st.integers(0, 3), told=st.booleans())
    def begin(self, chain: tuple[int, ...], first: int, told: bool) -> None:
        first = min(first, len(chain) - 1)
        names = keys(chain, first)
        known = self.pool.find_all(names)
        missing = int((known == MISSING).sum())
        if missing > self.pool.free_slots:
            self.pool.evict(missing - self.pool.free_slots)
            known = self.pool.find_all(names)
            if (known == MISSING).sum() > self.pool.free_slots:
                return
        parent = (key(chain[:first]) if first else b"") if told else None
        slots = self.pool.reserve(names, parent, known, self.tick())
        fresh = slots[known == MISSING]
        if len(fresh):
            self.writing.append(fresh)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.booleans())
    def end(self, data: st.DataObject, ok: bool) -> None:
        i = data.draw(st.integers(0, len(self.writing) - 1))
        slots = self.writing.pop(i)
        (self.pool.commit if ok else self.pool.abort)(slots)

    @rule(chain=chains)
    def look_up_and_hold(self, chain: tuple[int, ...]) -> None:
        slots = self.pool.prefix(keys(chain))
        if len(slots):
            self.pool.touch(slots, self.tick())
            self.pool.hold(slots)
            self.holds.append(slots)

    @precondition(lambda self: self.holds)
    @rule()
    def let_go(self) -> None:
        self.pool.release(self.holds.pop())

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        self.pool.evict(count)

    @rule()
    def swap_a_chunk(self) -> None:
        coldest = self.pool.chunks.coldest()
        if coldest is not None:
            ordinal = coldest[1]
            self.pool.chunks.remove(ordinal)
            self.pool.chunks.add(ordinal)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        used = [slot for slot, state in self.records.state.items() if state != "free"]
        assert len(used) == self.pool.capacity - self.pool.free_slots
        for slot in used:
            assert self.pool.find(self.records.keys[slot]) == slot
            committed = self.records.state[slot] == "committed"
            assert self.pool.slots.are_committed(np.array([slot])) == committed

    @invariant()
    def held_pages_stay(self) -> None:
        for slots in self.holds:
            assert self.pool.slots.are_committed(slots).all()

    @invariant()
    def links_lead_to_pages_that_are_here(self) -> None:
        parent, children = self.pool.policy.parent, self.pool.policy.children
        used = {slot for slot, state in self.records.state.items() if state != "free"}
        for slot in used:
            if parent[slot] != NO_PARENT:
                assert int(parent[slot]) in used
            following = [other for other in used if int(parent[other]) == slot]
            assert children[slot] == len(following)
            assert sorted(self.pool.policy.following(slot)) == sorted(following)

    def teardown(self) -> None:
        while self.holds:
            self.let_go()
        for slots in self.writing:
            self.pool.abort(slots)
        self.pool.evict(self.pool.pages)
        assert self.pool.free_slots == self.pool.capacity
        assert self.pool.held == 0


class ReuseMachine(IndexMachine):
    """The same of a pool that evicts by what is used again."""

    policy = ChainReuse


for machine in (IndexMachine, ReuseMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase
TestReuseIndex = ReuseMachine.TestCase


@pytest.mark.parametrize("policy", [ChainLru, ChainReuse])
def test_eviction_never_leaves_a_hole(policy: type[ChainLru]) -> None:
    rng = np.random.default_rng(7)
    pool, _ = make_pool(4, policy)
    chains = [tuple(int(x) for x in rng.integers(1, 4, 6)) for _ in range(40)]
    for now, chain in enumerate(chains, 1):
        names = keys(chain)
        missing = int((pool.find_all(names) == MISSING).sum()) - pool.free_slots
        if missing > 0:
            pool.evict(missing)
            if (pool.find_all(names) == MISSING).sum() > pool.free_slots:
                continue
        store(pool, chain, now)
        for other in chains:
            present = [pool.find(name) is not None for name in keys(other)]
            assert present == sorted(present, reverse=True), "a page without the one before it"
    assert pool.evictions > 0


@pytest.mark.parametrize("count", [1, CHUNK, 2 * CHUNK])
def test_a_run_of_pages_gets_a_run_of_slots(count: int) -> None:
    pool, _ = make_pool(2)
    slots = store(pool, tuple(range(1, count + 1)), now=1)
    assert slots.tolist() == list(range(count))
