"""Ready words come round again: none is taken that somebody still looks at."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from tierd_client.tickets import Tickets

from tierd.wire.layout import TICKETS


def test_the_next_ticket_of_one_in_use_is_its_successor_until_all_are_taken() -> None:
    tickets = Tickets()
    assert tickets.left([]) == TICKETS
    first = tickets.take()
    for left in range(TICKETS - 1, 0, -1):
        assert tickets.left([first, tickets.last]) == left
        assert tickets.take() % TICKETS != first % TICKETS
    assert tickets.left([first]) == 0
    assert tickets.take() % TICKETS == first % TICKETS, "one more would have had its words"


def test_tickets_are_never_0_which_is_what_fresh_words_hold() -> None:
    tickets = Tickets()
    tickets.last = 2**32 - 2
    assert [tickets.take() for _ in range(3)] == [2**32 - 1, 1, 2]
    assert tickets.left([2**32 - 1]) == TICKETS - 1 - 3, "0 counts as taken"


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2 * TICKETS), max_size=20))
def test_whatever_is_in_use_keeps_its_words(last: int, bursts: list[int]) -> None:
    tickets = Tickets()
    tickets.last = last
    in_use: deque[int] = deque()
    for burst in bursts:
        for _ in range(min(burst, tickets.left(in_use))):
            in_use.append(tickets.take())
        assert len({ticket % TICKETS for ticket in in_use}) == len(in_use) <= TICKETS
        for _ in range(len(in_use) // 2):
            in_use.popleft()
