"""What ranks ask on their lifelines, in orders that no client would choose, of a daemon that is
turned by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from one_process import OneProcess

from tierd.bench.wire_rank import WireRank, WireRankError
from tierd.channel import ChannelClosed
from tierd.control.lifeline_desk import MESSAGES_A_TURN
from tierd.wire import limits, messages


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OneProcess]:
    daemon = OneProcess(tmp_path, devices=1)
    yield daemon
    daemon.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def newcomer(daemon: OneProcess, stack: ExitStack, instance: str = "engine") -> WireRank:
    """A rank that has asked to be let in."""
    rank = WireRank(daemon.state.endpoint.path, instance, 0, 1)
    stack.callback(rank.close)
    return rank


@pytest.fixture
def rank(daemon: OneProcess, stack: ExitStack) -> WireRank:
    """A rank whose four pages the tier has."""
    rank = newcomer(daemon, stack)
    for _ in daemon.turns():
        if any(session.welcomed for session in daemon.state.sessions.values()):
            break
    rank.welcome()
    rank.back_up(KEYS, 4)
    for _ in daemon.turns():
        rank.read(0.0)
        if not rank.in_flight:
            break
    assert rank.kept == 4
    return rank


KEYS = b"".join(n.to_bytes(limits.KEY_BYTES, "little") for n in range(1, 5))


def lookup(number: int, *, rid: str = "r", epoch: str = "") -> messages.Lookup:
    return messages.Lookup(request=number, epoch=epoch, rid=rid, pools=[0], keys=KEYS)


def said(daemon: OneProcess, rank: WireRank, count: int = 1) -> list[messages.ToLifeline]:
    """So many messages that the rank is told."""
    heard: list[messages.ToLifeline] = []
    for _ in daemon.turns():
        heard += [message for message, _ in rank.lifeline.receive()]
        if len(heard) >= count:
            break
    return heard


def longest(answers: list[messages.ToLifeline]) -> list[tuple[int, int]]:
    """(request, longest count) of each of these answers."""
    assert all(isinstance(answer, messages.LookupReply) for answer in answers)
    return [(a.request, max(a.lengths, default=0)) for a in answers]  # type: ignore[union-attr]


def leases(daemon: OneProcess) -> int:
    return sum(len(group.leases) for group in daemon.state.groups.values())


def test_nothing_is_looked_up_before_a_rank_is_welcome(
    daemon: OneProcess, stack: ExitStack
) -> None:
    daemon.settle()
    early = newcomer(daemon, stack)
    for _ in range(3):  # it is let in and heard; its copier has no turn
        daemon.control.turn(time.monotonic())
    (session,) = daemon.state.sessions.values()
    assert not session.welcomed
    early.lifeline.send(lookup(1))
    (refusal,) = said(daemon, early)
    assert isinstance(refusal, messages.Refused)
    assert "not registered" in refusal.reason
    with pytest.raises(ChannelClosed):
        said(daemon, early)
    assert not daemon.state.sessions


def test_what_is_asked_at_once_is_answered_in_its_order(daemon: OneProcess, rank: WireRank) -> None:
    asked = [lookup(1), messages.Cancel(rid="r"), lookup(2), lookup(3, rid="s")]
    for message in [*asked, messages.Cancel(rid="s")]:
        rank.lifeline.send(message)
    assert longest(said(daemon, rank, 3)) == [(1, 4), (2, 4), (3, 4)]
    assert leases(daemon) == 1, "that of the second lookup"


def test_one_that_never_stops_asking_is_answered_in_turns(
    daemon: OneProcess, rank: WireRank
) -> None:
    count = 3 * MESSAGES_A_TURN
    for number in range(count):
        rank.lifeline.send(lookup(number))
    answered: list[messages.ToLifeline] = []
    for _ in daemon.turns():
        before = len(answered)
        answered += [message for message, _ in rank.lifeline.receive()]
        assert len(answered) - before <= MESSAGES_A_TURN
        if len(answered) == count:
            break
    assert longest(answered) == [(number, 4) for number in range(count)]


def test_a_lookup_and_a_reset_that_cross_miss(daemon: OneProcess, rank: WireRank) -> None:
    (session,) = daemon.state.sessions.values()
    rank.lifeline.send(lookup(1, epoch="engine:1"))  # before the reset that it belongs to
    rank.lifeline.send(lookup(2))
    assert longest(said(daemon, rank, 2)) == [(1, 0), (2, 4)]
    rank._say(messages.Reset(epoch="engine:1", next_seq=1))
    for _ in daemon.turns():
        if session.epoch:
            break
    assert leases(daemon) == 0
    rank.lifeline.send(lookup(3))  # after the reset that has ended it
    rank.lifeline.send(lookup(4, epoch="engine:1"))
    assert longest(said(daemon, rank, 2)) == [(3, 0), (4, 0)]
    assert leases(daemon) == 0
    assert daemon.state.counters["errors"] == 0


def test_one_that_leaves_without_its_answer_leaves_no_lease(
    daemon: OneProcess, rank: WireRank
) -> None:
    rank.lifeline.send(lookup(1))
    rank.lifeline.close()
    for _ in daemon.turns():
        if not daemon.state.sessions:
            break
    assert leases(daemon) == 0
    (catalog,) = daemon.state.catalogs.values()
    assert (catalog.pools["kv"].pages, catalog.pools["kv"].held) == (4, 0)


def test_somebody_who_registers_in_its_place_does_not_get_its_question(
    daemon: OneProcess, stack: ExitStack, rank: WireRank
) -> None:
    other = newcomer(daemon, stack)
    daemon.turn()  # it is let in, and what it says comes first
    rank.lifeline.send(lookup(1))
    assert longest(said(daemon, rank)) == [(1, 4)]
    with pytest.raises(WireRankError, match="registered already"):
        other.welcome()


def test_garbage_in_a_frame_costs_nothing_and_out_of_one_the_lifeline(
    daemon: OneProcess, rank: WireRank
) -> None:
    rank.lifeline.send(messages.Pong())  # nothing that a rank says
    rank.lifeline.send(lookup(1))
    error, reply = said(daemon, rank, 2)
    assert isinstance(error, messages.Error)
    assert longest([reply]) == [(1, 4)]
    rank.lifeline._write(b"\xff" * 8, ())
    (refusal,) = said(daemon, rank)
    assert isinstance(refusal, messages.Refused)
    assert not daemon.state.sessions
