"""Pages found in any order are put back into chains, and what makes no sense is left out."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tierd.control.chains import chains


def key(n: int) -> bytes:
    return bytes([n + 1])


forests = st.lists(st.integers(-2, 30), max_size=30).flatmap(
    lambda parents: st.permutations(list(enumerate(parents)))
)
"""(page, page before it) in any order: -1 for none, -2 for not known, and any page at all, also one
that is not there or comes later: rings."""


@given(forests)
def test_each_page_comes_once_and_after_the_one_before_it(pages: list[tuple[int, int]]) -> None:
    keys = [key(n) for n, _ in pages]
    parents = [None if p == -2 else b"" if p == -1 else key(p) for _, p in pages]
    before = dict(zip(keys, parents, strict=True))
    done: set[bytes] = set()
    for run in chains(keys, parents):
        first = parents[run[0]]
        assert not first or first in done or first not in before
        for i, j in pairwise(run):
            assert parents[j] == keys[i]
        for i in run:
            assert keys[i] not in done
            done.add(keys[i])
    for name in before.keys() - done:
        seen, step = set(), name
        while step not in seen:  # what is left out leads into a ring
            seen.add(step)
            parent = before[step]
            assert parent
            assert parent in before
            step = parent


def test_of_two_pages_with_one_key_the_first_is_taken() -> None:
    assert list(chains([b"a", b"a", b"b"], [b"", b"", b"a"])) == [[0, 2]]


def test_a_chain_is_one_run_and_a_fork_begins_another() -> None:
    keys = [b"c", b"a", b"d", b"b", b"e"]
    parents: list[bytes | None] = [b"b", b"", b"b", b"a", b"d"]
    assert list(chains(keys, parents)) == [[1, 3, 0], [2, 4]]


def test_a_page_that_follows_itself_is_left_out() -> None:
    assert list(chains([b"a"], [b"a"])) == []
