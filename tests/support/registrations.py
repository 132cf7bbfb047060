"""The smallest registration that a daemon would look at."""

from __future__ import annotations

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
"""One rank with one pool of one page of one byte."""
