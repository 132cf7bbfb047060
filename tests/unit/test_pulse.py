"""Silence is counted from the question on, and not while nobody was listening."""

from __future__ import annotations

from tierd.control.health import STEP_S, Pulse


def test_a_copier_that_answers_is_never_quiet() -> None:
    pulse = Pulse(quiet_s=5.0)
    asked = 0
    for second in range(100):
        asked += pulse.look(float(second))
        pulse.heard()
        assert not pulse.quiet
    assert asked == 100


def test_one_that_says_nothing_is_asked_once_and_falls_quiet_once() -> None:
    pulse = Pulse(quiet_s=5.0)
    looks = [(pulse.look(float(s)), pulse.quiet, pulse.fell_quiet()) for s in range(100, 120)]
    assert [asked for asked, _, _ in looks] == [True] + [False] * 19
    assert [quiet for _, quiet, _ in looks] == [False] * 5 + [True] * 15
    assert [fell for _, _, fell in looks].index(True) == 5
    assert sum(fell for _, _, fell in looks) == 1
    assert pulse.silent_s == 19.0


def test_one_that_answers_again_is_well_and_may_fall_quiet_again() -> None:
    pulse = Pulse(quiet_s=5.0)
    for second in range(100, 110):
        pulse.look(float(second))
    assert pulse.fell_quiet()
    pulse.heard()
    assert (pulse.quiet, pulse.silent_s) == (False, 0.0)
    for second in range(110, 120):
        pulse.look(float(second))
    assert pulse.fell_quiet()


def test_time_in_which_control_itself_was_stopped_does_not_count() -> None:
    pulse = Pulse(quiet_s=5.0)
    pulse.look(100.0)
    pulse.look(101.0)
    pulse.look(1000.0)
    assert pulse.silent_s == 1.0 + STEP_S
    assert not pulse.quiet
