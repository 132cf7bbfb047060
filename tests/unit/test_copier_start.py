"""A copier whose process cannot be made: one that is tried again, not the end of the daemon."""

from __future__ import annotations

import sys

import pytest
from descriptors import open_descriptors, opened_since

from tierd.control.copiers import MAX_RESTART_S, Copier, CopierState
from tierd.control.deadlines import Deadlines


def test_a_copier_that_cannot_be_started_is_tried_again_later_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copier = Copier("host:0", Deadlines())
    before = open_descriptors()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")  # as during an upgrade
    now, pauses = 100.0, []
    for _ in range(1100):  # for hours
        copier.start(now)
        assert copier.state is CopierState.DEAD
        assert copier.channel is None
        pauses.append(round(copier.restart_at - now, 3))
        now = copier.restart_at
    assert pauses == sorted(pauses)
    assert pauses[0] > 0.0
    assert pauses[-1] == MAX_RESTART_S
    assert opened_since(before) == [], "no descriptor is left"

    monkeypatch.undo()
    copier.start(now)
    assert copier.state is CopierState.STARTING
    copier.stop(10.0)
    assert opened_since(before) == []
