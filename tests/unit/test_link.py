"""The connection to a daemon costs the engine nothing, whatever it cannot have."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from descriptors import descriptors_left
from registrations import REGISTER
from tierd_client.link import QUICK_KEYS_BYTES, UNSENT_BYTES, Link, LinkState

from tierd.channel import Channel, close_all
from tierd.memory.presence import SharedPresence
from tierd.wire import codec, limits, messages

PATIENCE_S = 120.0
Ends = tuple[Link, "Channel[messages.FromLifeline]"]


def test_an_engine_without_a_descriptor_left_serves_on_without_a_tier(tmp_path: Path) -> None:
    path = tmp_path / "tierd.sock"
    link = Link(path, retry_s=1.0)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
        daemon.listen()
        for more in (0, 1):  # none for a socket; one for a socket and none for what it carries
            with descriptors_left(more):
                assert not link.register(REGISTER, [daemon.fileno()], now=0.0)
            assert link.state is LinkState.DOWN
            assert not link.due(0.5), "it pauses before it tries again"
        assert link.register(REGISTER, [daemon.fileno()], now=2.0)
        assert link.state is LinkState.REGISTERING
    link.close()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """A link that is up, and the daemon's end of its lifeline."""
    path = tmp_path / "tierd.sock"
    link, presence, process = (
        Link(path, retry_s=1.0),
        SharedPresence(1 << 20),
        os.pidfd_open(os.getpid()),
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert link.register(REGISTER, [listener.fileno()], now=0.0)
        daemon = Channel(listener.accept()[0], codec.FROM_LIFELINE)
    ((_, fds),) = daemon.wait(PATIENCE_S)
    close_all(fds)
    welcome = messages.Welcome(
        protocol=limits.PROTOCOL_VERSION, software="", routing_id=bytes(16), lease_s=30.0
    )
    daemon.send(welcome, [process, process, presence.fd])
    assert link.poll(0.0)
    assert (link.state, link.poll(0.0)) == (LinkState.UP, False)
    yield link, daemon
    link.close()
    daemon.close()
    presence.close()
    os.close(process)


def lookup(number: int, pages: int = 1) -> messages.Lookup:
    keys = bytes(limits.KEY_BYTES * pages)
    return messages.Lookup(request=number, epoch="", rid="r", pools=[0], keys=keys)


def answer(number: int) -> messages.LookupReply:
    return messages.LookupReply(request=number, lengths=[1], lease_s=30.0)


def test_the_answer_of_a_lookup_that_was_given_up_is_not_that_of_the_next(ends: Ends) -> None:
    link, daemon = ends
    first, second = lookup(1), lookup(2)
    assert link.ask(first)
    assert link.ask(second)
    assert [message for message, _ in daemon.wait(PATIENCE_S)] == [first, second]
    daemon.send(answer(1))
    link.wait(PATIENCE_S, 0.0)
    assert link.reply(second) is None
    daemon.send(answer(2))
    link.wait(PATIENCE_S, 0.0)
    assert link.reply(second) == answer(2)


def test_no_lookup_waits_behind_one_that_the_daemon_does_not_read(ends: Ends) -> None:
    link, daemon = ends
    large, cancel = lookup(1, (1 << 20) // limits.KEY_BYTES), messages.Cancel(rid="r")
    assert link.ask(large), "it is on its way, as far as the socket takes it"
    assert not link.ask(lookup(2))
    link.cancel("r")
    received: list[messages.Message] = []
    while len(received) < 2:
        received += [message for message, _ in daemon.receive()]
        link.wait(0.0, 0.0)  # writes the rest
    assert received == [large, cancel]
    assert link.ask(lookup(3))
    link.cancel("r")
    while len(received) < 4:
        received += [message for message, _ in daemon.wait(PATIENCE_S)]
    assert received[2:] == [lookup(3), cancel]


def restore(pages: int) -> messages.Restore:
    return messages.Restore(
        epoch="",
        number=1,
        entry=0,
        generation=1,
        ticket=1,
        fence=0,
        items=[messages.RestoreItem("r", [messages.Part(0, pages, 0)])],
        keys=bytes(limits.KEY_BYTES * pages),
    )


def test_a_restore_takes_the_way_that_has_room_for_all_of_it(ends: Ends, tmp_path: Path) -> None:
    link, daemon = ends
    small, large = restore(QUICK_KEYS_BYTES // limits.KEY_BYTES), restore(100_000)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{tmp_path}/tierd.sock.zmq")
        router.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))

        def heard() -> messages.FromClient:
            return codec.FROM_CLIENT.decode(router.recv_multipart()[1])

        assert link.restore(small)
        assert [message for message, _ in daemon.wait(PATIENCE_S)] == [small]
        assert link.restore(large)
        assert heard() == large
        assert link.ask(lookup(1, pages=100_000)), "more than the socket takes at once"
        assert link.restore(small)
        assert heard() == small, "nothing waits behind what the daemon does not read"


def test_a_restore_that_nobody_can_be_asked_for_has_failed_at_once(ends: Ends) -> None:
    link, daemon = ends
    daemon.close()
    assert link.state is LinkState.UP, "nobody has looked yet"
    assert not link.restore(restore(1))
    assert not link.restore(restore(100_000))
    assert link.ask(lookup(1)), "whose answer does not come"
    link.cancel("r")
    assert link.poll(0.0)
    assert link.state is LinkState.DOWN


def test_cancels_that_the_daemon_does_not_read_are_bounded(ends: Ends) -> None:
    link, daemon = ends
    name = "r" * limits.MAX_NAME
    for _ in range(2 * UNSENT_BYTES // limits.MAX_NAME):
        link.cancel(name)
    assert link._lifeline is not None
    assert UNSENT_BYTES < link._lifeline.queued < UNSENT_BYTES + 4 * limits.MAX_NAME
    assert link.state is LinkState.UP
    received = daemon.wait(PATIENCE_S)
    assert {message for message, _ in received} == {messages.Cancel(rid=name)}


def test_what_the_daemon_makes_no_sense_of_reaches_the_client(ends: Ends) -> None:
    link, daemon = ends
    daemon.send(messages.Error(reason="no"))
    link.wait(PATIENCE_S, 0.0)
    assert link.receive() == [messages.Error(reason="no")]
    assert link.receive() == []


def test_a_daemon_that_goes_while_a_lookup_waits_is_noticed(ends: Ends) -> None:
    link, daemon = ends
    assert link.ask(lookup(1))
    daemon.close()
    link.wait(PATIENCE_S, 0.0)
    assert link.state is LinkState.DOWN
    assert not link.ask(lookup(2))


def test_a_daemon_that_has_gone_before_the_lookup_is_noticed(ends: Ends) -> None:
    link, daemon = ends
    daemon.close()
    assert link.ask(lookup(1)), "an answer has to be waited for to find out"
    link.wait(PATIENCE_S, 0.0)
    assert (link.state, link.reply(lookup(1))) == (LinkState.DOWN, None)


def test_a_copier_that_is_replaced_while_a_lookup_waits_is_noticed(
    ends: Ends,
) -> None:
    link, daemon = ends
    process = os.pidfd_open(os.getpid())
    first = link.copier
    daemon.send(messages.CopierReplaced(), [process])
    link.wait(60.0, 0.0)
    assert link.copier is not first
    assert link.poll(0.0), "whoever watches the copier is told"
    assert not link.poll(0.0)
    daemon.close()
    link.wait(60.0, 0.0)
    assert (link.state, link.poll(0.0)) == (LinkState.DOWN, True)
    os.close(process)
