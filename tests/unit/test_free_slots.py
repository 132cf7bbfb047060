"""The free slots of a pool: the lowest go first, and none goes twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.control.free_slots import SPAN, FreeSlots

CHUNK = SPAN // 2 + 7  # so that chunks and spans do not begin together


def test_a_run_of_pages_gets_the_lowest_run_of_slots() -> None:
    free = FreeSlots()
    free.add_range(0, CHUNK)
    assert free.take(3).tolist() == [0, 1, 2]
    free.add(np.array([1]))
    assert free.take(2).tolist() == [1, 3]
    assert len(free) == CHUNK - 4


@given(st.lists(st.tuples(st.sampled_from(["take", "give back", "chunk"]), st.integers(0, 3000))))
def test_every_slot_is_either_free_or_taken(steps: list[tuple[str, int]]) -> None:
    free, wanted, taken, chunks = FreeSlots(), set[int](), list[int](), 0
    for what, amount in steps:
        if what == "chunk":
            free.add_range(chunks * CHUNK, (chunks + 1) * CHUNK)
            wanted |= set(range(chunks * CHUNK, (chunks + 1) * CHUNK))
            chunks += 1
        elif what == "give back":
            back, taken = taken[:amount], taken[amount:]
            free.add(np.array(back, np.int64))
            wanted |= set(back)
        else:
            got = free.take(min(amount, len(free))).tolist()
            assert got == sorted(wanted)[: len(got)]
            taken += got
            wanted -= set(got)
        assert len(free) == len(wanted)


def test_slots_of_a_chunk_that_has_gone_are_not_given_out() -> None:
    free = FreeSlots()
    free.add_range(0, CHUNK)
    free.add_range(CHUNK, 2 * CHUNK)
    free.remove_range(0, CHUNK)
    assert free.take(1).tolist() == [CHUNK]
    free.remove(np.array([CHUNK + 1]))
    assert free.take(1).tolist() == [CHUNK + 2]
    with pytest.raises(AssertionError):
        free.take(CHUNK)
