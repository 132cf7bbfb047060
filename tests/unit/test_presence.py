"""The presence table never denies a page that is there."""

from __future__ import annotations

import hashlib
import os

import pytest
from descriptors import descriptors_left
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.memory.presence import SharedPresence
from tierd.wire import presence
from tierd.wire.errors import ProtocolError
from tierd.wire.presence import PresenceTable, Salt

HERE = Salt(b"n" * 32, "kv")


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(4, "big")).digest()


def table(buckets: int) -> PresenceTable:
    return PresenceTable.format(bytearray(presence.nbytes(buckets)), buckets)


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=200))
@settings(deadline=None)
def test_what_is_there_is_never_denied_and_what_went_leaves_no_trace(
    steps: list[tuple[int, bool]],
) -> None:
    small, here = table(2), set[int]()  # so small that it spills
    for n, add in steps:
        if add and n not in here:
            small.add(key(n), HERE)
            here.add(n)
        elif not add and n in here:
            small.remove(key(n), HERE)
            here.discard(n)
        assert all(small.may_have(key(n), HERE) for n in here)
    for n in list(here):
        small.remove(key(n), HERE)
    assert not any(small.may_have(key(n), HERE) for n in range(60))


@given(
    st.sampled_from([2, 16, 256]),
    st.lists(st.tuples(st.sets(st.integers(0, 60), min_size=1), st.booleans()), max_size=30),
)
@settings(deadline=None)
def test_many_at_once_are_as_many_one_by_one(
    buckets: int, steps: list[tuple[set[int], bool]]
) -> None:
    pages, here = table(buckets), set[int]()
    for some, add in steps:
        going = sorted(some - here if add else some & here)
        (pages.add if add else pages.remove)(b"".join(map(key, going)), HERE)
        here = here | some if add else here - some
        assert all(pages.may_have(key(n), HERE) for n in here)
    pages.remove(b"".join(map(key, sorted(here))), HERE)
    assert not any(pages.may_have(key(n), HERE) for n in range(60))


def test_a_page_of_another_pool_or_namespace_is_not_there() -> None:
    pages = table(1024)
    pages.add(key(1), HERE)
    assert pages.may_have(key(1), HERE)
    assert not pages.may_have(key(1), Salt(b"n" * 32, "swa"))
    assert not pages.may_have(key(1), Salt(b"m" * 32, "kv"))


def test_at_the_size_that_it_is_made_for_almost_nothing_spills() -> None:
    pages, count = table(presence.buckets_for(4000)), 4000
    for n in range(count):
        pages.add(key(n), HERE)
    wrong = sum(pages.may_have(key(n), HERE) for n in range(count, 2 * count))
    assert wrong < count // 50


@pytest.mark.parametrize(
    ("size", "header"),
    [(presence.PAGE - 8, b""), (presence.PAGE, b""), (presence.PAGE, b"magic and more buckets")],
)
def test_what_is_no_table_is_refused(size: int, header: bytes) -> None:
    memory = bytearray(size)
    if header:
        memory[:16] = presence.MAGIC.to_bytes(8, "little") + (1 << 20).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="presence table"):
        PresenceTable(memory)


def test_a_table_that_was_superseded_is_sure_of_nothing() -> None:
    pages = table(1024)
    assert not pages.may_have(key(1), HERE)
    pages.supersede()
    assert pages.may_have(key(1), HERE)


def test_a_table_is_outgrown_by_smaller_pages_alone() -> None:
    shared = SharedPresence(1 << 30)
    try:
        before = shared.table
        assert not shared.outgrown_by(1 << 20, keys=1)
        assert not shared.outgrown_by(64 << 10, keys=1)
        assert shared.table is before
        assert shared.outgrown_by(16 << 10, keys=1)
        assert not shared.outgrown_by(16 << 10, keys=1)
        assert shared.outgrown_by(16 << 10, keys=4)
        shared.add(key(1), HERE)
        assert shared.table.may_have(key(1), HERE)
        shared.remove(key(1), HERE)
        assert not shared.table.may_have(key(1), HERE)
        assert os.fstat(shared.fd).st_size == presence.nbytes(shared.table.buckets)
    finally:
        shared.close()


def test_a_table_that_cannot_be_replaced_is_kept() -> None:
    shared = SharedPresence(1 << 30)
    shared.add(key(1), HERE)
    with descriptors_left(0):
        assert not shared.outgrown_by(page_bytes=64, keys=1)
    assert shared.table.may_have(key(1), HERE)
    shared.add(key(2), HERE)
    assert shared.table.may_have(key(2), HERE)
    assert not shared.table.may_have(key(3), HERE), "it is still sure of what it says"
    assert shared.outgrown_by(page_bytes=64, keys=1), "the next rank has another try"
    shared.close()
