"""The connection to a daemon costs the engine nothing, whatever it cannot have."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from descriptors import descriptors_left
from registrations import REGISTER
from tierd_client.link import Link, LinkState

from tierd.channel import Channel
from tierd.memory.presence import SharedPresence
from tierd.wire import codec, limits, messages


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


def test_a_copier_that_is_replaced_while_a_lookup_waits_is_noticed(tmp_path: Path) -> None:
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
    welcome = messages.Welcome(
        protocol=limits.PROTOCOL_VERSION, software="", routing_id=bytes(16), lease_s=30.0
    )
    daemon.send(welcome, [process, process, presence.fd])
    assert link.poll(0.0)
    assert (link.state, link.poll(0.0)) == (LinkState.UP, False)
    first = link.copier
    daemon.send(messages.CopierReplaced(), [process])
    link.wait(60.0, 0.0)
    assert link.copier is not first
    assert link.poll(0.0), "whoever watches the copier is told"
    assert not link.poll(0.0)
    daemon.close()
    link.wait(60.0, 0.0)
    assert (link.state, link.poll(0.0)) == (LinkState.DOWN, True)
    link.close()
    presence.close()
    os.close(process)
