"""A client comes into being whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zmq
from descriptors import descriptors_left, open_descriptors, opened_since
from tierd_client import DeviceBuffer, DevicePool, TierClient
from tierd_client.segment import create_segment
from tierd_client.watchdog import Watchdog

from tierd.wire.errors import ConfigError, RefusedError
from tierd.wire.layout import SegmentSpec

KINDS = ("memfd:tierd-segment", "pidfd", "torch")
"""What a client opens: its segment, itself, its tensors' memory."""

KV = torch.zeros(8, 16)


def make(socket: str = "/nobody/there", rows: torch.Tensor = KV) -> TierClient:
    pool = DevicePool("kv", 1, [DeviceBuffer(rows, layer=0)])
    return TierClient(socket, [pool], namespace={"model": "m"}, instance="engine")


@pytest.mark.parametrize("kind", KINDS)
def test_without_enough_descriptors_none_is_kept(kind: str) -> None:
    make().close()  # the tensors are in shared memory from now on
    before = open_descriptors(kind)
    failures = 0
    for more in range(64):
        with descriptors_left(more):
            try:
                client = make()
            except (OSError, zmq.ZMQError):
                client = None
        if client is not None:
            break
        failures += 1
        assert opened_since(before, kind) == []
    assert client is not None
    assert failures >= len(KINDS)
    assert opened_since(before, kind), "a client has one of these"
    client.close()
    del client  # the segment stays mapped for as long as somebody could look at its words
    assert opened_since(before, kind) == []


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (lambda: make("tcp://10.0.0.1:5000"), ConfigError),
        (lambda: make(rows=KV.t()), RefusedError),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_is_refused_leaves_nothing_open(
    kind: str, attempt: Callable[[], TierClient], error: type[Exception]
) -> None:
    before = open_descriptors(kind)
    with pytest.raises(error):
        attempt()
    assert opened_since(before, kind) == []


def test_every_token_slot_of_a_rank_finds_room_in_its_ring_for_restores() -> None:
    slots = 3 << 19
    client = make(rows=torch.zeros(slots, 1, dtype=torch.uint8))
    assert client._segment.spec.restore_ring == slots
    client.close()


def test_a_watchdog_that_cannot_be_started_keeps_nothing() -> None:
    segment = create_segment(SegmentSpec())
    before = open_descriptors("memfd:tierd-segment")
    for more in (1, 2, 3):
        with descriptors_left(more), pytest.raises(OSError, match="Too many open files"):
            Watchdog(segment.fd)
        assert opened_since(before, "memfd:tierd-segment") == []
    segment.close()
