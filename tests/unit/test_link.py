"""The connection to a daemon costs the engine nothing, whatever it cannot have."""

from __future__ import annotations

import socket
from pathlib import Path

from descriptors import descriptors_left
from registrations import REGISTER
from tierd_client.link import Link, LinkState


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
