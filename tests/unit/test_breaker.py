"""A daemon that hangs costs one time-out, and a heart that beats is asked again."""

from __future__ import annotations

import pytest
from tierd_client.breaker import STALE_S, Breaker

TIMEOUT_S = 0.2


@pytest.fixture
def breaker() -> Breaker:
    breaker = Breaker(TIMEOUT_S)
    breaker.connected(now=100.0, beat_s=99.9)
    return breaker


def test_a_heart_that_has_stopped_is_not_asked(breaker: Breaker) -> None:
    assert not breaker.is_open(now=100.0 + STALE_S - 0.2, beat_s=99.9)
    assert breaker.is_open(now=100.2 + STALE_S, beat_s=99.9)
    assert not breaker.is_open(now=100.2 + STALE_S, beat_s=100.1 + STALE_S)


def test_whoever_waits_long_for_an_answer_takes_a_heart_for_dead_no_sooner() -> None:
    breaker = Breaker(4 * STALE_S)
    breaker.connected(now=100.0, beat_s=99.9)
    assert not breaker.is_open(now=99.9 + 4 * STALE_S, beat_s=99.9)
    assert breaker.is_open(now=100.2 + 4 * STALE_S, beat_s=99.9)


def test_one_that_answers_late_is_asked_again_after_a_while(breaker: Breaker) -> None:
    mute_s = breaker.timed_out(now=101.0, beat_s=100.9)
    assert breaker.is_open(now=101.0 + mute_s - 0.01, beat_s=101.2)
    assert not breaker.is_open(now=101.0 + mute_s, beat_s=101.2)


def test_one_that_has_not_beaten_since_it_let_a_question_time_out_is_not_asked(
    breaker: Breaker,
) -> None:
    breaker.timed_out(now=101.0, beat_s=100.9)
    assert breaker.is_open(now=104.0, beat_s=100.9)
    assert not breaker.is_open(now=104.0, beat_s=103.9)


def test_whoever_lets_questions_time_out_is_asked_less_and_less(breaker: Breaker) -> None:
    pauses = [breaker.timed_out(now=101.0, beat_s=100.9) for _ in range(10)]
    assert pauses == sorted(pauses)
    assert 1.0 < pauses[-1] <= 10.0
    breaker.answered()
    assert breaker.timed_out(now=150.0, beat_s=149.9) == pauses[0]


def test_clocks_of_two_time_namespaces_are_compared_by_what_they_show(breaker: Breaker) -> None:
    breaker.connected(now=100.0, beat_s=5000.0)
    assert not breaker.is_open(now=101.0, beat_s=5000.5)
    assert breaker.is_open(now=102.0 + STALE_S, beat_s=5000.5)
    breaker.connected(now=100.0, beat_s=3.0)
    assert not breaker.is_open(now=101.0, beat_s=3.5)
    assert breaker.is_open(now=102.0 + STALE_S, beat_s=3.5)


def test_another_daemon_begins_anew(breaker: Breaker) -> None:
    breaker.timed_out(now=101.0, beat_s=100.9)
    breaker.connected(now=101.1, beat_s=101.0)
    assert not breaker.is_open(now=101.1, beat_s=101.0)
