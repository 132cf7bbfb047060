"""A rank's backups from the offer to the ack: in order, each exactly once."""

from __future__ import annotations

import torch
from tierd_client.outbox import Ack, Batch, Outbox
from tierd_client.packing import Counted
from tierd_client.pools import PoolPages

RING = 64


def some(pages: int) -> list[Counted]:
    return [(PoolPages("kv", b"k" * 32 * pages, torch.arange(pages)), pages)]


def offered(*sizes: int) -> Outbox:
    outbox = Outbox(RING)
    for size in sizes:
        outbox.offer(some(size), node_id=10 + outbox.next_seq, parent=b"")
    return outbox


def send(outbox: Outbox, batch: Batch, ticket: int) -> list[int]:
    """Send what fits; returns the numbers that went as tombstones."""
    taken, shed = batch.split(outbox.ring.room())
    end = outbox.ring.head + sum(queued.size for queued in taken)
    outbox.sent(ticket, outbox.next_seq - 1, end, now=float(ticket))
    return [item.seq for item in shed]


def test_acks_come_in_order_whenever_their_outcomes_come() -> None:
    outbox = offered(1, 1, 1)
    outbox.settle(1, b"\1\0")
    assert outbox.acks() == []
    outbox.settle(0, b"\1")
    assert outbox.acks() == [Ack(0, 10, True), Ack(1, 11, True), Ack(2, 12, False)]
    outbox.settle(0, b"\0\0\0")
    assert outbox.acks() == [], "an outcome is told once"


def test_what_finds_no_room_goes_as_a_tombstone_and_room_comes_back_with_the_acks() -> None:
    outbox = offered(RING // 2, RING, 1)
    (batch,) = outbox.batches()
    assert send(outbox, batch, ticket=1) == [1]
    outbox.offer(some(RING), None, None)
    (batch,) = outbox.batches()
    assert send(outbox, batch, ticket=2) == [3], "the ring is in use"
    outbox.settle(0, b"\1\0\1")
    outbox.acks()
    outbox.offer(some(RING), None, None)
    (batch,) = outbox.batches()
    assert send(outbox, batch, ticket=3) == []


def test_a_message_that_was_not_sent_goes_as_tombstones_with_the_next_one() -> None:
    outbox = offered(1, 1)
    (batch,) = outbox.batches()
    outbox.not_sent(batch)
    outbox.offer(some(1), None, None)
    (batch,) = outbox.batches()
    assert batch.shed == [0, 1]
    assert [queued.seq for queued in batch.queued] == [2]
    assert not list(outbox.batches())


def test_a_lost_daemon_fails_all_that_waits_and_the_next_number_is_the_next_offer() -> None:
    outbox = offered(1, 1)
    (batch,) = outbox.batches()
    send(outbox, batch, ticket=1)
    outbox.offer(some(1), None, None)
    assert outbox.first_unsent == 2
    outbox.fail()
    assert [ack.kept for ack in outbox.acks()] == [False, False, False]
    assert outbox.first_unsent == outbox.next_seq == 3
    assert outbox.oldest_s(now=100.0) == 0.0


def test_the_wait_for_acks_is_that_of_the_oldest_message() -> None:
    outbox = offered(1)
    (batch,) = outbox.batches()
    send(outbox, batch, ticket=5)
    outbox.offer(some(1), None, None)
    (batch,) = outbox.batches()
    send(outbox, batch, ticket=9)
    assert outbox.oldest_s(now=11.0) == 6.0
    outbox.settle(0, b"\1")
    outbox.acks()
    assert outbox.oldest_s(now=11.0) == 2.0


def test_what_the_tier_needs_is_asked_for_once() -> None:
    outbox = offered(1, 1)
    outbox.need(1)
    outbox.need(7)
    assert [(need.seq, need.node_id) for need in outbox.needs()] == [(1, 11)]
    assert outbox.needs() == []
