"""A registration, or a change of epoch, that fails half way has left nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from fuzz_ranks import FuzzRank
from one_process import OneProcess

from tierd.control import members
from tierd.wire import messages
from tierd.wire.messages import Allocation, BufferSpec, PoolSpec

MEMORY = 1 << 50
"""A budget, of which nothing is touched. Account of all pages of 8 bytes that would fit into it
takes more than a process has addresses for."""
LARGE = 32 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OneProcess]:
    daemon = OneProcess(tmp_path, devices=1, memory_bytes=MEMORY)
    yield daemon
    daemon.close()


def pool(name: str, offset: int, row_bytes: int) -> PoolSpec:
    buffer = BufferSpec(
        allocation=0, offset=offset, page_stride=row_bytes, row_bytes=row_bytes, layer=0
    )
    return PoolSpec(name=name, num_pages=1, page_tokens=1, buffers=[buffer])


def test_a_rank_whose_second_pool_cannot_be_kept_account_of_is_refused_whole(
    daemon: OneProcess,
) -> None:
    rank = FuzzRank(daemon, "engine", 0, 1)
    os.ftruncate(rank.fd, LARGE + 8)
    pools = [pool("kv", 0, LARGE), pool("tiny", LARGE, 8)]
    whole = msgspec.structs.replace(
        rank.registration(), allocations=[Allocation(size=LARGE + 8)], pools=pools
    )
    answer = rank.register(whole)
    assert isinstance(answer, messages.Refused)
    assert "pages so small" in answer.reason
    state = daemon.state
    assert [state.sessions, state.groups, state.catalogs, state.by_route] == [{}] * 4
    # The same engine, on the same connection, with what can be served.
    answer = rank.register(msgspec.structs.replace(whole, pools=pools[:1]))
    assert isinstance(answer, messages.Welcome)
    rank.close()


def test_ranks_that_are_more_than_their_copier_can_be_told_of_are_refused_and_others_served(
    daemon: OneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MOST_TOLD", 5)
    first, second, third = (FuzzRank(daemon, f"engine{n}", 0, 1) for n in range(3))
    large = [pool("kv", 0, 4 << 20)]
    for rank, welcome in ((first, True), (second, True), (third, False)):
        answer = rank.register(msgspec.structs.replace(rank.registration(), pools=large))
        assert isinstance(answer, messages.Welcome) == welcome
    first.close()
    answer = third.register(msgspec.structs.replace(third.registration(), pools=large))
    assert isinstance(answer, messages.Welcome), "there is room again"
    for rank in (second, third):
        rank.close()
