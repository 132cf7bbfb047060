"""Room for pages: one budget, pools that grow into it and give back to each other."""

from __future__ import annotations

import numpy as np
import pytest
from descriptors import open_descriptors, opened_since
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from machines import CHUNK_FILE, LARGE, MISSING_ONE, Machine, make

from tierd.control.chunk_ages import LOOKS
from tierd.control.copiers import CopierState
from tierd.control.keys import MISSING, Keys
from tierd.control.pages import PagePool
from tierd.eviction.policy import Slots
from tierd.wire.geometry import CHUNK_BYTES, host_layout

pytestmark = pytest.mark.usefixtures("no_chunk_stays_open")
SMALL = host_layout([64 << 10])
"""About a thousand slots a chunk: a long prompt of one-token pages takes many."""


def test_the_budget_is_never_exceeded_and_then_pages_are_evicted(machines: list[Machine]) -> None:
    machine = make(machines, chunks=2)
    catalog, pool = machine.pool()
    machine.grow(catalog, 2)
    assert machine.room.store.claimed_bytes == machine.room.store.budget_bytes
    assert machine.make_room(catalog, 2) is True
    assert pool.free_slots == 2
    assert pool.evictions == 2
    assert machine.told == []


def test_more_than_all_memory_is_refused_and_costs_no_page(machines: list[Machine]) -> None:
    machine = make(machines, chunks=1)
    catalog, pool = machine.pool()
    machine.grow(catalog, 1)
    assert machine.make_room(catalog, LARGE.chunk_slots + 1) is False
    assert pool.pages == LARGE.chunk_slots


def test_a_row_of_two_shards_that_does_not_fit_is_not_begun(machines: list[Machine]) -> None:
    machine = make(machines, chunks=1, devices=2)
    catalog, _ = machine.pool()
    assert machine.make_room(catalog) is False
    assert machine.room.store.claimed_bytes == 0


def test_a_pool_that_has_nothing_takes_the_coldest_chunk_of_another(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=2)
    old, rich = machine.pool()
    machine.grow(old, 2)
    new, poor = machine.pool()
    assert machine.make_room(new) is True, "what was given back is pinned"
    assert (rich.capacity, poor.capacity) == (LARGE.chunk_slots, LARGE.chunk_slots)
    machine.fill(new, poor.free_slots)
    assert machine.make_room(new) is True
    assert machine.told == [], "it has pages of its own to evict"


def test_a_pool_that_has_nothing_takes_from_one_that_has_had_all_of_many_chunks(
    machines: list[Machine],
) -> None:
    many = 3 * LOOKS
    machine = make(machines, chunks=many)
    old, full = machine.pool()
    machine.grow(old, many)
    new, pool = machine.pool()
    assert machine.make_room(new) is True, "whatever the other's chunks were when one last looked"
    assert full.pages == (many - 1) * LARGE.chunk_slots
    assert pool.free_slots == LARGE.chunk_slots


def test_a_pool_that_has_nothing_takes_the_end_of_a_prompt_that_fills_all_there_is(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=12)
    old, full = machine.pool(SMALL)
    while full.capacity < 12 * SMALL.chunk_slots:
        assert machine.make_room(old, full.free_slots + 1) is None
        machine.answer()
    prompt = Keys(b"".join(n.to_bytes(32, "little") for n in range(full.capacity)))
    full.commit(full.reserve(prompt, b"", np.full(len(prompt), MISSING), 1))
    assert full.chunks.coldest() is None, "too much follows those that are looked at"
    new, pool = machine.pool()
    asked = 0
    while (made := machine.make_room(new)) is None:
        asked += 1
        assert asked < 12
    assert made is True
    assert pool.free_slots == LARGE.chunk_slots
    assert full.pages == len(full.prefix(prompt)) >= 10 * SMALL.chunk_slots, "its beginning stays"


def test_pages_go_from_one_chunk_only_where_some_are_in_use_in_all(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=2)
    old, full = machine.pool()
    machine.grow(old, 2)
    for n in (0, LARGE.chunk_slots):
        full.hold(full.prefix(Keys(old.digest[:1] + n.to_bytes(31, "little"))))
    assert full.held == 2
    new, _ = machine.pool()
    for _ in range(3):
        assert machine.make_room(new) is False
    assert full.pages == LARGE.chunk_slots


def test_chunks_move_to_the_pool_that_evicts_from_the_one_with_older_pages(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=4)
    old, idle = machine.pool()
    machine.grow(old, 3)
    new, active = machine.pool()
    machine.grow(new, 1)
    for turn in range(2):
        assert machine.make_room(new) is True
        machine.fill(new, active.free_slots)
        machine.room.rebalance(now=10.0 * turn)
        machine.answer()
        left = idle.capacity
        assert machine.make_room(old) is True
        assert idle.capacity == left, "what it gave up is not its to take back"
        assert machine.make_room(new, active.host.chunk_slots) is True
        machine.fill(new, active.free_slots)
    assert (idle.capacity, active.capacity) == (LARGE.chunk_slots, 3 * LARGE.chunk_slots)


def test_a_pool_whose_only_chunk_is_always_being_written_takes_an_older_one_too(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=2)
    old, idle = machine.pool()
    machine.grow(old, 1)
    new, active = machine.pool()
    machine.grow(new, 1)
    assert machine.make_room(new) is True
    machine.tick += 1
    written = active.reserve(Keys(new.digest[:1] + b"w" * 31), b"", MISSING_ONE, machine.tick)
    assert active.chunks.coldest() is None
    machine.room.rebalance(now=10.0)
    machine.answer()
    assert (idle.capacity, idle.pages) == (0, 0)
    active.commit(written)


def test_a_pool_that_evicts_its_own_oldest_pages_leaves_younger_ones_alone(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=2)
    first, _ = machine.pool()
    machine.grow(first, 1)
    second, _ = machine.pool()
    machine.grow(second, 1)
    assert machine.make_room(first) is True  # its pages are the older ones
    machine.room.rebalance(now=1.0)
    assert machine.told == []


def test_a_capped_pool_evicts_its_own_pages_at_its_cap() -> None:
    machine = Machine(chunks=4, shares={"kv": 0.5})
    catalog, pool = machine.pool()
    machine.grow(catalog, 2)
    assert machine.make_room(catalog) is True
    assert pool.capacity == 2 * LARGE.chunk_slots
    machine.close()


def test_a_promise_to_a_pool_that_wants_nothing_any_more_runs_out(machines: list[Machine]) -> None:
    machine = make(machines, chunks=3)
    old, idle = machine.pool()
    machine.grow(old, 2)
    new, _ = machine.pool()
    machine.grow(new, 1)
    assert machine.make_room(new) is True
    machine.room.rebalance(now=1.0)
    assert machine.make_room(old) is True
    assert idle.capacity == LARGE.chunk_slots, "the chunk that it gave up is another's for now"
    machine.room.rebalance(now=100.0)
    assert machine.make_room(old, idle.free_slots + 1) is True
    assert idle.capacity == 2 * LARGE.chunk_slots


def test_pools_of_one_model_leave_each_other_a_chunk() -> None:
    machine = Machine(chunks=2)
    catalog, kv = machine.pool()
    machine.room.rows.open_pool(catalog, "swa", 16, LARGE, window=2)
    swa = catalog.pools["swa"]
    assert machine.make_room(catalog) is None
    machine.answer()
    assert machine.room.make_room(swa, 1, machine.sharers) is None
    machine.answer()
    assert (kv.capacity, swa.capacity) == (LARGE.chunk_slots, LARGE.chunk_slots)
    machine.fill(catalog, 1)
    assert machine.room.make_room(swa, swa.capacity + 1, machine.sharers) is False
    assert machine.told == []
    machine.close()


def test_a_pool_waits_while_another_one_pins_instead_of_giving_up() -> None:
    machine = Machine(chunks=2)
    catalog, _ = machine.pool()
    machine.room.rows.open_pool(catalog, "swa", 16, LARGE, window=2)
    swa = catalog.pools["swa"]
    assert machine.make_room(catalog, 2 * LARGE.chunk_slots) is None  # takes all there is
    assert machine.room.make_room(swa, 1, machine.sharers) is None
    machine.answer()
    assert machine.room.make_room(swa, 1, machine.sharers) is None, "the other is to use it first"
    machine.fill(catalog, 1)
    assert machine.room.make_room(swa, 1, machine.sharers) is True, "it is given one"
    assert swa.free_slots == LARGE.chunk_slots
    machine.close()


def test_two_pools_do_not_take_from_each_other_what_neither_has_used(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=1)
    (first, one), (second, other) = machine.pool(), machine.pool()
    assert machine.make_room(first) is None
    machine.answer()
    turns = ((first, second, one), (second, first, other)) * 3
    for turn, (has, waits, pool) in enumerate(turns):
        for _ in range(3):
            assert machine.make_room(waits) is None, "the pages that it was made for come first"
        assert pool.free_slots == LARGE.chunk_slots
        machine.fill(has, 1)
        if turn:
            assert machine.make_room(waits) is None, "what it was given is its own for a while"
        machine.room.rebalance(now=10.0 * (1 + turn))
        assert machine.make_room(waits) is True


def test_room_that_nobody_uses_after_all_is_anybodys_later(machines: list[Machine]) -> None:
    machine = make(machines, chunks=1)
    (first, _), (second, other) = machine.pool(), machine.pool()
    assert machine.make_room(first) is None
    machine.answer()
    machine.room.rebalance(now=1.0)
    assert machine.make_room(second) is None
    machine.room.rebalance(now=100.0)
    assert machine.make_room(second) is True
    assert other.free_slots == LARGE.chunk_slots


def test_a_chunk_with_a_held_page_is_not_taken(machines: list[Machine]) -> None:
    machine = make(machines, chunks=1)
    old, rich = machine.pool()
    machine.grow(old, 1)
    slots = rich.prefix(Keys(old.digest[:1] + bytes(31)))
    rich.hold(slots)
    new, _ = machine.pool()
    assert machine.make_room(new) is False
    rich.release(slots)
    assert machine.make_room(new) is True


def test_a_namespace_is_dissolved_when_nobody_holds_its_pages(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4)
    catalog, pool = machine.pool(private=True)
    machine.grow(catalog, 2)
    slots = pool.prefix(Keys(catalog.digest[:1] + bytes(31)))
    pool.hold(slots)
    assert not machine.room.dissolve(catalog)
    assert pool.pages == 1
    pool.release(slots)
    assert machine.room.dissolve(catalog)
    machine.answer()
    assert machine.room.store.claimed_bytes == 0


class Growth(RuleBasedStateMachine):
    """Two namespaces of two shards compete for memory while copiers answer, fail and die."""

    def __init__(self) -> None:
        super().__init__()
        self.before = open_descriptors(CHUNK_FILE)
        self.machine = Machine(chunks=8, devices=2, ahead=4, spare=1)
        self.machine.pool()
        self.machine.pool()
        self.held: list[tuple[PagePool, Slots]] = []

    @rule(which=st.integers(0, 1), missing=st.integers(1, 8))
    def a_pool_wants_room(self, which: int, missing: int) -> None:
        catalog = self.machine.catalogs[which]
        pool = catalog.pools["kv"]
        wanted = pool.free_slots + missing
        if self.machine.make_room(catalog, missing):
            assert pool.free_slots >= wanted

    @rule(which=st.integers(0, 1), pages=st.integers(1, 3))
    def pages_come(self, which: int, pages: int) -> None:
        catalog = self.machine.catalogs[which]
        self.machine.fill(catalog, min(pages, catalog.pools["kv"].free_slots))

    @rule(which=st.integers(0, 1), page=st.integers(0, 40))
    def a_page_is_leased(self, which: int, page: int) -> None:
        catalog = self.machine.catalogs[which]
        pool = catalog.pools["kv"]
        slots = pool.prefix(Keys(catalog.digest[:1] + page.to_bytes(31, "little")))
        pool.hold(slots)
        self.held.append((pool, slots))

    @rule()
    def a_lease_ends(self) -> None:
        if self.held:
            pool, slots = self.held.pop(0)
            pool.release(slots)

    @rule(device=st.sampled_from(["host:0", "host:1"]))
    def a_copier_answers(self, device: str) -> None:
        self.machine.answer(device)

    @rule(count=st.integers(1, 3), error=st.sampled_from(["", "", "", "cannot pin 64 MiB"]))
    def a_few_chunks_are_answered(self, count: int, error: str) -> None:
        for _ in range(min(count, len(self.machine.told))):
            self.machine.answer_first(error)

    @rule(now=st.floats(0, 1000))
    def time_passes(self, now: float) -> None:
        self.machine.room.rebalance(now)

    @rule(which=st.integers(0, 1))
    def a_copier_dies(self, which: int) -> None:
        copier = self.machine.copiers[which]
        if copier.state is CopierState.READY:
            self.machine.kill(copier)

    @rule(which=st.integers(0, 1))
    def a_copier_is_back(self, which: int) -> None:
        copier = self.machine.copiers[which]
        if copier.state is CopierState.DEAD:
            self.machine.restart(copier)

    @invariant()
    def the_budget_holds(self) -> None:
        store = self.machine.room.store
        assert 0 <= store.claimed_bytes <= store.created_bytes
        assert store.created_bytes <= 8 * CHUNK_BYTES
        assert self.machine.room.stock.pinned_bytes >= 0

    @invariant()
    def a_slot_is_free_or_has_a_page(self) -> None:
        for catalog in self.machine.catalogs:
            pool = catalog.pools["kv"]
            assert pool.free_slots + pool.pages + pool.slots.withdrawn == pool.capacity

    def teardown(self) -> None:
        while self.held:
            self.a_lease_ends()
        for copier in self.machine.copiers:
            if copier.state is CopierState.DEAD:
                self.machine.restart(copier)
        self.machine.answer()
        self.machine.room.rebalance(now=2000.0)
        assert not self.machine.room.rows.busy
        for copier in self.machine.copiers:
            assert self.machine.restart(copier) == set(), "nothing is lacking for ever"
        for catalog in self.machine.catalogs:
            assert self.machine.room.dissolve(catalog)
        self.machine.answer()
        assert self.machine.room.store.claimed_bytes == 0
        self.machine.close()
        assert self.machine.room.store.created_bytes == 0
        assert opened_since(self.before, CHUNK_FILE) == []


TestGrowth = Growth.TestCase
TestGrowth.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
