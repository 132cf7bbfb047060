"""How a step's pages are laid out: page numbers in the ring, keys in the message."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tierd_client.device import page_numbers
from tierd_client.packing import Counted, Packing, PoolPlace
from tierd_client.pools import PageKeys, PoolPages, count_keys, join_keys, key_at

PLACES = {"kv": PoolPlace(0, 4), "swa": PoolPlace(1, 4), "state": PoolPlace(2, 1)}


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(4, "big")).digest()


def pages(pool: str, numbers: list[int]) -> Counted:
    """Pages whose keys are made of their numbers."""
    tokens = PLACES[pool].page_tokens
    slots = torch.cat(
        [torch.empty(0)] + [torch.arange(n * tokens, (n + 1) * tokens) for n in numbers]
    )
    return PoolPages(pool, b"".join(map(key, numbers)), slots.to(torch.int64)), len(numbers)


NUMBERS = st.lists(st.integers(0, 1000), max_size=4)
NODES = st.lists(st.dictionaries(st.sampled_from(sorted(PLACES)), NUMBERS), max_size=6)


@given(nodes=NODES, start=st.integers(0, 1 << 40))
@settings(deadline=None)
def test_every_part_names_its_own_page_numbers_and_keys(
    nodes: list[dict[str, list[int]]], start: int
) -> None:
    contents = [[pages(pool, numbers) for pool, numbers in node.items()] for node in nodes]
    packing = Packing(PLACES, start, contents)
    named = [packing.add(node) for node in contents]
    ring = [int(n) for run in page_numbers(*packing.slots(), 1 << 20) for n in run]
    assert len(ring) == packing.end - start
    blob, at = packing.keys(), 0
    for node, parts in zip(nodes, named, strict=True):
        wanted = {PLACES[pool].pool: numbers for pool, numbers in node.items() if numbers}
        assert {part.pool: part.pages for part in parts} == {i: len(n) for i, n in wanted.items()}
        for part in parts:
            numbers = wanted[part.pool]
            assert ring[part.ring - start : part.ring - start + part.pages] == numbers
            assert blob[at : at + 32 * part.pages] == b"".join(map(key, numbers))
            at += 32 * part.pages
    assert at == len(blob)


def test_pages_of_one_size_take_one_run_however_many_nodes_they_belong_to() -> None:
    contents = [[pages("kv", [n]), pages("swa", [n]), pages("state", [n])] for n in range(8)]
    packing = Packing(PLACES, 0, contents)
    for node in contents:
        packing.add(node)
    assert len(list(page_numbers(*packing.slots(), 64))) == 2


@pytest.mark.parametrize("numbers", [[], [7], [1, 2, 3]])
def test_digits_and_bytes_are_the_same_keys(numbers: list[int]) -> None:
    blob = b"".join(map(key, numbers))
    digits: PageKeys = [key(n).hex() for n in numbers]
    assert count_keys(blob) == count_keys(digits) == len(numbers)
    assert join_keys([digits, digits]) == join_keys([digits, blob]) == blob + blob
    if numbers:
        assert key_at(blob, 0) == key_at(digits, 0) == key(numbers[0])
        assert key_at(blob, -1) == key_at(digits, -1) == key(numbers[-1])


def test_half_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        count_keys(b"k" * 33)
