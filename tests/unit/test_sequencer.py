"""The reports of a group's ranks are put in order, and decided once for all of them."""

from __future__ import annotations

import pytest
from offers import offer

from tierd.control.sequencer import Offer, Sequencer

TIMEOUT_S = 2.0


def test_a_number_is_decided_when_every_rank_has_reported_it() -> None:
    sequencer = Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=1000)
    assert sequencer.report(0, 0, offer(1), now=0.0)
    assert sequencer.ready(0.0) is None
    assert sequencer.report(1, 0, offer(1, ring=7), now=0.5)
    ready = sequencer.ready(0.5)
    assert ready is not None
    seq, offers = ready
    assert (seq, {rank: one.parts[0].ring for rank, one in (offers or {}).items()}) == (
        0,
        {0: 0, 1: 7},
    )
    sequencer.decided(0)
    assert sequencer.ready(9.0) is None


def test_numbers_are_decided_in_order_whatever_order_they_come_in() -> None:
    sequencer = Sequencer({0: 0}, TIMEOUT_S, max_pages=1000)
    for seq in (2, 0, 1):
        sequencer.report(0, seq, offer(seq), now=0.0)
    decided = []
    while (ready := sequencer.ready(0.0)) is not None:
        decided.append(ready[0])
        sequencer.decided(ready[0])
    assert decided == [0, 1, 2]


def test_what_one_rank_sheds_is_shed_for_all() -> None:
    sequencer = Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=1000)
    sequencer.report(0, 0, offer(1), now=0.0)
    sequencer.report(1, 0, None, now=0.0)
    assert sequencer.ready(0.0) == (0, None)


def test_a_rank_that_does_not_report_in_time_sheds_for_all_and_is_late_afterwards() -> None:
    sequencer = Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=1000)
    sequencer.report(0, 0, offer(1), now=0.0)
    assert sequencer.ready(TIMEOUT_S - 0.01) is None
    assert sequencer.ready(TIMEOUT_S) == (0, None)
    sequencer.decided(0)
    assert not sequencer.report(1, 0, offer(1), now=TIMEOUT_S)
    assert sequencer.waiting == 0


@pytest.mark.parametrize(
    "theirs",
    [
        offer(1, 2),
        offer(1, epoch="e:1"),
        offer(1, pool="swa"),
        Offer("", offer(1).parts, 1, 0, None),
        Offer("", (), 1, 0, b""),
    ],
    ids=["keys", "epoch", "pool", "parent", "parts"],
)
def test_offers_that_differ_between_ranks_are_shed(theirs: Offer) -> None:
    sequencer = Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=1000)
    sequencer.report(0, 0, offer(1), now=0.0)
    sequencer.report(1, 0, theirs, now=0.0)
    assert sequencer.ready(0.0) == (0, None)


def test_a_duplicate_report_changes_nothing() -> None:
    sequencer = Sequencer({0: 0}, TIMEOUT_S, max_pages=1000)
    sequencer.report(0, 0, offer(1), now=0.0)
    assert sequencer.report(0, 0, None, now=1.0)
    assert sequencer.ready(1.0) == (0, {0: offer(1)})


def test_a_group_begins_where_its_last_rank_begins() -> None:
    sequencer = Sequencer({0: 3, 1: 8}, TIMEOUT_S, max_pages=1000)
    assert not sequencer.report(0, 7, offer(1), now=0.0)
    assert sequencer.report(0, 8, offer(1), now=0.0)


def test_a_rank_that_has_too_much_waiting_sheds_the_rest() -> None:
    sequencer = Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=5)
    for seq in range(3):
        assert sequencer.report(0, seq, offer(1, 2), now=0.0)
        assert sequencer.report(0, seq, offer(1, 2), now=0.0), "a second time, it counts once"
    for seq in range(3):
        sequencer.report(1, seq, offer(1, 2) if seq != 1 else None, now=0.0)
        decided = sequencer.ready(0.0)
        assert decided is not None
        assert (decided[1] is not None) == (seq == 0)
        sequencer.decided(seq)
    for rank in (0, 1):
        sequencer.report(rank, 3, offer(1, 2, 3, 4, 5), now=0.0)
    assert sequencer.ready(0.0) == (3, {0: offer(1, 2, 3, 4, 5), 1: offer(1, 2, 3, 4, 5)})
    sequencer.drop()
    assert sequencer.report(0, 4, offer(1, 2, 3, 4, 5), now=0.0)
    assert sequencer.report(1, 4, offer(1, 2, 3, 4, 5), now=0.0)
    assert sequencer.ready(0.0) == (4, {0: offer(1, 2, 3, 4, 5), 1: offer(1, 2, 3, 4, 5)})


def test_numbers_beyond_what_may_wait_are_too_late() -> None:
    sequencer = Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=1000, max_numbers=2)
    assert sequencer.report(0, 0, None, now=0.0)
    assert sequencer.report(0, 1, None, now=0.0)
    assert not sequencer.report(0, 2, None, now=0.0)
    assert sequencer.report(1, 1, None, now=0.0), "one that waits already is no further one"
    assert sequencer.waiting == 2


def test_numbers_that_are_given_up_do_not_come_back() -> None:
    sequencer = Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=1000)
    for seq in (4, 1):
        sequencer.report(0, seq, offer(1), now=0.0)
    assert sequencer.oldest_s(1.5) == 1.5
    assert sequencer.drop() == [1, 4]
    assert sequencer.oldest_s(9.0) == 0.0
    assert not sequencer.report(1, 4, offer(1), now=0.0)
    assert sequencer.report(1, 5, offer(1), now=0.0)
