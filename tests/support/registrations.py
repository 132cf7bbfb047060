"""The smallest registration that a daemon would look at, and the largest."""

from __future__ import annotations

from tierd.wire import limits
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


def largest() -> Register:
    """As much as the schema lets a rank say, in numbers and characters that take most bytes. It
    would be refused for what it says."""
    wide = "\U0001f5c2"
    buffers = [
        BufferSpec(
            allocation=limits.MAX_ALLOCATIONS - 1,
            offset=limits.MAX_BYTES,
            page_stride=limits.MAX_BYTES,
            row_bytes=limits.MAX_BYTES,
            layer=limits.MAX_BUFFERS - 1,
        )
    ] * (limits.MAX_BUFFERS_OF_RANK // limits.MAX_POOLS)
    return Register(
        protocol=PROTOCOL_VERSION,
        software=wide * limits.MAX_NAME,
        instance=wide * limits.MAX_NAME,
        rank=limits.MAX_WORLD_SIZE - 1,
        world_size=limits.MAX_WORLD_SIZE,
        namespace={wide * (limits.MAX_NAME - 2) + f"{n:02}": wide * 4096 for n in range(64)},
        epoch=wide * limits.MAX_NAME,
        device=wide * limits.MAX_NAME,
        pid=2**32 - 1,
        next_seq=2**63 - 1,
        allocations=[Allocation(size=limits.MAX_BYTES, handle=bytes(64))] * limits.MAX_ALLOCATIONS,
        pools=[
            PoolSpec(
                name=wide * (limits.MAX_NAME - 2) + f"{n:02}",
                num_pages=2**40,
                page_tokens=2**20,
                window=2**20,
                replicated=True,
                buffers=buffers,
            )
            for n in range(limits.MAX_POOLS)
        ],
        supplies=True,
    )
