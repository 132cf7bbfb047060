"""Who connects and says nothing is hung up on; whoever has said something is not."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from one_process import OneProcess

from tierd.bench.wire_rank import WireRank
from tierd.channel import Channel, ChannelClosed
from tierd.control.backups import STEP_PAGES
from tierd.wire import codec, limits, messages

TURNS = 10_000


class Clock:
    """The daemon's, which stands still unless it is put forward."""

    def __init__(self, daemon: OneProcess) -> None:
        self._daemon = daemon
        self._now = time.monotonic()

    def turn(self) -> None:
        self._daemon.control.turn(self._now)
        for copier in self._daemon.copiers:
            copier.worker.turn()

    def forward(self, seconds: float) -> None:
        self._now += seconds
        self.turn()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OneProcess]:
    daemon = OneProcess(tmp_path, devices=1)
    yield daemon
    daemon.close()


def connect(daemon: OneProcess) -> Channel[messages.ToLifeline]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(daemon.state.endpoint.path))
    return Channel(sock, codec.TO_LIFELINE)


def hung_up(channel: Channel[messages.ToLifeline]) -> bool:
    try:
        channel.receive()
        return channel.closed
    except ChannelClosed:
        return True


def heard(channel: Channel[messages.ToLifeline], clock: Clock) -> messages.ToLifeline:
    for _ in range(TURNS):
        clock.turn()
        if received := channel.receive():
            return received[0][0]
    raise AssertionError("no answer came")


STATUS = messages.StatusRequest(protocol=limits.PROTOCOL_VERSION)


def test_who_says_nothing_or_never_ends_a_message_is_hung_up_on(daemon: OneProcess) -> None:
    clock, patience_s = Clock(daemon), daemon.state.deadlines.stranger_s
    mute = connect(daemon)
    half = connect(daemon)
    os.write(half.fileno(), codec.frame(codec.encode(STATUS))[:-1])
    clock.turn()
    clock.forward(0.9 * patience_s)
    assert not hung_up(mute)
    assert not hung_up(half)
    clock.forward(0.2 * patience_s)
    assert hung_up(mute)
    assert hung_up(half), "bytes are no message"


def test_an_admin_that_has_asked_once_may_ask_again_whenever_it_likes(daemon: OneProcess) -> None:
    clock = Clock(daemon)
    with closing(connect(daemon)) as admin:
        for _ in range(3):
            admin.send(STATUS)
            assert isinstance(heard(admin, clock), messages.Status)
            clock.forward(10 * daemon.state.deadlines.stranger_s)


@pytest.fixture
def rank(daemon: OneProcess) -> Iterator[WireRank]:
    rank = WireRank(daemon.state.endpoint.path, "engine", 0, 1)
    for _ in daemon.turns():
        if any(session.welcomed for session in daemon.state.sessions.values()):
            break
    rank.welcome()
    yield rank
    rank.close()


def test_a_rank_may_be_silent_on_its_lifeline_for_ever(daemon: OneProcess, rank: WireRank) -> None:
    clock = Clock(daemon)
    clock.forward(100 * daemon.state.deadlines.stranger_s)
    assert len(daemon.state.sessions) == 1
    assert not rank.lifeline.receive(), "nothing has come, its end neither"


def test_an_order_that_takes_long_is_answered(daemon: OneProcess, rank: WireRank) -> None:
    pages = 10 * STEP_PAGES
    rank.back_up(b"".join(n.to_bytes(limits.KEY_BYTES, "little") for n in range(pages)), pages)
    for _ in daemon.turns():
        rank.read(0.0)
        if not rank.in_flight:
            break
    assert rank.kept == pages
    clock = Clock(daemon)
    with closing(connect(daemon)) as admin:
        admin.send(messages.ClearRequest(protocol=limits.PROTOCOL_VERSION))
        for _ in range(5):
            clock.forward(daemon.state.deadlines.stranger_s)
            assert not admin.receive(), "it is still at work"
        assert heard(admin, clock) == messages.Done(detail={"pages": pages})
