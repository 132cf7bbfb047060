"""Keys in bulk, and the index from key to slot: the same as a dictionary, whatever lies where."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierd.control.keys import LOOK, MISSING, KeyIndex, Keys
from tierd.wire.limits import KEY_BYTES


def key(n: int) -> bytes:
    return hashlib.sha256(str(n).encode()).digest()


def chain(first: int, end: int) -> Keys:
    return Keys.of(key(n) for n in range(first, end))


def test_keys_are_a_sequence_of_what_they_were_made_of() -> None:
    names = [key(n) for n in range(5)]
    keys = Keys.of(names)
    assert (len(keys), list(keys), keys[3], keys[-1]) == (5, names, names[3], names[-1])
    assert list(keys[1:3]) == names[1:3]
    assert len(keys[4:2]) == len(keys[9:]) == 0
    assert keys[:2] == Keys.of(names[:2])
    assert list(keys.where(np.array([True, False, False, True, False]))) == [names[0], names[3]]
    assert keys.rows.shape == (5, KEY_BYTES // 8)
    assert keys.rows[3].tobytes() == names[3]
    with pytest.raises(IndexError):
        keys[5]


def test_a_run_of_slots_is_found_as_one_up_to_its_end() -> None:
    index = KeyIndex()
    index.grow(400)
    index.add(chain(0, 300), np.arange(100, 400))
    assert index.prefix(chain(0, 310)).tolist() == list(range(100, 400))
    assert index.find(chain(250, 310)).tolist() == [*range(350, 400), *[MISSING] * 10]


def test_a_run_ends_where_another_page_lies() -> None:
    index = KeyIndex()
    index.grow(200)
    index.add(chain(0, 100), np.arange(100))
    index.remove(np.array([60]))
    index.add(Keys(key(999)), np.array([60]))
    assert index.prefix(chain(0, 100)).tolist() == list(range(60))
    assert index.find(chain(0, 100)).tolist() == [*range(60), MISSING, *range(61, 100)]


def test_a_slot_that_has_been_given_up_is_not_found_by_the_key_that_it_had() -> None:
    index = KeyIndex()
    index.grow(64)
    index.add(chain(0, 64), np.arange(64))
    index.remove(np.arange(40, 64))
    assert index.prefix(chain(0, 64)).tolist() == list(range(40))


class Index(RuleBasedStateMachine):
    """Chains take slots in runs and in pieces, and give them up, beside a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = 8 * LOOK
        self.index = KeyIndex(self.slots)
        self.index.grow(self.slots)
        self.model: dict[bytes, int] = {}

    @rule(first=st.integers(0, 200), pages=st.integers(1, 5 * LOOK), scattered=st.booleans())
    def pages_come(self, first: int, pages: int, scattered: bool) -> None:
        names = [name for name in chain(first, first + pages) if name not in self.model]
        free = sorted(set(range(self.slots)) - set(self.model.values()), reverse=scattered)
        names = names[: len(free)]
        self.index.add(Keys.of(names), np.array(free[: len(names)], np.int64))
        self.model.update(zip(names, free, strict=False))

    @rule(slots=st.sets(st.integers(0, 8 * LOOK - 1)))
    def pages_go(self, slots: set[int]) -> None:
        going = {name: slot for name, slot in self.model.items() if slot in slots}
        gone = self.index.remove(np.array(list(going.values()), np.int64))
        assert list(gone) == list(going)
        for name in going:
            del self.model[name]

    @invariant()
    def every_key_is_where_it_was_put(self) -> None:
        names = list(chain(0, 300))
        where = [self.model.get(name, MISSING) for name in names]
        assert self.index.find(Keys.of(names)).tolist() == where
        assert [self.index.get(name) for name in names[:9]] == [
            self.model.get(name) for name in names[:9]
        ]
        for first in (0, 150):
            missing = where.index(MISSING, first) if MISSING in where[first:] else len(where)
            assert self.index.prefix(Keys.of(names[first:])).tolist() == where[first:missing]


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 60))
@settings(deadline=None)
def test_an_index_keeps_what_it_has_when_it_grows(steps: list[int], expected: int) -> None:
    index, slots = KeyIndex(expected), 0
    for more in steps:
        index.grow(slots + more)
        index.add(chain(slots, slots + more), np.arange(slots, slots + more))
        slots += more
    assert index.find(chain(0, slots)).tolist() == list(range(slots))
    assert index.keys_of(np.arange(slots)) == chain(0, slots)
