"""Ranks that count alike look at results together, whatever each of them knows by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tierd_client.sglang.plugin.cadence import DRAIN_EVERY, DrainCadence

PENDING = st.lists(st.integers(0, 3), max_size=60)


@given(PENDING)
def test_nobody_looks_without_pending_offloads_and_nobody_waits_longer(pending: list[int]) -> None:
    cadence = DrainCadence(world_size=2)
    waited = 0
    for count in pending:
        due = cadence.due(count)
        waited = waited + 1 if count else 0
        assert due == (waited == DRAIN_EVERY)
        if due:
            waited = 0


@given(PENDING)
def test_a_rank_alone_looks_whenever_something_is_pending(pending: list[int]) -> None:
    cadence = DrainCadence(world_size=1)
    assert [cadence.due(count) for count in pending] == [count > 0 for count in pending]
