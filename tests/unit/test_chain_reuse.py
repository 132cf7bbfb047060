"""The policy that learns which pages are used again: what it keeps, and that it is no worse than
`ChainLru` where there is nothing to learn. What holds for every policy is in test_chain_lru.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest

from tierd.bench.tiers import ChainTier
from tierd.bench.traces import Access
from tierd.eviction import ChainLru
from tierd.eviction.chain_reuse import ChainReuse
from tierd.eviction.policy import NO_PARENT, EvictionPolicy

POOL = 200


class Users:
    """Conversations and documents of 10 pages each, served by a tier of POOL pages."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.tier = ChainTier(POOL, policy)
        self._fresh = count()

    def document(self, length: int = 10) -> list[int]:
        return [next(self._fresh) for _ in range(length)]

    def ask(self, chain: Sequence[int]) -> int:
        return self.tier.serve(Access(list(chain), 0, []))

    def read(self, chain: Sequence[int], piece: int) -> None:
        """A prompt that is backed up piece by piece, as a chunked prefill is."""
        for end in range(piece, len(chain) + 1, piece):
            self.tier.serve(Access(list(chain[:end]), end - piece, []))

    def people(self) -> list[list[int]]:
        """What ten people will ask for again and again."""
        return [self.document() for _ in range(10)]

    def rounds(self, chats: Sequence[list[int]], documents: int, number: int) -> float:
        """Everybody comes back every round, and so many documents are read once in between;
        returns which part of what the people asked for in the last round was restored."""
        hits = 0
        for _ in range(number):
            hits = 0
            for i, chat in enumerate(chats):
                hits += self.ask(chat)
                for _ in range(documents * (i + 1) // 10 - documents * i // 10):
                    self.ask(self.document())
        return hits / sum(map(len, chats))


def test_documents_that_are_read_once_do_not_drive_conversations_out() -> None:
    kept = {}
    for policy in (ChainLru(), ChainReuse()):
        users = Users(policy)
        chats = users.people()
        assert users.rounds(chats, 8, 10) == 1.0
        kept[type(policy)] = users.rounds(chats, 50, 20)
    assert kept == {ChainLru: 0.0, ChainReuse: 1.0}


@pytest.mark.parametrize("piece", [10, 5, 2])
def test_a_document_that_comes_in_pieces_is_not_a_conversation(piece: int) -> None:
    users = Users(ChainReuse())
    chats = users.people()
    for _ in range(20):
        for chat in chats:
            users.ask(chat)
            users.read(users.document(), piece)
    for _ in range(5 * POOL // 10):
        users.read(users.document(), piece)
    assert sum(users.ask(chat) for chat in chats) == 100


def test_new_habits_are_learned() -> None:
    users = Users(ChainReuse())
    assert users.rounds(users.people(), 8, 20) == 1.0
    # They have gone. Others come, whose first requests look as those for documents did so far.
    assert users.rounds(users.people(), 8, 40) == 1.0


def test_without_any_return_the_order_is_that_of_chain_lru() -> None:
    gone = {}
    for policy in (ChainLru(), ChainReuse()):
        users = Users(policy)
        for length in np.random.default_rng(3).integers(1, 30, 100).tolist():
            users.ask(users.document(length))
        gone[type(policy)] = users.tier.take_dropped()
    assert gone[ChainLru] == gone[ChainReuse]
    assert len(gone[ChainLru]) > POOL


def test_the_leaf_lists_do_not_grow_with_use() -> None:
    policy = ChainReuse()
    policy.grow(4)
    policy.insert(np.array([0]), NO_PARENT, 1)
    for now in range(2, 5000):
        policy.touch(np.array([0]), 3 * now)
        policy.orphan(0)
        policy.evict(1, lambda slots: np.zeros(len(slots), np.bool_), lambda _: None)
    assert sum(map(len, policy._heaps)) <= 64 + 2 * 4 + 1
