"""What each slot is used for: the counts agree with what has happened, and no slot goes to two."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierd.control.keys import MISSING
from tierd.control.slot_table import SlotTable
from tierd.eviction.policy import Slots

CHUNK = 5


def table_of(chunks: int) -> SlotTable:
    table = SlotTable(CHUNK)
    for ordinal in range(chunks):
        table.add_chunk(ordinal)
    return table


def pages_in(table: SlotTable, count: int) -> Slots:
    slots = table.take(count)
    table.commit(slots)
    return slots


def test_a_page_that_is_being_written_cannot_be_hit() -> None:
    table = table_of(1)
    slots = table.take(3)
    assert table.being_written(np.append(slots, MISSING)).tolist() == slots.tolist()
    table.commit(slots[:2])
    assert table.committed_prefix(slots).tolist() == slots[:2].tolist()
    assert table.are_evictable(slots).tolist() == [True, True, False]


def test_the_page_of_a_held_slot_can_be_loaded_after_it_has_gone_unless_it_is_spoiled() -> None:
    table = table_of(1)
    slots = pages_in(table, 3)
    table.hold(slots[:2])
    assert table.let_go(slots, visible=True).tolist() == slots[2:].tolist()
    assert table.are_intact(slots).tolist() == [True, True, False]
    assert table.spoil(slots[1:]).tolist() == slots[1:2].tolist()
    assert table.are_intact(slots).tolist() == [True, False, False]
    left, freed = table.release(slots[:2])
    assert left.tolist() == freed.tolist() == slots[:2].tolist()
    assert table.free == CHUNK


def test_a_slot_that_is_held_twice_in_one_call_is_one_slot() -> None:
    table = table_of(1)
    slots = pages_in(table, 2)
    twice = np.array([*slots, slots[0]])
    table.hold(slots)
    table.hold(twice)
    assert table.held == 2
    left, _ = table.release(twice)
    assert left.tolist() == []
    left, _ = table.release(slots)
    assert left.tolist() == slots.tolist()


class Slotting(RuleBasedStateMachine):
    """Slots are taken, filled, held and given up, while chunks are withdrawn and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of(3)
        self.chunks = {0, 1, 2}
        self.leaving: set[int] = set()
        self.writing: set[int] = set()
        self.committed: set[int] = set()
        self.gone: set[int] = set()
        """Whose pages have gone, though somebody holds them."""
        self.holds: list[Slots] = []

    def held(self) -> set[int]:
        return {slot for slots in self.holds for slot in slots.tolist()}

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        slots = self.table.take(min(count, self.table.free)).tolist()
        assert not set(slots) & (self.writing | self.committed | self.gone)
        assert not {slot // CHUNK for slot in slots} - self.chunks
        self.writing |= set(slots)

    @rule(ok=st.booleans())
    def end(self, ok: bool) -> None:
        slots = np.array(sorted(self.writing), np.int64)
        self.writing.clear()
        if ok:
            self.table.commit(slots)
            self.committed |= set(slots.tolist())
            self.let_go(self.table.leaving(slots))
        else:
            assert self.table.let_go(slots, visible=False).tolist() == slots.tolist()

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        some = st.lists(st.sampled_from(sorted(self.committed)), min_size=1, unique=True)
        slots = np.array(data.draw(some), np.int64)
        self.table.hold(slots)
        self.holds.append(slots)

    @precondition(lambda self: self.holds)
    @rule()
    def release(self) -> None:
        before = self.held()
        left, freed = self.table.release(self.holds.pop(0))
        assert set(left.tolist()) == before - self.held()
        assert set(freed.tolist()) == set(left.tolist()) & self.gone
        self.gone -= set(freed.tolist())

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        some = st.lists(st.sampled_from(sorted(self.committed)), unique=True)
        self.let_go(np.array(data.draw(some), np.int64))

    def let_go(self, slots: Slots) -> None:
        freed = set(self.table.let_go(slots, visible=True).tolist())
        assert freed == set(slots.tolist()) - self.held()
        self.committed -= set(slots.tolist())
        self.gone |= set(slots.tolist()) - freed

    @rule(ordinal=st.integers(0, 2))
    def withdraw(self, ordinal: int) -> None:
        if ordinal in self.chunks:
            self.chunks.discard(ordinal)
            self.leaving.add(ordinal)
            self.let_go(self.table.withdraw_chunk(ordinal))

    @rule(ordinal=st.integers(0, 2))
    def swap(self, ordinal: int) -> None:
        if self.table.is_vacant(ordinal):
            self.table.remove_chunk(ordinal)
            self.table.add_chunk(ordinal)
            self.leaving.discard(ordinal)
            self.chunks.add(ordinal)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        table, used = self.table, self.writing | self.committed | self.gone
        leaving = {slot for slot in used if slot // CHUNK in self.leaving}
        assert table.capacity == len(self.chunks) * CHUNK + len(leaving)
        assert table.free == table.capacity - len(used)
        assert table.committed == len(self.committed)
        assert table.withdrawn == len(self.gone)
        assert table.held == len(self.held() - self.gone)
        seen = [slot for slots in table.all_committed() for slot in slots.tolist()]
        assert seen == sorted(self.committed)
        for ordinal in range(3):
            mine = {slot for slot in used if slot // CHUNK == ordinal}
            assert set(table.used(ordinal).tolist()) == mine
            assert table.is_vacant(ordinal) == (not mine)


TestSlotting = Slotting.TestCase
TestSlotting.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
