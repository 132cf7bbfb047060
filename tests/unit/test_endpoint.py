"""The daemon's socket files: one daemon has them at a time, and takes only its own away."""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
from descriptors import descriptors_left
from zmq.utils.monitor import recv_monitor_message

from tierd.control.endpoint import Endpoint
from tierd.wire import limits
from tierd.wire.errors import ConfigError

PATIENCE_MS = 120_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def unread_client(endpoint: Endpoint, stack: ExitStack) -> zmq.Socket[bytes]:
    """A client that reads nothing: what was sent to it holds the endpoint's end up, until it is
    closed."""
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    dealer = context.socket(zmq.DEALER)
    stack.callback(dealer.close, 0)
    dealer.setsockopt(zmq.IDENTITY, b"slow")
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(f"ipc://{endpoint.path}.zmq")
    dealer.send(b"hello")
    assert endpoint.router.poll(PATIENCE_MS)
    route, _ = endpoint.router.recv_multipart()
    for _ in range(100):
        endpoint.router.send_multipart([route, bytes(1 << 20)])
    return dealer


def test_an_endpoint_that_ends_leaves_no_file(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "tierd.sock")
    assert {file.name for file in tmp_path.iterdir()} == {"tierd.sock", "tierd.sock.zmq"}
    endpoint.close()
    endpoint.close()
    assert not list(tmp_path.iterdir())


def test_the_file_that_a_successor_waits_for_is_the_last_to_go(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path / "tierd.sock")
    left: list[set[str]] = []

    def removal(event: str, args: tuple[object, ...]) -> None:
        if event == "os.remove" and str(args[0]) == str(endpoint.path):
            left.append({file.name for file in tmp_path.iterdir()})

    sys.addaudithook(removal)
    endpoint.close()
    assert left == [{"tierd.sock"}]


def test_a_client_that_was_cut_off_is_heard_again_however_long_nobody_listened(
    tmp_path: Path, stack: ExitStack
) -> None:
    endpoint = Endpoint(tmp_path / "tierd.sock")
    stack.callback(endpoint.close)
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, b"name")
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    for close in (dealer.close, monitor.close, dealer.disable_monitor):
        stack.callback(close)
    dealer.connect(f"ipc://{endpoint.path}.zmq")
    assert monitor.poll(PATIENCE_MS)
    recv_monitor_message(monitor)
    dealer.send(b"first")
    assert endpoint.router.poll(PATIENCE_MS)
    assert list(endpoint.receive(9)) == [(b"name", b"first")]
    dealer.send(bytes(2 * limits.MAX_MESSAGE_BYTES + 1))
    assert monitor.poll(PATIENCE_MS), "it connects again"
    dealer.send(b"second")
    assert endpoint.router.poll(PATIENCE_MS)
    assert list(endpoint.receive(9)) == [(b"name", b"second")]


def test_a_live_endpoint_is_not_taken_over(tmp_path: Path, stack: ExitStack) -> None:
    first = Endpoint(tmp_path / "tierd.sock")
    stack.callback(first.close)
    with pytest.raises(ConfigError, match="a daemon serves"):
        Endpoint(tmp_path / "tierd.sock")
    assert len(list(tmp_path.iterdir())) == 2


def test_an_endpoint_that_takes_its_time_to_end_leaves_its_successor_alone(
    tmp_path: Path, stack: ExitStack
) -> None:
    old = Endpoint(tmp_path / "tierd.sock")
    client = unread_client(old, stack)
    ending = threading.Thread(target=old.close, args=(10 * PATIENCE_MS / 1000,))
    ending.start()
    stack.callback(ending.join)
    new = None
    while new is None:
        try:
            new = Endpoint(tmp_path / "tierd.sock")
        except ConfigError:
            assert ending.is_alive(), "it was over before its successor began"
    stack.callback(new.close)
    assert ending.is_alive(), "the two overlap"
    client.close(0)
    ending.join(PATIENCE_MS / 1000)
    assert not ending.is_alive()
    assert {file.name for file in tmp_path.iterdir()} == {"tierd.sock", "tierd.sock.zmq"}


def test_without_a_descriptor_left_who_connects_is_turned_away_and_does_not_keep_the_loop_busy(
    tmp_path: Path, stack: ExitStack
) -> None:
    endpoint = Endpoint(tmp_path / "tierd.sock")
    stack.callback(endpoint.close)
    early, late = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
    early.settimeout(PATIENCE_MS / 1000)
    early.connect(str(endpoint.path))
    listening = select.poll()
    listening.register(endpoint.listener, select.POLLIN)
    assert listening.poll(PATIENCE_MS)
    with descriptors_left(0):
        assert list(endpoint.accept()) == []
    assert early.recv(1) == b"", "it is told to come again, rather than left waiting"
    assert not listening.poll(0)
    late.connect(str(endpoint.path))
    assert listening.poll(PATIENCE_MS)
    (channel,) = endpoint.accept()
    channel.close()
