"""Pools whose pages serve boundaries: sliding windows and states beside a chain of KV."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.control.backups import Backups, NoRoomError, Writers, copied
from tierd.control.catalog import Catalog
from tierd.control.keys import Keys
from tierd.control.leases import FEW, Leases, boundaries, few
from tierd.control.pages import PagePool
from tierd.control.sequencer import Offer, OfferPart
from tierd.eviction.policy import Slots
from tierd.wire.geometry import host_layout

W = 3
HOST = host_layout([1 << 20], chunk_bytes=9 << 20)
SLOTS = HOST.chunk_slots


class Nowhere:
    """Slot headers that nobody reads."""

    def writing(
        self, slots: Slots, keys: bytes, parents: bytes, flags: npt.NDArray[np.uint32]
    ) -> None: ...
    def committed(self, slots: Slots) -> None: ...
    def freed(self, slots: Slots) -> None: ...


def chain(name: str, pages: int) -> Keys:
    return Keys.of(hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(pages))


class Model:
    """A hybrid model's pools in one namespace, and a group that backs up and looks up."""

    def __init__(self, *, chunks: int = 4, window: int = W) -> None:
        self.catalog = Catalog(bytes(32), 1, private=False)
        for name, pages in (("kv", 0), ("swa", window)):
            pool = PagePool(name, 64, HOST, 1, Nowhere(), window=pages)
            for ordinal in range(chunks):
                pool.chunks.add(ordinal)
            self.catalog.add_pool(pool)
        self.kv, self.swa = self.catalog.pools["kv"], self.catalog.pools["swa"]
        self.leases = Leases(lease_s=30.0, max_share=1.0)
        self.backups = Backups(1, Writers(), lambda seq, kept: None)
        self.tick = 0
        self.seq = 0

    def now(self) -> int:
        self.tick += 1
        return self.tick

    def back_up(self, keys: Keys, *, windows: int, parent: bytes = b"") -> None:
        """A node's pages, with the window's pages of its last `windows`."""
        parts = [OfferPart("kv", keys, 0), OfferPart("swa", keys[-windows:], 0)]
        offer = Offer("", tuple(parts), 1, 0, parent)
        if parent:
            self.catalog.touch_boundary(parent, self.now())
        placement = self.backups.begin(self.seq, offer, [self.kv, self.swa], self.now())
        while not placement.done:
            try:
                piece = self.backups.place(placement)
            except NoRoomError as lack:
                lack.pool.evict(lack.missing)
                continue
            if piece is not None:
                copied([(piece, True)])
        self.seq += 1

    def look_up(self, keys: Keys, rid: str = "r") -> list[int]:
        pools = [self.kv, self.swa]
        lengths = self.leases.lookup(rid, keys, pools, now=0.0)
        self.leases.note_use(rid, self.now())
        return lengths

    def has(self, keys: Keys) -> list[bool]:
        return [bool(slot >= 0) for slot in self.swa.present(keys)]


def test_a_boundary_needs_the_whole_window_before_it() -> None:
    model = Model()
    keys = chain("a", 8)
    model.back_up(keys, windows=W)
    assert model.look_up(keys) == [8]
    assert model.look_up(keys[:7]) == []  # its window begins before what was kept


def test_a_boundary_near_the_beginning_needs_what_there_is() -> None:
    model = Model()
    keys = chain("a", 2)
    model.back_up(keys, windows=2)
    assert model.look_up(keys) == [1, 2]


def test_a_window_may_come_from_two_nodes() -> None:
    model = Model()
    keys = chain("a", 8)
    model.back_up(keys[:6], windows=W)
    model.back_up(keys[6:], windows=2, parent=keys[5])
    assert model.look_up(keys) == [6, 7, 8]


def test_of_many_boundaries_the_longest_are_named_and_leased() -> None:
    model = Model()
    keys = chain("a", 10)
    model.back_up(keys, windows=10)
    assert model.look_up(keys) == [7, 8, 9, 10]
    assert model.swa.held == W + 3
    assert model.kv.held == 10
    model.leases.cancel("r")
    assert model.swa.held == model.kv.held == 0


def test_a_window_goes_whole_and_the_oldest_boundary_goes_first() -> None:
    model = Model()
    old, young = chain("old", W), chain("young", W)
    model.back_up(old, windows=W)
    model.back_up(young, windows=W)
    model.look_up(old)
    model.leases.cancel("r")
    assert model.swa.evict(W) == W
    assert model.has(young) == [False] * W
    assert model.look_up(old)[-1] == W


def test_pages_between_boundaries_go_before_any_window() -> None:
    model = Model()
    first, second = chain("first", W), chain("second", 8)
    model.back_up(first, windows=W)
    model.back_up(second, windows=8)
    model.swa.evict(8 - W)
    assert model.has(second) == [False] * (8 - W) + [True] * W
    assert model.has(first) == [True] * W


def test_a_window_without_its_prefix_goes_at_once() -> None:
    model = Model()
    keys = chain("a", 6)
    model.back_up(keys, windows=W)
    model.kv.evict(1)
    assert model.has(keys[-W:]) == [True, True, False]
    model.kv.evict(5)
    assert model.swa.pages == 0


def test_a_window_that_is_being_loaded_outlives_its_prefix_until_it_has_landed() -> None:
    model = Model()
    keys = chain("a", 4)
    model.back_up(keys, windows=W)
    model.look_up(keys)
    assert model.kv.evict(4) == 0
    model.leases.cancel("r")
    assert model.kv.evict(4) == 4
    assert model.swa.pages == 0


def test_a_prefix_without_its_window_stays_usable_at_the_boundaries_that_remain() -> None:
    model = Model()
    keys = chain("a", 8)
    model.back_up(keys[:4], windows=W)
    model.back_up(keys[4:], windows=W, parent=keys[3])
    assert model.look_up(keys)[-1] == 8
    model.leases.cancel("r")
    model.look_up(keys[:4])  # the first boundary is the younger one now
    model.leases.cancel("r")
    model.swa.evict(W)
    assert model.look_up(keys) == [4]


def test_a_boundary_that_the_engine_goes_on_from_does_not_grow_old() -> None:
    model = Model()
    root, other = chain("root", W), chain("other", W)
    model.back_up(root, windows=W)
    model.back_up(other, windows=W)
    model.back_up(chain("next turn", W), windows=W, parent=root[-1])  # never looked up here
    model.swa.evict(W)
    assert model.has(root) == [True] * W
    assert model.has(other) == [False] * W


def test_a_pool_that_never_had_a_slot_has_no_page() -> None:
    model = Model(chunks=0)
    assert model.swa.present(chain("a", 2)).tolist() == [-1, -1]
    assert model.look_up(chain("a", 2)) == []


def test_a_state_serves_its_own_boundary() -> None:
    model = Model(window=1)
    keys = chain("a", 5)
    model.back_up(keys[:3], windows=1)
    model.back_up(keys[3:], windows=1, parent=keys[2])
    assert model.look_up(keys) == [3, 5]


@given(
    here=st.lists(st.booleans(), min_size=1, max_size=40),
    window=st.integers(1, 6),
)
@settings(deadline=None)
def test_boundaries_are_those_of_the_definition(here: list[bool], window: int) -> None:
    pool = PagePool("swa", 64, HOST, 1, Nowhere(), window=window)
    slots = np.where(here, 1, -1).astype(np.int64)
    wanted = [n for n in range(1, len(here) + 1) if all(here[max(0, n - window) : n])]
    assert boundaries(len(here), [pool], [slots]).tolist() == wanted


@pytest.mark.parametrize("spread", [True, False])
@given(counts=st.sets(st.integers(1, 500), max_size=50))
@settings(deadline=None)
def test_few_are_some_of_them_with_the_longest(spread: bool, counts: set[int]) -> None:
    ordered = np.array(sorted(counts), np.int64)
    chosen = few(ordered, spread=spread)
    assert len(chosen) == min(FEW, len(chosen))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= counts
    assert (max(chosen) == max(counts)) if counts else not chosen


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 7), st.integers(1, 7), st.booleans()),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=60)
def test_what_is_leased_is_there_and_nothing_is_lost(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """Backups, lookups and evictions in any order: every leased boundary is complete."""
    model = Model(chunks=2)
    for name, pages, windows, look in steps:
        keys = chain(str(name), pages)
        if not look:
            model.back_up(keys, windows=min(windows, pages))
            continue
        for n in model.look_up(keys):
            assert len(model.kv.prefix(keys[:n])) == n
            assert all(model.has(keys[max(0, n - W) : n]))
        model.kv.evict(1)
        for key in keys:  # no window page without its KV page, unless it is leased
            slot = model.swa.find(key)
            if slot is not None and model.kv.find(key) is None:
                assert model.swa.are_held(np.array([slot]))[0]
        model.leases.cancel("r")
    model.kv.evict(model.kv.pages)
    model.swa.evict(model.swa.pages)
    assert model.kv.free_slots == model.swa.free_slots == 2 * SLOTS
