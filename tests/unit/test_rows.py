"""The chunks that pools have: usable once all have pinned them, whoever dies or fails meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from machines import LARGE, Machine, make

from tierd.control.keys import Keys
from tierd.wire.geometry import CHUNK_BYTES
from tierd.wire.messages import AddChunk, DropChunk

pytestmark = pytest.mark.usefixtures("no_chunk_stays_open")


def test_slots_are_there_once_every_copier_has_pinned_its_shard(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4, devices=2)
    catalog, pool = machine.pool()
    assert machine.make_room(catalog) is None
    assert machine.told_to(AddChunk) == ["host:0", "host:1"]
    machine.answer("host:0")
    assert pool.free_slots == 0
    assert machine.room.rows.busy
    machine.answer("host:1")
    assert pool.free_slots == LARGE.chunk_slots
    assert not machine.room.rows.busy


def test_what_all_ranks_share_is_claimed_once_and_pinned_by_every_copier(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=2, devices=2)
    catalog, pool = machine.pool(shards=1)
    assert machine.make_room(catalog) is None
    assert machine.room.store.claimed_bytes == CHUNK_BYTES
    assert sorted(machine.told_to(AddChunk)) == ["host:0", "host:1"]
    machine.answer("host:1")
    assert pool.free_slots == 0, "one rank could not reach them"
    machine.answer("host:0")
    assert pool.free_slots == LARGE.chunk_slots
    here, there = (machine.room.rows.locate(pool, np.arange(3), rank)[0] for rank in (0, 1))
    assert here.tolist() == there.tolist()
    machine.kill(machine.copiers[1])
    assert len(machine.restart(machine.copiers[1])) == 1, "it pins the same one again"
    machine.answer()
    assert machine.make_room(catalog, pool.free_slots + 1) is None
    machine.answer()
    rows = machine.room.rows
    homes = {chunk.home for row in rows.usable(pool) for chunk in rows.chunks(row)}
    assert homes == {"host:0", "host:1"}, "each device has an equal part of the stock"


def test_a_pool_asks_once_for_what_is_being_pinned(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4)
    catalog, _ = machine.pool()
    for _ in range(3):
        assert machine.make_room(catalog) is None
    assert len(machine.told) == 1


def test_pages_in_a_chunk_that_cannot_be_pinned_again_are_dropped(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4, devices=2)
    catalog, pool = machine.pool()
    machine.grow(catalog, 2)
    machine.kill(machine.copiers[1])
    lacks = machine.restart(machine.copiers[1])
    assert len(lacks) == 2
    first, second = (told.message.chunk for told in machine.take_told(AddChunk))
    assert machine.room.rows.ready(machine.copiers[1], first, "cannot pin 64 MiB") is False
    assert machine.room.rows.ready(machine.copiers[1], second, "") is True
    assert pool.pages == pool.capacity == LARGE.chunk_slots
    assert machine.told_to(DropChunk) == ["host:1"], "it answers that nothing is mapped"
    machine.answer()
    assert machine.room.store.budget_bytes == 3 * CHUNK_BYTES
    assert machine.restart(machine.copiers[1]) == set(), "all that is left can be reached"


def test_pages_that_are_held_there_are_dropped_when_they_are_not_any_more(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=4)
    catalog, pool = machine.pool()
    machine.grow(catalog, 1)
    slots = pool.prefix(Keys(catalog.digest[:1] + bytes(31)))
    pool.hold(slots)
    machine.kill(machine.copiers[0])
    machine.restart(machine.copiers[0])
    machine.answer(error="cannot pin 64 MiB")
    machine.room.rebalance(now=1.0)
    assert pool.pages == LARGE.chunk_slots
    assert machine.room.rows.busy
    pool.release(slots)
    machine.room.rebalance(now=2.0)
    machine.answer()
    assert (pool.pages, pool.capacity) == (0, 0)
    assert not machine.room.rows.busy


def test_a_chunk_that_cannot_be_pinned_ends_growth_and_harms_nothing(
    machines: list[Machine],
) -> None:
    machine = make(machines, chunks=8, devices=2)
    catalog, pool = machine.pool()
    machine.grow(catalog, 1)
    assert machine.make_room(catalog) is None
    machine.answer("host:0")
    machine.answer("host:1", error="cannot pin 64 MiB")
    assert machine.told == [], "the other copier keeps its chunk"
    assert machine.room.store.claimed_bytes == 2 * CHUNK_BYTES
    assert machine.room.store.budget_bytes == 3 * CHUNK_BYTES
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
    assert not machine.room.rows.busy


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
    machine = make(machines, chunks=4, devices=2)
    catalog, _ = machine.pool(private=True)
    both = [(0, machine.copiers[0]), (0, machine.copiers[1]), (1, machine.copiers[1])]
    assert machine.room.make_room(catalog.pools["kv"], 1, both) is None
    machine.answer()
    machine.room.dissolve(catalog)
    assert machine.told_to(DropChunk) == ["host:1"], "each chunk stays where it lies"
    assert machine.room.rows.busy
    machine.kill(machine.copiers[1])
    assert machine.room.store.claimed_bytes == 0
    assert not machine.room.rows.busy


def test_a_namespace_is_not_dissolved_under_a_copier_that_pins(machines: list[Machine]) -> None:
    machine = make(machines, chunks=4)
    catalog, _ = machine.pool(private=True)
    assert machine.make_room(catalog) is None
    assert not machine.room.dissolve(catalog)
    machine.answer()
    assert machine.room.dissolve(catalog)
    machine.answer()
    assert machine.room.store.claimed_bytes == 0
