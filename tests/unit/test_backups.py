"""Backups of a group of ranks: decided once, copied once, acked in order, kept by all or none."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from offers import key, offer

from tierd.control.backups import (
    STEP_PAGES,
    Backup,
    Backups,
    NoRoomError,
    Piece,
    Placement,
    RepeatedKeyError,
    Writers,
    copied,
    runs,
)
from tierd.control.keys import MISSING, Keys
from tierd.control.pages import PagePool
from tierd.control.sequencer import Offer, OfferPart, Sequencer
from tierd.eviction.policy import Slots
from tierd.wire import limits
from tierd.wire.geometry import host_layout

TIMEOUT_S = 2.0


class Headers:
    """Slot headers in plain memory."""

    def __init__(self) -> None:
        self.state: dict[int, str] = defaultdict(lambda: "free")

    def writing(
        self, slots: Slots, keys: bytes, parents: bytes, flags: npt.NDArray[np.uint32]
    ) -> None:
        for slot in slots.tolist():
            assert self.state[slot] == "free"
            self.state[slot] = "writing"

    def committed(self, slots: Slots) -> None:
        for slot in slots.tolist():
            assert self.state[slot] == "writing"
            self.state[slot] = "committed"

    def freed(self, slots: Slots) -> None:
        for slot in slots.tolist():
            self.state[slot] = "free"


def make_pool(slots: int, name: str = "kv") -> PagePool:
    host = host_layout([1 << 20], chunk_bytes=(slots << 20) + (1 << 20))
    assert host.chunk_slots == slots
    pool = PagePool(name, 16, host, 2, Headers())
    pool.chunks.add(0)
    return pool


def committed(pool: PagePool, *chain: int) -> int:
    """How many leading pages of a chain a lookup would find."""
    return len(pool.prefix(Keys.of(key(chain[: i + 1]) for i in range(len(chain)))))


class Engine:
    """One group's backups on one pool, and what it has been told."""

    def __init__(self, pool: PagePool, writers: Writers | None = None, ranks: int = 2) -> None:
        self.pool = pool
        self.acked: list[tuple[int, bool]] = []
        self.backups = Backups(
            ranks, Writers() if writers is None else writers, lambda s, k: self.acked.append((s, k))
        )
        self._seq = 0
        self.decided = Backup(0, self.backups)

    def decide(self, one: Offer) -> list[Piece]:
        """What is to be copied of an offer; `decided` is then its backup."""
        seq, self._seq = self._seq, self._seq + 1
        placement = self.backups.begin(seq, one, [self.pool], seq + 1)
        self.decided = placement.backup
        return place(placement)

    def copy_prefix(self, backup: Backup, one: Offer) -> tuple[Backup, list[Piece]]:
        placement = self.backups.begin_prefix(backup, one, [self.pool], 9)
        return placement.backup, place(placement)

    def shed(self) -> None:
        seq, self._seq = self._seq, self._seq + 1
        self.backups.shed(seq)

    def copied(self, pieces: list[Piece], *ranks: bool) -> None:
        for ok in ranks:
            for piece in pieces:
                copied([(piece, ok)])


def place(placement: Placement) -> list[Piece]:
    """Give all pages of a backup their slots, and return what is to be copied."""
    pieces = []
    while not placement.done:
        piece = placement.backup.owner.place(placement)
        if piece is not None:
            pieces.append(piece)
    return pieces


def pages(pieces: list[Piece]) -> list[int]:
    """Which pages of their parts are to be copied."""
    return [page for piece in pieces for page in piece.pages.tolist()]


# --- from decision to ack ---------------------------------------------------------------------


def test_a_page_is_visible_and_acked_when_the_last_rank_has_it() -> None:
    engine = Engine(make_pool(8))
    backup = engine.decide(offer(1, 2, 3))
    assert pages(backup) == [0, 1, 2]
    engine.copied(backup, True)
    assert committed(engine.pool, 1, 2, 3) == 0
    assert engine.acked == []
    engine.copied(backup, True)
    assert committed(engine.pool, 1, 2, 3) == 3
    assert engine.acked == [(0, True)]


def test_acks_come_in_order_although_copies_do_not() -> None:
    engine = Engine(make_pool(8))
    first = engine.decide(offer(1))
    engine.shed()
    third = engine.decide(offer(2))
    engine.copied(third, True, True)
    assert engine.acked == []
    engine.copied(first, True, True)
    assert engine.acked == [(0, True), (1, False), (2, True)]
    assert len(engine.backups) == 0


def test_pages_that_are_here_are_not_copied_again() -> None:
    engine = Engine(make_pool(8))
    backup = engine.decide(offer(1, 2))
    engine.copied(backup, True, True)
    backup = engine.decide(offer(1, 2, 3))
    assert pages(backup) == [2]
    engine.copied(backup, True, True)
    copies = engine.decide(offer(1, 2, 3))
    assert copies == []
    assert engine.acked == [(0, True), (1, True), (2, True)]
    assert engine.pool.pages == 3


@pytest.mark.parametrize("ok", [True, False], ids=["lands", "fails"])
def test_a_page_in_flight_for_somebody_else_is_waited_for(ok: bool) -> None:
    pool, writers = make_pool(8), Writers()
    writer, waiter = Engine(pool, writers), Engine(pool, writers)
    theirs = writer.decide(offer(1, 2))
    mine = waiter.decide(offer(1, 2, 3))
    assert pages(mine) == [2]
    waiter.copied(mine, True, True)
    assert waiter.acked == [], "its beginning is not here yet"
    writer.copied(theirs, True, ok)
    assert writer.acked == [(0, ok)]
    assert waiter.acked == [(0, ok)]
    assert committed(pool, 1, 2, 3) == (3 if ok else 0)
    assert len(writers) == 0


def test_whoever_waits_for_a_waiter_hears_of_a_failure_too() -> None:
    pool, writers = make_pool(8), Writers()
    a, b, c = (Engine(pool, writers) for _ in range(3))
    first = a.decide(offer(1))
    second = b.decide(offer(1, 2))
    third = c.decide(offer(1, 2, 3))
    c.copied(third, True, True)
    b.copied(second, True, True)
    a.copied(first, False, False)
    assert (a.acked, b.acked, c.acked) == ([(0, False)],) * 3


@pytest.mark.parametrize("ok", [True, False], ids=["lands", "fails"])
def test_two_backups_that_wait_for_each_others_pages_are_both_acked(ok: bool) -> None:
    """One has lost its prefix, which the other is writing, whose rest the first is writing."""
    pool, writers = make_pool(8), Writers()
    a, b = Engine(pool, writers, ranks=1), Engine(pool, writers, ranks=1)
    tail = a.decide(offer(1, 2, first=1))
    waits = a.decided
    assert a.backups.await_prefix(waits)
    whole = b.decide(offer(1, 2))
    assert pages(whole) == [0], "the second page is on its way"
    prefix, copies = a.copy_prefix(waits, offer(1))
    assert copies == [], "the first page is on its way"
    a.copied(tail, ok)
    b.copied(whole, True)
    assert a.acked == [(0, ok)]
    assert b.acked == [(0, ok)]
    assert prefix.result is True, "its page has landed, whatever became of those behind it"
    assert len(writers) == 0


def test_a_prefix_that_names_the_pages_behind_it_delays_no_ack() -> None:
    engine = Engine(make_pool(8), ranks=1)
    tail = engine.decide(offer(1, 2, first=1))
    assert engine.backups.await_prefix(engine.decided)
    _, prefix = engine.copy_prefix(engine.decided, offer(1, 2))
    engine.copied(prefix, True)
    engine.copied(tail, True)
    assert engine.acked == [(0, True)]


def test_slots_of_a_failed_copy_are_kept_until_every_rank_has_retired_it() -> None:
    engine = Engine(make_pool(2))
    backup = engine.decide(offer(1, 2))
    engine.copied(backup, False)
    assert engine.pool.free_slots == 0, "the other rank may still write to them"
    engine.copied(backup, True)
    assert engine.pool.free_slots == 2
    assert engine.acked == [(0, False)]


def test_a_page_whose_copy_failed_can_be_offered_again() -> None:
    engine = Engine(make_pool(4))
    backup = engine.decide(offer(1))
    engine.copied(backup, False, True)
    backup = engine.decide(offer(1))
    assert len(backup) == 1
    engine.copied(backup, True, True)
    assert engine.acked == [(0, False), (1, True)]


def test_without_room_nothing_changes() -> None:
    engine = Engine(make_pool(2))
    backup = engine.decide(offer(1))
    with pytest.raises(NoRoomError) as lack:
        engine.decide(offer(7, 8, 9))
    assert (lack.value.pool, lack.value.missing) == (engine.pool, 2)
    assert engine.pool.free_slots == 1
    assert engine.pool.find(key((7,))) is None
    assert engine.backups.pages_in_flight == 1
    engine.copied(backup, True, True)
    assert engine.acked == [(0, True)]


def test_a_backup_of_several_pools_is_kept_in_all_or_in_none() -> None:
    kv, swa = make_pool(4), make_pool(4, "swa")
    acked: list[tuple[int, bool]] = []
    backups = Backups(1, Writers(), lambda seq, kept: acked.append((seq, kept)))
    parts = (*offer(1, 2).parts, *offer(2, pool="swa").parts)
    both = Offer("", parts, 1, 0, b"")
    copies = place(backups.begin(0, both, [kv, swa], 1))
    assert [(copy.part, copy.pool.name) for copy in copies] == [(0, "kv"), (1, "swa")]
    for copy in copies:
        copied([(copy, False)])
    assert (kv.pages, swa.pages) == (0, 0)
    assert acked == [(0, False)]
    full = make_pool(1, "swa")
    full.reserve(Keys(key((9,))), b"", np.array([MISSING]), 1)
    placement = backups.begin(1, both, [kv, full], 2)
    with pytest.raises(NoRoomError):
        place(placement)
    backups.give_up(placement.backup)
    assert len(acked) == 1, "not before its copies so far are off the wire"


def test_results_travel_as_runs_that_a_message_can_hold() -> None:
    assert list(runs([(3, True), (4, False), (9, True)])) == [(3, b"\1\0"), (9, b"\1")]
    assert list(runs([])) == []
    most = limits.MAX_ITEMS_PER_FLUSH
    long = list(runs([(seq, False) for seq in range(most + 5)]))
    assert [(first, len(results)) for first, results in long] == [(0, most), (most, 5)]


# --- any interleaving -------------------------------------------------------------------------

CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
GROUPS = st.integers(0, 1)
RANKS = st.integers(0, 1)


class Interleavings(RuleBasedStateMachine):
    """Two engines of two ranks each back up chains into one small pool.

    Ranks report when they like, copies retire when they like, pages are evicted in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(8)
        self.writers = Writers()
        self.now = 0.0
        self.tick = 0
        self.offers: list[list[Offer]] = [[], []]
        self.reported = [[0, 0], [0, 0]]
        self.sequencers = [Sequencer({0: 0, 1: 0}, TIMEOUT_S, max_pages=1000) for _ in range(2)]
        self.answered: list[list[int]] = [[], []]
        self.in_flight: list[list[Piece]] = [[], []]
        self.decided: list[set[int]] = [set(), set()]
        self.evicted: set[bytes] = set()
        self.backups = [Backups(2, self.writers, self._acker(group)) for group in range(2)]

    def _acker(self, group: int) -> Callable[[int, bool], None]:
        def ack(seq: int, kept: bool) -> None:
            self.answered[group].append(seq)
            if kept:
                pages = set(self.offers[group][seq].parts[0].keys)
                assert pages <= self.committed() | self.evicted

        return ack

    def committed(self) -> set[bytes]:
        every = {name for offers in self.offers for one in offers for name in one.parts[0].keys}
        return {name for name in every if len(self.pool.prefix(Keys(name)))}

    @rule(group=GROUPS, chain=CHAINS)
    def a_node_is_offered(self, group: int, chain: tuple[int, ...]) -> None:
        self.offers[group].append(offer(*chain))

    @rule(group=GROUPS, rank=RANKS, sheds=st.booleans(), twice=st.booleans())
    def a_rank_reports_its_next(self, group: int, rank: int, sheds: bool, twice: bool) -> None:
        seq = self.reported[group][rank]
        if seq == len(self.offers[group]):
            return
        self.reported[group][rank] += 1
        for _ in range(1 + twice):
            one = None if sheds else self.offers[group][seq]
            late = not self.sequencers[group].report(rank, seq, one, self.now)
        assert late == (seq in self.decided[group])

    @rule(seconds=st.sampled_from([0.5, TIMEOUT_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(group=GROUPS)
    def the_next_is_decided(self, group: int) -> None:
        ready = self.sequencers[group].ready(self.now)
        if ready is None:
            return
        seq, offers = ready
        if offers is None:
            self.backups[group].shed(seq)
        else:
            self.tick += 1
            before = self.pool.free_slots
            placement = self.backups[group].begin(seq, offers[0], [self.pool], self.tick)
            try:
                pieces = place(placement)
            except NoRoomError:
                assert self.pool.free_slots == before
                self.backups[group].give_up(placement.backup)
            else:
                self.in_flight[group].extend(2 * pieces)
        self.sequencers[group].decided(seq)
        self.decided[group].add(seq)

    @precondition(lambda self: any(self.in_flight))
    @rule(copies=st.lists(st.tuples(GROUPS, st.booleans(), st.integers(0, 7)), min_size=1))
    def copies_retire(self, copies: list[tuple[int, bool, int]]) -> None:
        retired = []
        for group, ok, at in copies:
            flying = self.in_flight[group] or self.in_flight[1 - group]
            if flying:
                retired.append((flying.pop(at % len(flying)), ok))
        copied(retired)

    @rule(count=st.integers(1, 3))
    def pages_are_evicted(self, count: int) -> None:
        before = self.committed()
        self.pool.evict(count)
        self.evicted |= before - self.committed()

    @invariant()
    def acks_are_in_order_and_unique(self) -> None:
        for answered in self.answered:
            assert answered == sorted(set(answered))

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        writing = sum(len(piece.slots) for flying in self.in_flight for piece in set(flying))
        assert self.pool.pages + writing + self.pool.free_slots == self.pool.capacity
        assert len(self.writers) == writing
        assert sum(b.pages_in_flight for b in self.backups) == writing

    def teardown(self) -> None:
        for group in range(2):
            for rank in range(2):
                while self.reported[group][rank] < len(self.offers[group]):
                    self.a_rank_reports_its_next(group, rank, False, False)
            while self.sequencers[group].waiting:
                self.the_next_is_decided(group)
                self.now += TIMEOUT_S
        while any(self.in_flight):
            self.copies_retire([(0, True, 0)])
        for group in range(2):
            assert self.answered[group] == list(range(len(self.offers[group])))
        assert len(self.writers) == 0
        self.pool.evict(self.pool.pages)
        assert self.pool.free_slots == self.pool.capacity


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_slots_given_to_a_copy_are_where_its_keys_are_found() -> None:
    engine = Engine(make_pool(8))
    (copy,) = engine.decide(offer(1, 2, 3))
    found = [engine.pool.find(key((1, 2, 3)[: i + 1])) for i in range(3)]
    assert np.array_equal(copy.slots, found)


# --- one copy for all ranks ---------------------------------------------------------------


@given(
    pages_of_it=st.integers(1, 40),
    first_slot=st.integers(0, 50),
    ranks=st.integers(2, 8),
)
@settings(deadline=None)
def test_ranks_divide_what_one_copy_serves_evenly_and_whole(
    pages_of_it: int, first_slot: int, ranks: int
) -> None:
    slots = np.arange(first_slot, first_slot + pages_of_it)
    pool = make_pool(8)
    pool.shards = 1
    piece = Piece(Backups(ranks, Writers(), lambda *_: None), 0, pool, slots + 7, slots, ranks)
    stripes = [piece.of(rank, ranks) for rank in range(ranks)]
    assert np.concatenate([slots for _, slots in stripes]).tolist() == slots.tolist()
    assert all((pages - slots == 7).all() for pages, slots in stripes)
    sizes = [len(slots) for _, slots in stripes]
    assert max(sizes) - min(sizes) <= 1


# --- long backups -----------------------------------------------------------------------------


def long_offer(pages: int, pool: str = "kv") -> Offer:
    names = Keys.of(hashlib.sha256(f"long {n}".encode()).digest() for n in range(pages))
    return Offer("", (OfferPart(pool, names, 0),), 1, 0, b"")


def test_a_long_backup_gets_its_slots_in_steps_and_one_ack() -> None:
    pages_of_it = 3 * STEP_PAGES + 7
    engine = Engine(make_pool(4 * STEP_PAGES), ranks=1)
    placement = engine.backups.begin(0, long_offer(pages_of_it), [engine.pool], 1)
    pieces = []
    while not placement.done:
        free = engine.pool.free_slots
        piece = engine.backups.place(placement)
        assert free - engine.pool.free_slots <= STEP_PAGES
        assert piece is not None
        pieces.append(piece)
        engine.copied([piece], True)
        assert engine.acked == ([(0, True)] if placement.done else [])
    assert pages(pieces) == list(range(pages_of_it))
    assert len(engine.pool.prefix(placement.offer.parts[0].keys)) == pages_of_it


def test_a_long_backup_that_is_given_up_is_acked_when_its_copies_are_off_the_wire() -> None:
    engine = Engine(make_pool(2 * STEP_PAGES), ranks=1)
    placement = engine.backups.begin(0, long_offer(2 * STEP_PAGES), [engine.pool], 1)
    piece = engine.backups.place(placement)
    assert piece is not None
    engine.backups.give_up(placement.backup)
    assert engine.acked == []
    engine.copied([piece], True)
    assert engine.acked == [(0, False)]
    assert engine.pool.pages == STEP_PAGES, "what has come is a beginning that can be used"


def test_a_step_without_room_is_repeated_when_there_is_some() -> None:
    engine = Engine(make_pool(STEP_PAGES + 8), ranks=1)
    engine.copied(engine.decide(offer(*range(1, 9))), True)
    placement = engine.backups.begin(1, long_offer(STEP_PAGES + 8), [engine.pool], 9)
    first = engine.backups.place(placement)
    with pytest.raises(NoRoomError) as lack:
        engine.backups.place(placement)
    assert (lack.value.missing, engine.pool.evict(8)) == (8, 8)
    second = engine.backups.place(placement)
    assert first is not None
    assert second is not None
    engine.copied([first, second], True)
    assert engine.acked == [(0, True), (1, True)]


def test_one_key_twice_is_noticed_before_anything_is_changed() -> None:
    engine = Engine(make_pool(8))
    twice = Offer("", (OfferPart("kv", Keys(2 * key((1,))), 0),), 1, 0, b"")
    placement = engine.backups.begin(0, twice, [engine.pool], 1)
    with pytest.raises(RepeatedKeyError):
        engine.backups.place(placement)
    engine.backups.give_up(placement.backup)
    assert engine.acked == [(0, False)]
    assert engine.pool.free_slots == 8
