"""A direction under a cap: never faster over any time, and never slower for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierd.copier.pace import BURST_S, Cap

RATE = 1000.0
PIECE = 200


def test_an_idle_direction_has_a_burst_and_no_more() -> None:
    cap = Cap(RATE, now=0.0)
    assert cap.allows(1000.0)
    cap.take(int(RATE * BURST_S))
    assert not cap.allows(1000.0)
    assert cap.allows(1000.001)


def test_a_piece_larger_than_the_burst_goes_and_is_paid_for_afterwards() -> None:
    cap = Cap(RATE, now=0.0)
    cap.take(5000)
    assert not cap.allows(4.9)
    assert cap.allows(5.1)


@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, PIECE)), max_size=60),
)
def test_between_any_two_moments_it_keeps_to_its_rate(steps: list[tuple[float, int]]) -> None:
    cap = Cap(RATE, now=0.0)
    now = 0.0
    sent: list[tuple[float, int]] = []
    for pause, nbytes in steps:
        now += pause
        if cap.allows(now):
            cap.take(nbytes)
            sent.append((now, nbytes))
        else:
            # It owes: what it had at first and was given since is used up.
            assert sum(n for _, n in sent) >= RATE * BURST_S
    for first, (since, _) in enumerate(sent):
        for last in range(first, len(sent)):
            moved = sum(nbytes for _, nbytes in sent[first : last + 1])
            assert moved <= RATE * (sent[last][0] - since + BURST_S) + PIECE + 1e-6


@given(st.lists(st.integers(1, PIECE), min_size=20, max_size=60))
def test_who_always_has_work_gets_all_of_the_rate(pieces: list[int]) -> None:
    cap = Cap(RATE, now=0.0)
    now = 0.0
    for nbytes in pieces:
        while not cap.allows(now):
            now += 0.001
        cap.take(nbytes)
    assert now <= sum(pieces) / RATE + 0.001
