"""How a step's pages are laid out: token slots in the ring, keys in the message."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tierd_client.packing import (
    MOST_DIGITS,
    Pools,
    grouped,
    key_blob,
    keys_to_send,
    named_parts,
    no_parts,
    share_keys,
)
from tierd_client.pools import PageKeys, PoolPages, key_at, key_bytes

TOKENS = {"kv": 4, "swa": 4, "state": 1}
NAMES = list(TOKENS)
POOLS = Pools(TOKENS)


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(4, "big")).digest()


def pages(pool: str, numbers: list[int]) -> PoolPages:
    """Pages whose keys are made of their numbers."""
    tokens = TOKENS[pool]
    slots = [n * tokens + i for n in numbers for i in range(tokens)]
    return PoolPages(pool, b"".join(map(key, numbers)), torch.tensor(slots, dtype=torch.int64))


NUMBERS = st.lists(st.integers(0, 1000), min_size=1, max_size=4)
NODES = st.lists(st.dictionaries(st.sampled_from(NAMES), NUMBERS), max_size=6)


@given(nodes=NODES, start=st.integers(0, 1 << 40))
@settings(deadline=None)
def test_every_part_names_its_own_token_slots_and_keys(
    nodes: list[dict[str, list[int]]], start: int
) -> None:
    parts = POOLS.parts_of(pages(pool, n) for node in nodes for pool, n in node.items())
    *positions, end = parts.ring_positions(start)
    ring = [int(n) for slots in parts.slots for n in slots]
    assert len(ring) == end - start
    blob, at = key_blob(parts), 0
    counts = [len(node) for node in nodes]
    parts = share_keys(parts, counts)
    shared, firsts = keys_to_send(parts.keys), parts.first
    first = iter(firsts)
    by_node = grouped(named_parts(parts, positions), counts)
    for node, named in zip(nodes, by_node, strict=True):
        for (pool, numbers), part in zip(node.items(), named, strict=True):
            assert (part.pool, part.pages) == (NAMES.index(pool), len(numbers))
            tokens = TOKENS[pool]
            at_ring = part.ring - start
            of_pages = ring[at_ring : at_ring + part.pages * tokens]
            assert of_pages == [n * tokens + i for n in numbers for i in range(tokens)]
            keys = b"".join(map(key, numbers))
            assert blob[at : at + len(keys)] == keys
            at += len(keys)
            place = 32 * next(first)
            assert shared[place : place + len(keys)] == keys
    assert at == len(blob) >= len(shared)
    assert next(first, None) is None


@pytest.mark.parametrize(
    "as_keys", [lambda keys: keys, lambda keys: [k.hex() for k in split(keys)]]
)
def test_keys_of_a_window_are_those_of_the_prefix_and_sent_once(
    as_keys: Callable[[bytes], PageKeys],
) -> None:
    chain, window, other = range(40), [38, 39], [99]
    nodes = [[("kv", chain), ("swa", window), ("state", [39])], [("kv", window), ("swa", other)]]
    named = [pages(pool, list(numbers)) for node in nodes for pool, numbers in node]
    parts = POOLS.parts_of(part._replace(keys=as_keys(part.keys)) for part in named)
    parts = share_keys(parts, [3, 2])
    sent, first = keys_to_send(parts.keys), parts.first
    blob = bytes.fromhex(sent) if isinstance(sent, str) else sent
    assert blob == b"".join(map(key, [*chain, *window, *other]))
    assert first == [0, 38, 39, 40, 42]


def split(keys: PageKeys) -> list[bytes]:
    assert isinstance(keys, bytes)
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


@pytest.mark.parametrize("numbers", [[], [7], [1, 2, 3], list(range(100))])
def test_digits_and_bytes_are_the_same_keys(numbers: list[int]) -> None:
    blob = b"".join(map(key, numbers))
    digits: PageKeys = [key(n).hex() for n in numbers]
    assert key_bytes(digits) == key_bytes(blob) == blob
    slots = torch.arange(4 * len(numbers))
    for keys in ([digits, digits], [digits, blob], [blob, blob]):
        parts = POOLS.parts(["kv"] * 2, keys, [slots] * 2)
        assert parts.pages == [len(numbers)] * 2
        assert key_blob(parts) == blob + blob
    parts = POOLS.parts(["kv"] * 2, [digits, digits], [slots] * 2)
    assert keys_to_send(parts.keys) == (blob + blob).hex()
    parts = POOLS.parts(["kv"] * 2, [digits, blob], [slots] * 2)
    assert keys_to_send(parts.keys) == blob + blob
    if numbers:
        assert key_at(blob, 0) == key_at(digits, 0) == key(numbers[0])
        assert key_at(blob, -1) == key_at(digits, -1) == key(numbers[-1])


def test_digits_that_would_fill_a_message_are_sent_as_bytes() -> None:
    keys = MOST_DIGITS // 64
    assert isinstance(keys_to_send([key(0).hex() * keys]), str)
    assert keys_to_send([key(0).hex() * keys, key(1).hex()]) == key(0) * keys + key(1)


@pytest.mark.parametrize(
    ("pool", "keys", "slots", "named"),
    [
        ("kv", b"k" * 33, 4, "'kv': 33 bytes"),
        ("kv", b"k" * 32, 5, "'kv': 5 slots"),
        ("state", ["00" * 32] * 2, 1, "'state': 1 slots"),
        ("state", ["00" * 31, "00" * 32], 2, "'state'.* 64 digits"),
        ("draft", b"k" * 32, 4, "'draft'.*kv, swa, state"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_pool(
    pool: str, keys: PageKeys, slots: int, named: str
) -> None:
    good = (b"k" * 32, torch.arange(4))
    with pytest.raises(ValueError, match=named):
        POOLS.parts(["kv", pool], [good[0], keys], [good[1], torch.arange(slots)])


def test_no_parts_take_no_place() -> None:
    assert no_parts().ring_positions(17) == [17]
