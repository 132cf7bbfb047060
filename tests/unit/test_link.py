"""The connection to a daemon costs the engine nothing, whatever it cannot have."""

from __future__ import annotations

import socket
from pathlib import Path

from descriptors import descriptors_left
from tierd_client.link import Link, LinkState

from tierd.wire.limits import PROTOCOL_VERSION
from tierd.wire.messages import Allocation, BufferSpec, PoolSpec, Register

REGISTER = Register(
    protocol=PROTOCOL_VERSION,
    software="",
    instance="engine",
    rank=0,
    world_size=1,
    namespace={},
    epoch="",
    device="host:0",
    pid=1,
    next_seq=0,
    allocations=[Allocation(size=1)],
    pools=[
        PoolSpec(
            name="kv",
            num_pages=1,
            page_tokens=1,
            buffers=[BufferSpec(allocation=0, offset=0, page_stride=1, row_bytes=1, layer=0)],
        )
    ],
)


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
