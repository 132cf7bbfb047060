"""A rank's backups from the offer to the ack: in order, each exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tierd_client import outbox as outboxes
from tierd_client.outbox import Ack, Batch, Outbox
from tierd_client.packing import Pools, keys_to_send, share_keys

RING = 64
POOLS = Pools({"kv": 1, "swa": 1})


def offer(outbox: Outbox, *sizes: int) -> None:
    """Nodes of so many pages, split between two pools."""
    halves = [half for size in sizes for half in (size // 2, size - size // 2)]
    keys = [b"k" * 32 * half for half in halves]
    parts = POOLS.parts(["kv", "swa"] * len(sizes), keys, [torch.arange(half) for half in halves])
    node_ids = [10 + outbox.next_seq + i for i in range(len(sizes))]
    outbox.offer(parts, [2] * len(sizes), node_ids, [b""] * len(sizes))


def offered(*sizes: int) -> Outbox:
    outbox = Outbox(RING)
    offer(outbox, *sizes)
    return outbox


def send(outbox: Outbox, batch: Batch, ticket: int) -> list[int]:
    """Send what fits; returns the numbers that went as tombstones."""
    shed, nodes = batch.split(outbox.ring.room())
    assert sorted(shed + nodes.seqs) == sorted(batch.shed + batch.nodes.seqs)
    assert sum(nodes.counts) == len(nodes.parts.pages) == len(nodes.parts.slots)
    end = outbox.ring.head + sum(nodes.parts.pages)
    outbox.sent(ticket, outbox.next_seq - 1, end, now=float(ticket))
    return shed


NODE = st.tuples(st.integers(1, 4), st.integers(0, 5))
"""Pages, and pages of its window."""


@given(steps=st.lists(st.lists(NODE, max_size=4), max_size=4), room=st.integers(0, 150))
def test_each_part_names_its_own_keys_whichever_others_are_sent(
    steps: list[list[tuple[int, int]]], room: int
) -> None:
    outbox = Outbox(RING)
    wanted: list[list[str]] = []
    for step in steps:
        names: list[str] = []
        keys: list[list[str]] = []
        counts = []
        for pages, window in step:
            chain = [f"{len(wanted):032x}{page:032x}" for page in range(pages)]
            # A window of more pages than the node has keys of its own.
            last = chain[pages - window :] if window <= pages else [f"{window:064x}"] * window
            mine = [chain, last] if window else [chain]
            names += ["kv", "swa"][: len(mine)]
            keys += mine
            counts.append(len(mine))
            wanted.append(["".join(some) for some in mine])
        parts = POOLS.parts(names, list(keys), [torch.arange(len(some)) for some in keys])
        outbox.offer(share_keys(parts, counts), counts, [None] * len(counts), [None] * len(counts))
    sent = []
    for batch in outbox.batches():
        shed, nodes = batch.split(room)
        assert not shed or sum(len(part) for node in wanted for part in node) > 64 * room
        blob, first = keys_to_send(nodes.parts.keys), iter(nodes.parts.first)
        assert isinstance(blob, str)
        sent += nodes.seqs + shed
        for seq in nodes.seqs:
            for digits in wanted[seq]:
                at = 64 * next(first)
                assert blob[at : at + len(digits)] == digits
    assert sorted(sent) == list(range(len(wanted)))


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
    offer(outbox, RING)
    (batch,) = outbox.batches()
    assert send(outbox, batch, ticket=2) == [3], "the ring is in use"
    outbox.settle(0, b"\1\0\1")
    outbox.acks()
    offer(outbox, RING)
    (batch,) = outbox.batches()
    assert send(outbox, batch, ticket=3) == []


def test_a_message_that_was_not_sent_goes_as_tombstones_with_the_next_one() -> None:
    outbox = offered(1, 1)
    (batch,) = outbox.batches()
    outbox.not_sent(batch)
    offer(outbox, 1)
    (batch,) = outbox.batches()
    assert batch.shed == [0, 1]
    assert batch.nodes.seqs == [2]
    assert not list(outbox.batches())


def test_tombstones_stand_among_the_backups_in_the_order_of_their_numbers() -> None:
    outbox = offered(2, RING + 1, 3, 4)
    (batch,) = outbox.batches()
    shed, nodes = batch.split(RING)
    rows = nodes.with_tombstones(shed)
    assert (rows.seqs, rows.counts) == ([0, 1, 2, 3], [2, 0, 2, 2])
    assert rows.parents == [b"", None, b"", b""]
    assert rows.parts is nodes.parts
    assert nodes.with_tombstones([]) is nodes


def test_a_lost_daemon_fails_all_that_waits_and_the_next_number_is_the_next_offer() -> None:
    outbox = offered(1, 1)
    (batch,) = outbox.batches()
    send(outbox, batch, ticket=1)
    offer(outbox, 1)
    assert outbox.first_unsent == 2
    outbox.fail()
    assert [ack.kept for ack in outbox.acks()] == [False, False, False]
    assert outbox.first_unsent == outbox.next_seq == 3
    assert outbox.oldest_s(now=100.0) == 0.0


def test_the_wait_for_acks_is_that_of_the_oldest_message() -> None:
    outbox = offered(1)
    (batch,) = outbox.batches()
    send(outbox, batch, ticket=5)
    offer(outbox, 1)
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


def test_a_step_that_is_too_large_for_one_message_goes_as_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outboxes, "FLUSH_PAGES", 10)
    monkeypatch.setattr(outboxes, "FLUSH_ITEMS", 3)
    outbox = offered(4, 6, 1, 12, 2, 2, 2, 2)
    batches = list(outbox.batches())
    assert [batch.nodes.seqs for batch in batches] == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert [sum(batch.nodes.parts.pages) for batch in batches] == [10, 1, 12, 6, 2]
