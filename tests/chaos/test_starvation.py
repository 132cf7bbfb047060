"""A daemon all of whose memory others use a little of, for ever: an engine that comes last is
served all the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import msgspec
import pytest
from flushes import Row, columns
from fuzz_ranks import TICKET, FuzzRank, HonestEngine, key
from one_process import CHUNKS, OneProcess

from tierd.wire import messages
from tierd.wire.messages import Part

PAGES = 4
OFTEN = 0.05
"""Patience: leases last for 1.5 s."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OneProcess]:
    daemon = OneProcess(tmp_path, patience=OFTEN)
    yield daemon
    daemon.close()


class Squatters:
    """Engines of models of their own, whose pools have a chunk each, all there are, and few pages
    in it; which they look up again and again."""

    def __init__(self, daemon: OneProcess) -> None:
        self._daemon = daemon
        self._numbers = count(1)
        self._ranks = [FuzzRank(daemon, f"squatter {n}.0", 0, 1) for n in "abcd"]
        assert 2 * len(self._ranks) == CHUNKS
        self._keys = b"".join(key(0, page) for page in range(PAGES))
        row = Row(0, [Part(0, PAGES, 0), Part(1, PAGES, PAGES)], b"")
        flush = messages.Flush(
            epoch="", ticket=TICKET, fence=0, keys=self._keys * 2, **columns([row])
        )
        for rank in self._ranks:
            assert isinstance(rank.register(), messages.Welcome)
            rank.say(msgspec.msgpack.encode(flush))
            assert rank.await_reply(messages.Acks).results == b"\1"

    def lease(self) -> None:
        """Another request of each asks for the same pages."""
        for rank in self._ranks:
            number = next(self._numbers)
            lookup = messages.Lookup(
                request=number, epoch="", rid=f"r{number}", pools=[0, 1], keys=self._keys
            )
            rank.ask(msgspec.msgpack.encode(lookup))
            rank.hear()

    def have_all(self) -> bool:
        """Has each of them a lease, and is no memory left?"""
        store, groups = self._daemon.state.room.store, self._daemon.state.groups
        leased = all(len(groups[rank.instance].leases) > 0 for rank in self._ranks)
        return leased and store.claimed_bytes == store.budget_bytes

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


def test_leases_of_others_that_never_end_keep_no_engine_from_being_served(
    daemon: OneProcess,
) -> None:
    squatters = Squatters(daemon)
    engine = HonestEngine(daemon)
    for _ in daemon.turns():
        squatters.lease()
        if squatters.have_all():
            break
    engine.round_trip(meanwhile=squatters.lease)
    engine.close()
    squatters.close()
