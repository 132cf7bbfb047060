"""Memory of which somebody uses a little everywhere: it is cleared for a pool that has none, and
nobody is kept waiting for ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from machines import LARGE, Machine, chain_of

from tierd.control.catalog import Catalog
from tierd.control.keys import MISSING, Keys
from tierd.control.leases import Leases
from tierd.control.pages import PagePool
from tierd.eviction.policy import Slots
from tierd.wire.geometry import host_layout
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
            leases.pin(step * 1000 + page, want, b"", {0}, deadline=0.0)

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
    machine.room.rows.open_pool(catalog, "swa", 16, LARGE, window=2)
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
    machine.room.rows.open_pool(catalog, "swa", 16, LARGE, window=2)
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
