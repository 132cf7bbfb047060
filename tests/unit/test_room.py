"""Room for pages: one budget, pools that grow into it and give back, copiers that come and go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierd.control.catalog import Catalog, PagePool
from tierd.control.copiers import Copier, CopierState
from tierd.control.deadlines import Deadlines
from tierd.control.room import RoomKeeper
from tierd.wire.geometry import CHUNK_BYTES, HostLayout, host_layout
from tierd.wire.messages import AddChunk, DropChunk, Message

LARGE = host_layout([16 << 20])
"""Three slots a chunk: a pool is full soon."""
AHEAD = 512 << 20


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_descriptor_stays_open() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


@dataclass
class Told:
    device: str
    message: Message


class Machine:
    """A room keeper and its copiers, who answer when the test lets them."""

    def __init__(
        self, chunks: int, devices: int = 1, shares: dict[str, float] | None = None
    ) -> None:
        self.told: list[Told] = []
        self.room = RoomKeeper(chunks * CHUNK_BYTES, self._tell, shares)
        self.copiers = [Copier(f"host:{n}", Deadlines()) for n in range(devices)]
        for copier in self.copiers:
            copier.state = CopierState.READY
        self.catalogs: list[Catalog] = []
        self.tick = 0
        self.filled: dict[bytes, int] = {}

    def _tell(self, copier: Copier, message: Message, fd: int | None) -> None:
        assert copier.state is not CopierState.DEAD, "nobody hears this"
        if isinstance(message, AddChunk):
            assert fd is not None
            assert os.fstat(fd).st_size == message.size
        self.told.append(Told(copier.device, message))

    def pool(self, host: HostLayout = LARGE, *, private: bool = False) -> tuple[Catalog, PagePool]:
        """A namespace with one pool, a shard a copier."""
        number = len(self.catalogs)
        catalog = Catalog(bytes([number]) * 32, len(self.copiers), private)
        self.catalogs.append(catalog)
        self.room.open_pool(catalog, "kv", 16, host)
        return catalog, catalog.pools["kv"]

    @property
    def sharers(self) -> list[tuple[int, Copier]]:
        return list(enumerate(self.copiers))

    def make_room(self, catalog: Catalog, missing: int = 1) -> bool | None:
        return self.room.make_room(catalog, catalog.pools["kv"], missing, self.sharers)

    def answer(self, device: str | None = None, error: str = "") -> None:
        """Let copiers do what they were told."""
        for told in [t for t in self.told if device in (None, t.device)]:
            self.told.remove(told)
            copier = next(c for c in self.copiers if c.device == told.device)
            if isinstance(told.message, AddChunk):
                self.room.ready(copier, told.message.chunk, error)
            elif isinstance(told.message, DropChunk):
                copier.chunks.pop(told.message.chunk, None)
                self.room.dropped(copier, told.message.chunk)

    def kill(self, copier: Copier) -> None:
        self.told = [t for t in self.told if t.device != copier.device]
        copier.state = CopierState.DEAD
        copier.chunks.clear()
        self.room.lost(copier)

    def restart(self, copier: Copier) -> set[int]:
        """The copier is back and maps what its rank needs; returns what it lacks."""
        copier.state = CopierState.READY
        shard = self.copiers.index(copier)
        lacks: set[int] = set()
        for catalog in self.catalogs:
            lacks |= self.room.share(catalog, shard, copier)
        return lacks

    def fill(self, catalog: Catalog, pages: int) -> None:
        pool = catalog.pools["kv"]
        first = self.filled.get(catalog.digest, 0)
        self.filled[catalog.digest] = first + pages
        for n in range(first, first + pages):
            name = catalog.digest[:1] + n.to_bytes(31, "little")
            self.tick += 1
            pool.commit(pool.reserve([name], b"", [None], self.tick))

    def grow(self, catalog: Catalog, chunks: int) -> None:
        """Give a pool so many chunks, and pages in every slot of them."""
        pool = catalog.pools["kv"]
        for _ in range(chunks):
            assert self.make_room(catalog) is None
            self.answer()
            self.fill(catalog, pool.free_slots)

    def told_to(self, kind: type[Message]) -> list[str]:
        return [told.device for told in self.told if isinstance(told.message, kind)]

    def close(self) -> None:
        self.room.close()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    opened: list[Machine] = []
    yield opened
    for machine in opened:
        machine.close()


def make(machines: list[Machine], chunks: int, devices: int = 1) -> Machine:
    machines.append(Machine(chunks, devices))
    return machines[-1]


def test_slots_are_there_once_every_copier_has_pinned_its_shard(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4, devices=2)
    catalog, pool = machine.pool()
    assert machine.make_room(catalog) is None
    assert machine.told_to(AddChunk) == ["host:0", "host:1"]
    machine.answer("host:0")
    assert pool.free_slots == 0
    assert machine.room.busy
    machine.answer("host:1")
    assert pool.free_slots == LARGE.chunk_slots
    assert not machine.room.busy


def test_a_pool_asks_once_for_what_is_being_pinned(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4)
    catalog, _ = machine.pool()
    for _ in range(3):
        assert machine.make_room(catalog) is None
    assert len(machine.told) == 1


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


def test_a_pool_in_use_is_kept_ahead_of_its_need_within_the_budget(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=3)
    catalog, pool = machine.pool()
    machine.room.grow_ahead(catalog, pool, machine.sharers)
    assert AHEAD // CHUNK_BYTES > 3
    assert len(machine.told_to(AddChunk)) == 3
    machine.answer()
    assert pool.free_slots == 3 * LARGE.chunk_slots


def test_a_chunk_that_cannot_be_pinned_ends_growth_and_harms_nothing(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=8, devices=2)
    catalog, pool = machine.pool()
    machine.grow(catalog, 1)
    assert machine.make_room(catalog) is None
    machine.answer("host:0")
    machine.answer("host:1", error="cannot pin 64 MiB")
    assert machine.told_to(DropChunk) == ["host:0"], "the other copier never had its chunk"
    machine.answer()
    assert machine.room.store.claimed_bytes == 2 * CHUNK_BYTES
    assert machine.room.store.budget_bytes == 2 * CHUNK_BYTES
    assert pool.pages == LARGE.chunk_slots
    assert machine.make_room(catalog) is True, "from now on, pages make room"


def test_after_a_failed_pin_nothing_waits_for_the_copier_that_failed(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=8, devices=2)
    catalog, _ = machine.pool()
    assert machine.make_room(catalog) is None
    machine.answer("host:1", error="cannot pin 64 MiB")
    machine.answer()
    assert machine.restart(machine.copiers[1]) == set()
    assert not machine.room.busy


def test_a_copier_that_dies_while_it_pins_holds_nobody_up(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4, devices=2)
    catalog, pool = machine.pool()
    assert machine.make_room(catalog) is None
    machine.answer("host:0")
    machine.kill(machine.copiers[1])
    assert pool.free_slots == LARGE.chunk_slots
    lacks = machine.restart(machine.copiers[1])
    assert len(lacks) == 1, "its rank is not served before it has pinned it after all"
    machine.answer()
    assert machine.restart(machine.copiers[1]) == set()


def test_growth_does_not_wait_for_a_copier_that_is_dead(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4, devices=2)
    catalog, pool = machine.pool()
    machine.kill(machine.copiers[1])
    assert machine.make_room(catalog) is None
    machine.answer()
    assert pool.free_slots == LARGE.chunk_slots
    lacks = machine.restart(machine.copiers[1])
    assert len(lacks) == 1
    machine.answer("host:1")
    assert machine.restart(machine.copiers[1]) == set()


def test_a_copier_that_dies_while_it_unmaps_gives_its_memory_back(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4)
    catalog, _ = machine.pool(private=True)
    machine.grow(catalog, 2)
    machine.room.dissolve(catalog)
    assert machine.room.store.claimed_bytes == 2 * CHUNK_BYTES
    machine.kill(machine.copiers[0])
    assert machine.room.store.claimed_bytes == 0
    assert not machine.room.busy


def test_a_pool_that_has_nothing_takes_the_coldest_chunk_of_another(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=2)
    old, rich = machine.pool()
    machine.grow(old, 2)
    new, poor = machine.pool()
    assert machine.make_room(new) is None
    machine.answer()
    assert machine.make_room(new) is None, "what was given back is being pinned"
    machine.answer()
    assert (rich.capacity, poor.capacity) == (LARGE.chunk_slots, LARGE.chunk_slots)
    machine.fill(new, poor.free_slots)
    assert machine.make_room(new) is True
    assert machine.told == [], "it has pages of its own to evict"


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
        machine.room.grow_ahead(old, idle, machine.sharers)
        assert machine.told == [], "what it gave up is not its to take back"
        assert machine.make_room(new, active.host.chunk_slots) is None
        machine.answer()
        machine.fill(new, active.free_slots)
    assert (idle.capacity, active.capacity) == (LARGE.chunk_slots, 3 * LARGE.chunk_slots)


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
    machine = make(machines, chunks=2)
    old, idle = machine.pool()
    machine.grow(old, 1)
    new, _ = machine.pool()
    machine.grow(new, 1)
    assert machine.make_room(new) is True
    machine.room.rebalance(now=1.0)
    machine.answer()
    machine.room.grow_ahead(old, idle, machine.sharers)
    assert machine.told == []
    machine.room.rebalance(now=100.0)
    machine.room.grow_ahead(old, idle, machine.sharers)
    assert machine.told_to(AddChunk) == ["host:0"]


def test_pools_of_one_model_leave_each_other_a_chunk() -> None:
    machine = Machine(chunks=2)
    catalog, kv = machine.pool()
    machine.room.open_pool(catalog, "swa", 16, LARGE, window=2)
    swa = catalog.pools["swa"]
    assert machine.make_room(catalog) is None
    machine.answer()
    assert machine.room.make_room(catalog, swa, 1, machine.sharers) is None
    machine.answer()
    assert (kv.capacity, swa.capacity) == (LARGE.chunk_slots, LARGE.chunk_slots)
    machine.room.grow_ahead(catalog, kv, machine.sharers)
    assert machine.room.make_room(catalog, swa, swa.capacity + 1, machine.sharers) is False
    assert machine.told == []
    machine.close()


def test_a_pool_waits_while_another_one_pins_instead_of_giving_up() -> None:
    machine = Machine(chunks=2)
    catalog, _ = machine.pool()
    machine.room.open_pool(catalog, "swa", 16, LARGE, window=2)
    swa = catalog.pools["swa"]
    assert machine.make_room(catalog, 2 * LARGE.chunk_slots) is None  # takes all there is
    assert machine.room.make_room(catalog, swa, 1, machine.sharers) is None
    machine.answer()
    assert machine.room.make_room(catalog, swa, 1, machine.sharers) is None, "it is given one"
    machine.answer()
    machine.room.make_room(catalog, swa, 1, machine.sharers)
    machine.answer()
    assert swa.free_slots == LARGE.chunk_slots
    machine.close()


def test_a_chunk_with_a_held_page_is_not_taken(machines: list[Machine]) -> None:
    machine = make(machines, chunks=1)
    old, rich = machine.pool()
    machine.grow(old, 1)
    slots = rich.prefix([old.digest[:1] + bytes(31)])
    rich.hold(slots)
    new, _ = machine.pool()
    assert machine.make_room(new) is False
    rich.release(slots)
    assert machine.make_room(new) is None


def test_a_namespace_is_dissolved_when_nobody_holds_its_pages(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4)
    catalog, pool = machine.pool(private=True)
    machine.grow(catalog, 2)
    slots = pool.prefix([catalog.digest[:1] + bytes(31)])
    pool.hold(slots)
    assert not machine.room.dissolve(catalog)
    assert pool.pages == 1
    pool.release(slots)
    assert machine.room.dissolve(catalog)
    machine.answer()
    assert machine.room.store.claimed_bytes == 0


def test_a_namespace_is_not_dissolved_under_a_copier_that_pins(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4)
    catalog, _ = machine.pool(private=True)
    assert machine.make_room(catalog) is None
    assert not machine.room.dissolve(catalog)
    machine.answer()
    assert machine.room.dissolve(catalog)
    machine.answer()
    assert machine.room.store.claimed_bytes == 0


class Growth(RuleBasedStateMachine):
    """Two namespaces of two shards compete for memory while copiers answer, fail and die."""

    def __init__(self) -> None:
        super().__init__()
        self.before = open_fds()
        self.machine = Machine(chunks=6, devices=2)
        self.machine.pool()
        self.machine.pool()
        self.asked = [False, False]

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

    @rule(device=st.sampled_from(["host:0", "host:1"]))
    def a_copier_answers(self, device: str) -> None:
        self.machine.answer(device)

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
        assert 0 <= store.claimed_bytes <= store.budget_bytes

    @invariant()
    def a_slot_is_free_or_has_a_page(self) -> None:
        for catalog in self.machine.catalogs:
            pool = catalog.pools["kv"]
            assert pool.free_slots + pool.pages == pool.capacity

    def teardown(self) -> None:
        for copier in self.machine.copiers:
            if copier.state is CopierState.DEAD:
                self.machine.restart(copier)
        self.machine.answer()
        assert not self.machine.room.busy
        for copier in self.machine.copiers:
            assert self.machine.restart(copier) == set(), "nothing is lacking for ever"
        for catalog in self.machine.catalogs:
            assert self.machine.room.dissolve(catalog)
        self.machine.answer()
        assert self.machine.room.store.claimed_bytes == 0
        self.machine.close()
        assert open_fds() == self.before


TestGrowth = Growth.TestCase
TestGrowth.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
