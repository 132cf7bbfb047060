"""Leases and pins: what an engine is about to load stays, and not for longer than it must."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierd.channel import ChannelClosed
from tierd.control.keys import MISSING, Keys
from tierd.control.leases import MAX_LEASED_KEYS, Leases, Pins, Want
from tierd.control.pages import PagePool
from tierd.eviction.policy import Slots
from tierd.wire.geometry import host_layout

LEASE_S = 30.0


class Headers:
    def writing(
        self, slots: Slots, keys: bytes, parents: bytes, flags: npt.NDArray[np.uint32]
    ) -> None: ...
    def committed(self, slots: Slots) -> None: ...
    def freed(self, slots: Slots) -> None: ...


def chain(name: str, pages: int) -> Keys:
    return Keys.of(hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(pages))


def make_pool(slots: int, **chains: int) -> PagePool:
    """A pool that holds these chains, each of so many pages."""
    host = host_layout([1 << 16], chunk_bytes=(slots << 16) + (1 << 18))
    pool = PagePool("kv", 16, host, 2, Headers())
    pool.chunks.add(0)
    spare = pool.capacity - slots
    assert spare >= 0
    for now, (name, pages) in enumerate(chains.items(), 1):
        slots_of = pool.reserve(chain(name, pages), b"", np.full(pages, MISSING), now)
        pool.commit(slots_of)
    return pool


class Group:
    """A group of two ranks that looks up and loads chains of one pool."""

    def __init__(
        self, pool: PagePool, max_share: float = 1.0, max_keys: int = MAX_LEASED_KEYS
    ) -> None:
        self.pool = pool
        self.leases = Leases(lease_s=LEASE_S, max_share=max_share, max_keys=max_keys)

    def want(self, keys: Keys) -> Want:
        return [(self.pool, keys)]

    def lookup(self, rid: str, keys: Keys, now: float = 0.0) -> list[int]:
        return self.leases.lookup(rid, keys, [self.pool], now=now)

    def pin(self, number: int, loads: dict[str, Keys], deadline: float = 20.0) -> Pins:
        wants = [(rid, self.want(keys)) for rid, keys in loads.items()]
        signature = b"".join(keys.blob for keys in loads.values())
        pins = self.leases.pin(number, wants, signature, {0, 1}, deadline=deadline)
        self.leases.note_load(number, 101)
        return pins


def test_a_hit_offers_the_longest_and_some_shorter_counts_and_holds_the_pages() -> None:
    pool = make_pool(16, a=8)
    group = Group(pool)
    assert group.lookup("r", chain("a", 12)) == [2, 4, 6, 8]
    assert pool.held == 8
    assert (pool.hits, pool.misses) == (8, 4)
    assert pool.evict(16) == 0


def test_what_a_lookup_has_found_is_used_once_however_many_ranks_ask() -> None:
    pool = make_pool(16, a=4, b=4)
    group = Group(pool)
    for tick in (100, 200):
        group.lookup("r", chain("a", 4))
        group.leases.note_use("r", tick)
    group.leases.note_use("not there", 300)
    assert pool.policy.recency(slice(None)) == 100
    group.leases.cancel("r")
    assert pool.evict(4) == 4
    assert group.lookup("s", chain("a", 4))[-1:] == [4], "the one that nobody used has gone"


def test_prompts_with_a_prefix_in_common_are_remembered_up_to_a_bound() -> None:
    group = Group(make_pool(16, a=8), max_keys=24)
    prompts = [Keys.of([*chain("a", 8), *chain(f"tail {n}", 2)]) for n in range(4)]
    first, second, third, short = (f"request {n}" for n in range(4))
    assert group.lookup(first, prompts[0])
    assert group.lookup(second, prompts[1])
    assert group.lookup(third, prompts[2]) == [], "two prompts of ten pages are remembered"
    assert group.lookup(short, chain("a", 4)), "there is room for a short one"
    assert group.lookup(second, prompts[3]), "it takes the place of the request's last lookup"
    assert group.lookup(second, prompts[3]), "to ask again costs nothing"

    group.pin(1, {first: chain("a", 8)})
    assert group.lookup(third, prompts[2]), "one has loaded"
    group.leases.expire(LEASE_S + 1.0)
    assert all(group.lookup(rid, prompts[0]) for rid in (first, second))
    assert group.lookup(third, prompts[2]) == []


def test_a_miss_holds_nothing() -> None:
    pool = make_pool(16, a=8)
    group = Group(pool)
    assert group.lookup("r", chain("b", 3)) == []
    assert (pool.held, len(group.leases)) == (0, 0)


def test_a_load_gets_its_pages_whichever_way_round_a_cancel_comes() -> None:
    pool = make_pool(16, a=4)
    group = Group(pool)
    keys = chain("a", 4)
    group.lookup("r", keys)
    group.pin(1, {"r": keys})
    group.leases.cancel("r")  # too late
    assert (pool.held, pool.evict(16)) == (4, 0), "a pin is no lease"
    for rank in (0, 1):
        group.leases.retire(1, rank)
    group.lookup("r", keys)
    group.leases.cancel("r")  # too early
    assert group.pin(2, {"r": keys}).plan is not None
    assert (pool.held, pool.evict(16)) == (4, 0)


def test_an_answer_that_cannot_be_given_leases_nothing() -> None:
    pool = make_pool(16, a=4)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)

    def gone(_: list[int], __: float) -> None:
        raise ChannelClosed

    with pytest.raises(ChannelClosed):
        leases.lookup("r", chain("a", 4), [pool], now=0.0, answer=gone)
    assert (pool.held, len(leases)) == (0, 0)


def test_every_rank_that_asks_the_same_gets_the_same_whatever_has_come_since() -> None:
    pool = make_pool(16, a=4)
    group = Group(pool)
    first = group.lookup("r", chain("a", 8))
    more = pool.reserve(chain("a", 8), b"", pool.find_all(chain("a", 8)), 9)
    pool.commit(more[4:])
    assert group.lookup("r", chain("a", 8)) == first
    assert pool.held == 4, "and it is held once"


def test_another_tail_of_the_same_request_replaces_its_lease() -> None:
    pool = make_pool(16, a=4, b=2)
    group = Group(pool)
    group.lookup("r", chain("a", 4))
    assert group.lookup("r", chain("b", 2)) == [1, 2]
    assert (pool.held, len(group.leases)) == (2, 1)


def test_a_lease_ends_when_it_runs_out_and_a_second_look_prolongs_it() -> None:
    pool = make_pool(16, a=4)
    group = Group(pool)
    group.lookup("r", chain("a", 4), now=0.0)
    group.lookup("r", chain("a", 4), now=20.0)
    group.leases.expire(LEASE_S + 10.0)
    assert pool.held == 4
    group.leases.expire(LEASE_S + 20.0)
    assert pool.held == 0
    assert pool.evict(16) == 4


def test_cancel_ends_a_lease_once() -> None:
    pool = make_pool(16, a=4)
    group = Group(pool)
    group.lookup("r", chain("a", 4))
    group.lookup("other", chain("a", 4))
    group.leases.cancel("r")
    group.leases.cancel("r")
    group.leases.cancel("never seen")
    assert pool.held == 4, "the other request's lease holds them still"
    group.leases.cancel("other")
    assert pool.held == 0


def test_leases_never_hold_more_than_their_share() -> None:
    pool = make_pool(16, a=10, b=6)
    group = Group(pool, max_share=0.5)
    share = pool.capacity // 2
    assert max(group.lookup("r", chain("a", 10))) == min(share, 10)
    assert pool.held == min(share, 10)
    group.lookup("s", chain("b", 6))
    assert pool.held <= share


def test_a_prefix_that_is_leased_already_counts_once() -> None:
    pool = make_pool(16, a=8)
    group = Group(pool, max_share=8 / pool.capacity)
    for request in ("first", "second", "third"):
        assert max(group.lookup(request, chain("a", 8))) == 8
    assert pool.held == 8


def test_a_load_turns_a_lease_into_pins_until_every_rank_has_retired() -> None:
    pool = make_pool(16, a=4)
    group = Group(pool)
    group.lookup("r", chain("a", 4))
    pins = group.pin(1, {"r": chain("a", 3)})
    assert pins.plan is not None
    assert [len(slots) for held in pins.plan for _, slots in held] == [3]
    assert len(group.leases) == 0
    assert pool.held == 4, "the last page is not loaded, yet the pins have taken the lease over"
    assert group.pin(1, {"r": chain("a", 3)}) is pins, "decided once, for both ranks"
    group.leases.retire(1, 0)
    group.leases.retire(1, 0)
    assert pool.held == 4
    assert group.leases.unfinished(1) == [1]
    group.leases.retire(1, 1)
    group.leases.retire(1, 1)
    assert (pool.held, group.leases.restoring) == (0, 0)


def test_what_a_step_loads_is_used_once_however_many_ranks_load_it() -> None:
    pool = make_pool(16, a=4, b=4)
    group = Group(pool)
    group.pin(1, {"r": chain("a", 4)})
    assert pool.policy.recency(slice(None)) == 101
    group.leases.note_load(1, 200)
    group.leases.note_load(2, 300)
    assert pool.policy.recency(slice(None)) == 101


def test_a_load_without_a_lease_is_served_if_its_pages_are_here() -> None:
    pool = make_pool(16, a=4)
    pins = Group(pool).pin(1, {"r": chain("a", 4)})
    assert pins.plan is not None
    assert pool.held == 4


def test_a_load_gets_the_pages_that_its_lease_holds() -> None:
    pool = make_pool(16, a=4, b=4)
    group = Group(pool)
    assert max(group.lookup("r", chain("a", 4))) == 4
    pins = group.pin(1, {"r": chain("a", 3)})
    assert pins.plan is not None
    (((_, slots),),) = pins.plan
    assert slots.tolist() == pool.find_all(chain("a", 3)).tolist()


def test_a_load_of_another_chain_than_the_leased_one_gets_its_own_pages() -> None:
    pool = make_pool(16, a=4, b=4)
    group = Group(pool)
    group.lookup("r", chain("a", 4))
    pins = group.pin(1, {"r": chain("b", 4)})
    assert pins.plan is not None
    (((_, slots),),) = pins.plan
    assert slots.tolist() == pool.find_all(chain("b", 4)).tolist()


@pytest.mark.parametrize("again", [False, True])
def test_a_leased_page_that_turns_out_corrupt_is_not_loaded(again: bool) -> None:
    pool = make_pool(16, a=4)
    group = Group(pool)
    group.lookup("r", chain("a", 4))
    bad = pool.find_all(chain("a", 4))[1:2]
    pool.spoil(bad)
    if again:
        keys = chain("a", 4)
        pool.commit(pool.reserve(keys, b"", pool.find_all(keys), 9)[1:2])
    plan = group.pin(1, {"r": chain("a", 4)}).plan
    if not again:
        assert plan is None
        return
    assert plan is not None
    (((_, slots),),) = plan
    assert slots.tolist() == pool.find_all(chain("a", 4)).tolist()
    assert bad[0] not in slots


def test_one_missing_page_fails_the_whole_step_and_ends_its_leases() -> None:
    pool = make_pool(16, a=4, b=2)
    group = Group(pool)
    group.lookup("r", chain("a", 4))
    pins = group.pin(1, {"r": chain("a", 4), "s": chain("b", 3)})
    assert pins.plan is None
    assert (pool.held, len(group.leases)) == (0, 0)
    for rank in (0, 1):
        group.leases.retire(1, rank)
    assert group.leases.restoring == 0


def test_a_page_that_is_still_being_written_is_missing() -> None:
    pool = make_pool(16, a=2)
    known = pool.find_all(chain("a", 4))
    slots = pool.reserve(chain("a", 4), b"", known, 9)
    group = Group(pool)
    assert group.lookup("r", chain("a", 4)) == [1, 2]
    assert group.pin(1, {"r": chain("a", 4)}).plan is None
    pool.commit(slots[2:])
    assert group.pin(2, {"r": chain("a", 4)}).plan is not None


def test_a_step_that_a_rank_never_loads_is_overdue() -> None:
    pool = make_pool(16, a=4)
    group = Group(pool)
    group.pin(1, {"r": chain("a", 4)}, deadline=20.0)
    group.leases.retire(1, 0)
    assert group.leases.overdue(19.9) == []
    assert group.leases.overdue(20.0) == [(1, {1})]


def test_leases_of_a_group_that_goes_end_and_its_pins_stay() -> None:
    pool = make_pool(16, a=4, b=2)
    group = Group(pool)
    group.lookup("r", chain("a", 4))
    group.pin(1, {"s": chain("b", 2)})
    group.leases.end_all()
    assert pool.held == 2
    for rank in (0, 1):
        group.leases.retire(1, rank)
    assert pool.held == 0


@pytest.mark.parametrize("have", [3, 0])
def test_a_request_of_two_pools_gets_what_both_have(have: int) -> None:
    kv, indexer = make_pool(16, a=5), make_pool(16, a=have)
    leases = Leases(lease_s=LEASE_S, max_share=1.0)
    lengths = leases.lookup("r", chain("a", 5), [kv, indexer], now=0.0)
    assert max(lengths, default=0) == have
    assert (kv.held, indexer.held) == (have, have)


NAMES = st.sampled_from(["a", "b", "c"])
RIDS = st.sampled_from(["r", "s", "t"])


class Requests(RuleBasedStateMachine):
    """Requests of a group look, cancel, load and expire in any order while pages are evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(16, a=5, b=4, c=3)
        self.group = Group(self.pool, max_share=0.6)
        self.now = 0.0
        self.number = 0
        self.running: dict[int, tuple[Pins, set[int]]] = {}

    @rule(rid=RIDS, name=NAMES, pages=st.integers(1, 6))
    def looks(self, rid: str, name: str, pages: int) -> None:
        lengths = self.group.lookup(rid, chain(name, pages), self.now)
        assert self.group.lookup(rid, chain(name, pages), self.now) == lengths
        assert lengths == sorted(set(lengths))
        if lengths:
            assert len(self.pool.prefix(chain(name, pages))) >= lengths[-1]

    @rule(rid=RIDS)
    def cancels(self, rid: str) -> None:
        self.group.leases.cancel(rid)

    @rule(rid=RIDS, name=NAMES, pages=st.integers(1, 6))
    def loads(self, rid: str, name: str, pages: int) -> None:
        self.number += 1
        pins = self.group.pin(self.number, {rid: chain(name, pages)})
        whole = len(self.pool.prefix(chain(name, pages))) == pages
        assert (pins.plan is not None) == whole
        self.running[self.number] = (pins, {0, 1})

    @rule(rank=st.integers(0, 1), at=st.integers(0, 9))
    def a_rank_retires(self, rank: int, at: int) -> None:
        if self.running:
            number = sorted(self.running)[at % len(self.running)]
            self.group.leases.retire(number, rank)
            left = self.running[number][1]
            left.discard(rank)
            if not left:
                del self.running[number]

    @rule(seconds=st.sampled_from([5.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.group.leases.expire(self.now)

    @rule(count=st.integers(1, 3))
    def pages_are_evicted(self, count: int) -> None:
        self.pool.evict(count)

    @invariant()
    def what_is_being_loaded_is_here(self) -> None:
        for pins, _ in self.running.values():
            for held in pins.plan or ():
                for pool, slots in held:
                    assert pool.slots.are_committed(slots).all()

    def teardown(self) -> None:
        for number, (_, left) in list(self.running.items()):
            for rank in left:
                self.group.leases.retire(number, rank)
        self.group.leases.end_all()
        assert self.pool.held == 0
        assert self.group.leases.restoring == 0
        self.pool.evict(self.pool.pages)
        assert self.pool.free_slots == self.pool.capacity


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_page_that_is_held_several_times_counts_once() -> None:
    pool = make_pool(16, a=4)
    slots = pool.prefix(chain("a", 4))
    for _ in range(2):
        pool.hold(slots[[0, 1, 1]])
    pool.hold(slots[1:])
    assert pool.held == 4
    for _ in range(2):
        pool.release(slots[[0, 1, 1]])
    assert pool.held == 3
    pool.release(slots[1:])
    assert pool.held == 0
