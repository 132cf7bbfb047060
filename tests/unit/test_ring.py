"""A rank's ring is given back in order, however its parts are settled."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierd.control.ring import RingLedger


def test_a_part_that_waits_keeps_what_lies_behind_it() -> None:
    ring = RingLedger()
    ring.note("waits", 10)
    ring.note("is copied", 20)
    ring.settle("is copied")
    assert ring.consumed == 0
    ring.settle("waits")
    assert ring.consumed == 20


def test_a_part_that_was_never_noted_changes_nothing() -> None:
    ring = RingLedger()
    ring.note("a", 10)
    ring.settle("shed by another rank")
    assert ring.consumed == 0


@given(st.lists(st.integers(1, 9), max_size=20), st.randoms())
def test_nothing_that_waits_is_ever_given_back(sizes: list[int], random: object) -> None:
    ring = RingLedger()
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for name, end in enumerate(ends):
        ring.note(name, end)
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    waiting = set(order)
    for name in order:
        ring.settle(name)
        waiting.discard(name)
        assert ring.consumed == (ends[min(waiting) - 1] if min(waiting, default=0) else 0) or (
            not waiting and ring.consumed == ends[-1]
        )
