"""Chunks made and pinned ahead of the pools that will claim them."""

from __future__ import annotations

import pytest
from machines import LARGE, Machine

from tierd.control.catalog import Catalog
from tierd.control.stock import PINNED_AT_ONCE
from tierd.wire.geometry import CHUNK_BYTES
from tierd.wire.messages import AddChunk, DropChunk

pytestmark = pytest.mark.usefixtures("no_chunk_stays_open")


def test_a_device_in_use_is_kept_ahead_of_its_need_within_the_budget() -> None:
    machine = Machine(chunks=4, spare=2)
    machine.room.stock.fill(machine.copiers[0])
    assert machine.told == [], "nobody uses it yet"
    catalog, pool = machine.pool()
    assert machine.make_room(catalog) is None
    assert len(machine.told_to(AddChunk)) == 3
    machine.answer()
    assert machine.make_room(catalog, 2 * LARGE.chunk_slots) is True, "two were pinned ahead"
    assert pool.free_slots == 3 * LARGE.chunk_slots
    assert len(machine.told_to(AddChunk)) == 1, "the last one is for whoever comes next"
    machine.close()


def test_what_is_pinned_ahead_costs_nothing_to_claim() -> None:
    machine = Machine(chunks=4, devices=2, ahead=4)
    stock = machine.room.stock
    for copier in machine.copiers:
        assert not stock.can_serve(copier)
        stock.fill(copier)
    machine.answer()
    assert all(stock.can_serve(copier) for copier in machine.copiers)
    assert stock.pinned_bytes == stock.ahead_bytes == 4 * CHUNK_BYTES
    catalog, pool = machine.pool()
    assert machine.make_room(catalog, LARGE.chunk_slots + 1) is True
    assert pool.free_slots == 2 * LARGE.chunk_slots
    assert machine.told == []
    machine.close()


def test_a_copier_is_told_of_a_few_chunks_at_a_time_and_pools_do_not_wait_for_all() -> None:
    machine = Machine(chunks=4 * PINNED_AT_ONCE, ahead=4 * PINNED_AT_ONCE)
    machine.room.stock.fill(machine.copiers[0])
    assert len(machine.told) == PINNED_AT_ONCE
    catalog, pool = machine.pool()
    assert machine.make_room(catalog) is None
    machine.answer_first()
    assert pool.free_slots == LARGE.chunk_slots, "the first of those on their way is its"
    assert len(machine.told) == PINNED_AT_ONCE
    assert machine.room.stock.pinned_bytes < machine.room.stock.ahead_bytes
    machine.answer()
    assert machine.room.stock.pinned_bytes == machine.room.stock.ahead_bytes
    machine.close()


def test_a_device_that_needs_more_than_its_part_gets_what_others_do_not_use() -> None:
    machine = Machine(chunks=8, devices=2, ahead=8)
    for copier in machine.copiers:
        machine.room.stock.fill(copier)
    machine.answer()
    catalog = Catalog(b"0" * 32, 1, private=False)
    machine.catalogs.append(catalog)
    machine.room.rows.open_pool(catalog, "kv", 16, LARGE)
    only_one = [(0, machine.copiers[0])]
    pool = catalog.pools["kv"]
    want = 7 * LARGE.chunk_slots
    while (made := machine.room.make_room(pool, want, only_one)) is None:
        assert set(machine.told_to(DropChunk)) <= {"host:1"}
        machine.answer()
        want = 7 * LARGE.chunk_slots - pool.free_slots
    assert made is True
    assert pool.free_slots == 7 * LARGE.chunk_slots
    machine.room.rebalance(now=1.0)
    machine.answer()
    assert machine.room.store.created_bytes == machine.room.store.budget_bytes
    machine.close()


def test_a_copier_that_is_back_pins_again_what_nobody_has_claimed() -> None:
    machine = Machine(chunks=4, ahead=4)
    machine.room.stock.fill(machine.copiers[0])
    machine.answer()
    machine.kill(machine.copiers[0])
    assert machine.room.stock.pinned_bytes == 0
    machine.restart(machine.copiers[0])
    machine.room.stock.fill(machine.copiers[0])
    assert len(machine.told_to(AddChunk)) == 4
    machine.answer()
    assert machine.room.stock.pinned_bytes == 4 * CHUNK_BYTES
    machine.close()


def test_memory_that_cannot_be_pinned_ahead_is_no_part_of_the_budget() -> None:
    machine = Machine(chunks=4, ahead=4)
    machine.room.stock.fill(machine.copiers[0])
    machine.answer_first()
    machine.answer(error="cannot pin 64 MiB")
    machine.answer()
    assert machine.room.store.budget_bytes == machine.room.store.created_bytes == CHUNK_BYTES
    assert machine.room.stock.can_serve(machine.copiers[0]), "with what there is"
    machine.close()
