"""Which chunk was used least recently, told without a look at all of them."""

from __future__ import annotations

from itertools import islice

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tierd.control.chunk_ages import LOOKS, ChunkAges

MANY = 40 * LOOKS


class Chunks:
    """Chunks that are used and cleared, and how often somebody has looked at one."""

    def __init__(self, count: int = 0) -> None:
        self.used: dict[int, int] = {}
        self.looks = 0
        self.ages = ChunkAges(self.look)
        for ordinal in range(count):
            self.add(ordinal, ordinal + 1)

    def look(self, ordinal: int) -> int:
        self.looks += 1
        return self.used[ordinal]

    def add(self, ordinal: int, used: int = 0) -> None:
        self.used[ordinal] = used
        self.ages.add(ordinal)

    def remove(self, ordinal: int) -> None:
        del self.used[ordinal]
        self.ages.remove(ordinal)


def test_a_question_costs_the_same_however_many_chunks_there_are() -> None:
    chunks = Chunks(MANY)
    chunks.looks = 0
    assert list(islice(chunks.ages.coldest(), 3)) == [(1, 0), (2, 1), (3, 2)]
    for ordinal in range(MANY):
        chunks.used[ordinal] += MANY  # all of them are used again
    list(chunks.ages.coldest())
    assert chunks.looks <= 2 * 2 * LOOKS


def test_a_chunk_that_was_used_since_is_not_taken_for_cold() -> None:
    chunks = Chunks(MANY)
    chunks.used[0] = chunks.used[1] = MANY + 1
    assert next(chunks.ages.coldest()) == (3, 2)


def test_where_all_have_been_used_since_there_is_an_answer_all_the_same() -> None:
    chunks = Chunks(MANY)
    for ordinal in range(MANY):
        chunks.used[ordinal] += MANY
    for _ in range(2 * MANY // LOOKS):
        named = list(chunks.ages.coldest({0, 1}))
        assert len(named) >= LOOKS
        assert named == sorted(set(named))
        assert all(chunks.used[ordinal] == age for age, ordinal in named)
        assert not {0, 1} & {ordinal for _, ordinal in named}


def test_a_chunk_that_has_become_empty_is_found_when_its_turn_comes() -> None:
    chunks = Chunks(MANY)
    chunks.used[MANY - 1] = 0
    answers = [next(chunks.ages.coldest()) for _ in range(MANY // LOOKS)]
    assert answers[0] == (1, 0)
    assert answers[-1] == (0, MANY - 1)


class FewChunks(RuleBasedStateMachine):
    """Of few chunks the answer is what a look at all of them gives, whatever happened to them."""

    ordinals = st.integers(0, LOOKS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.chunks = Chunks()

    @rule(ordinal=ordinals, used=st.integers(0, 9))
    def comes_or_goes(self, ordinal: int, used: int) -> None:
        if ordinal in self.chunks.used:
            self.chunks.remove(ordinal)
        else:
            self.chunks.add(ordinal, used)

    @precondition(lambda self: self.chunks.used)
    @rule(data=st.data(), used=st.integers(0, 9))
    def is_used_or_cleared(self, data: st.DataObject, used: int) -> None:
        self.chunks.used[data.draw(st.sampled_from(sorted(self.chunks.used)))] = used

    @rule(but=st.sets(ordinals))
    def is_asked_for(self, but: set[int]) -> None:
        every = sorted((age, n) for n, age in self.chunks.used.items() if n not in but)
        assert list(self.chunks.ages.coldest(but & self.chunks.used.keys())) == every


TestFewChunks = FewChunks.TestCase
TestFewChunks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
