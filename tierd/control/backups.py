"""Backups of one group of ranks from decision to ack: what the `Sequencer` has put in order becomes
slots and copies, and copies that have retired become acks. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierd.control.keys import MISSING, Keys
from tierd.control.pages import PagePool
from tierd.control.sequencer import Offer
from tierd.eviction.policy import Slots
from tierd.wire import limits

STEP_PAGES = 128
"""Pages that are given slots, or become visible, at a time: a fraction of a millisecond."""


@dataclass(eq=False)
class Backup:
    """One backup: it is acked when all that it waits for is there, or cannot be."""

    seq: int
    owner: Backups
    placed: bool = False
    """All its pages have slots, or it has been given up."""
    failed: bool = False
    awaits_prefix: bool = False
    """Its ack waits until what comes before it has been copied, or cannot be."""
    prefix_of: Backup | None = None
    """It has no ack of its own: it is what another one waits for."""
    waits_for: set[Piece] = field(default_factory=set)
    """Of its own pages and of those that others are writing."""
    result: bool | None = None


@dataclass(eq=False)
class Piece:
    """Pages of one pool that every rank copies, and that become visible together.

    `part`: of the offer; `pages`: which of that part's. `waiters`: the backups that need them.
    """

    owner: Backups
    part: int
    pool: PagePool
    pages: Slots
    slots: Slots
    copies: int
    failed: bool = False
    waiters: list[Backup] = field(default_factory=list)

    def of(self, rank: int, ranks: int) -> tuple[Slots, Slots]:
        """What one of the ranks copies, which pages of the part to which slots, both of shape
        (n,): all of them to its own shard, or its stripe of them where one shard serves all."""
        if self.pool.shards == ranks:
            return self.pages, self.slots
        # Where they cannot be divided evenly, it is not always the same rank that has more.
        turn = int(self.slots[0]) % ranks
        first, end = ((len(self.pages) * n + turn) // ranks for n in (rank, rank + 1))
        return self.pages[first:end], self.slots[first:end]


class Placement:
    """A backup on its way to its slots: STEP_PAGES at a time, in chain order, pools without a
    window first: so what is there of one that is given up can be used, or is of no harm.

    Args:
        pools: Per part of the offer, its pool.
        tick: The caller's count: all its pages are equally recent.
    """

    def __init__(self, backup: Backup, offer: Offer, pools: Sequence[PagePool], tick: int) -> None:
        self.backup = backup
        self.offer = offer
        self.pools = pools
        self.tick = tick
        order = sorted(range(len(pools)), key=lambda number: bool(pools[number].window))
        self._steps = deque(
            (number, first)
            for number in order
            for first in range(0, len(offer.parts[number].keys), STEP_PAGES)
        )
        # How many pages had come into the pool when none of the next ones was there.
        self._absent_at = -1

    @property
    def done(self) -> bool:
        """Has every page got its slot?"""
        return not self._steps

    @property
    def next(self) -> tuple[int, int]:
        """The part and its page that are the next to get slots."""
        return self._steps[0]

    def known(self, pool: PagePool, keys: Keys) -> Slots:
        """The slots of the next pages, as `PagePool.find_all` has them. A step that had to wait
        for room need not look again."""
        if self._absent_at == pool.arrivals:
            return np.full(len(keys), MISSING)
        known = pool.find_all(keys)
        self._absent_at = pool.arrivals if known.max() == MISSING else -1
        return known

    def proceed(self) -> None:
        """The next pages have got their slots."""
        self._steps.popleft()
        self._absent_at = -1


class NoRoomError(Exception):
    """Not enough slots now. `missing`: pool and how many it lacks."""

    def __init__(self, pool: PagePool, missing: int) -> None:
        super().__init__(pool.name)
        self.pool = pool
        self.missing = missing


class RepeatedKeyError(Exception):
    """One key twice in a part."""


class Writers:
    """Which piece is writing which page, over all groups: a page is copied once."""

    def __init__(self) -> None:
        self._writers: dict[int, dict[int, Piece]] = defaultdict(dict)

    def __len__(self) -> int:
        return sum(map(len, self._writers.values()))

    def of(self, pool: PagePool, slot: int) -> Piece:
        """The piece that writes a slot which is WRITING."""
        return self._writers[id(pool)][slot]

    def add(self, piece: Piece) -> None:
        """A piece begins to write its slots."""
        self._writers[id(piece.pool)].update(dict.fromkeys(piece.slots.tolist(), piece))

    def remove(self, piece: Piece) -> None:
        """A piece has written its slots, or given them up."""
        writers = self._writers[id(piece.pool)]
        for slot in piece.slots.tolist():
            del writers[slot]
        if not writers:
            del self._writers[id(piece.pool)]


class Backups:
    """Backups of one group from decision to ack.

    Args:
        ranks: How many copies each page needs.
        writers: Shared by all groups.
        ack: Called with (seq, kept) in sequence order.
    """

    def __init__(self, ranks: int, writers: Writers, ack: Callable[[int, bool], None]) -> None:
        self._ranks = ranks
        self._writers = writers
        self._ack = ack
        self._queue: deque[Backup] = deque()
        self.pages_in_flight = 0

    def __len__(self) -> int:
        return len(self._queue)

    def shed(self, seq: int) -> None:
        """This number is not kept; its ack comes in its turn."""
        self.give_up(self._begin(Backup(seq, self)))

    def begin(self, seq: int, offer: Offer, pools: Sequence[PagePool], tick: int) -> Placement:
        """A backup that is to get slots: `place` gives them.

        Args:
            offer: Any rank's; they are the same in all that matters here.
            pools: Per part, its pool.
        """
        return self._begun(Placement(self._begin(Backup(seq, self)), offer, pools, tick))

    def begin_prefix(
        self, backup: Backup, offer: Offer, pools: Sequence[PagePool], tick: int
    ) -> Placement:
        """The same of the pages before a backup."""
        prefix = Backup(backup.seq, self, prefix_of=backup)
        return self._begun(Placement(prefix, offer, pools, tick))

    def place(self, placement: Placement) -> Piece | None:
        """Give slots to the next pages of a backup, as far as they have none; what others are
        writing is waited for. None: all these pages are here.

        Raises:
            NoRoomError: nothing was changed; make room and ask again, or `give_up`.
            RepeatedKeyError: nothing was changed; `give_up`.
        """
        backup, offer = placement.backup, placement.offer
        number, first = placement.next
        pool, every = placement.pools[number], offer.parts[number].keys
        keys = every[first : first + STEP_PAGES]
        known = placement.known(pool, keys)
        fresh = (known == MISSING).nonzero()[0]
        if len(fresh) > pool.free_slots:
            raise NoRoomError(pool, len(fresh) - pool.free_slots)
        if len(fresh) > 1 and keys.has_repeats():
            raise RepeatedKeyError(pool.name)
        if len(fresh) < len(keys):
            for slot in pool.slots.being_written(known).tolist():
                self._wait(backup, self._writers.of(pool, slot))
        parent = every[first - 1] if first else offer.parent
        follow = len(every) - first - len(keys)
        slots = pool.reserve(keys, parent, known, placement.tick, follow=follow)
        piece = None
        if len(fresh):
            mine = slots if len(fresh) == len(keys) else slots[fresh]
            piece = Piece(self, number, pool, fresh + first, mine, self._ranks)
            self._writers.add(piece)
            self._wait(backup, piece)
            self.pages_in_flight += len(fresh)
        placement.proceed()
        self._begun(placement)
        return piece

    def give_up(self, backup: Backup) -> None:
        """A backup gets no more slots, and is not kept. What it has got so far stays."""
        backup.failed = backup.placed = True
        self._settle(backup)

    def await_prefix(self, backup: Backup) -> bool:
        """What comes before this backup has been lost: its ack waits for that to be copied.
        False: it has been acked already."""
        backup.awaits_prefix = backup.result is None
        return backup.awaits_prefix

    def give_up_prefix(self, backup: Backup) -> None:
        """What comes before this backup will not come."""
        backup.awaits_prefix = False
        self._settle(backup)

    def _begin(self, backup: Backup) -> Backup:
        self._queue.append(backup)
        return backup

    def _begun(self, placement: Placement) -> Placement:
        if placement.done:
            placement.backup.placed = True
            self._settle(placement.backup)
        return placement

    def _wait(self, backup: Backup, piece: Piece) -> None:
        if piece not in backup.waits_for:
            backup.waits_for.add(piece)
            piece.waiters.append(backup)

    def _settle(self, backup: Backup) -> None:
        """Fix the result once it is known, and ack."""
        if backup.result is None and backup.placed:
            if backup.waits_for or backup.awaits_prefix:
                return
            backup.result = not backup.failed
            if backup.prefix_of is not None:
                self.give_up_prefix(backup.prefix_of)
        self._ack_settled()

    def _ack_settled(self) -> None:
        while self._queue and self._queue[0].result is not None:
            first = self._queue.popleft()
            self._ack(first.seq, bool(first.result))


def copied(retired: Iterable[tuple[Piece, bool]]) -> None:
    """One rank's copies of some pieces have retired, well or not. What has become whole of one
    pool becomes visible at once, which costs little more than for one piece."""
    over: list[Piece] = []
    for piece, ok in retired:
        piece.copies -= 1
        piece.failed = piece.failed or not ok
        if not piece.copies:
            over.append(piece)
    whole: dict[PagePool, list[Slots]] = {}
    for piece in over:
        piece.owner.pages_in_flight -= len(piece.slots)
        piece.owner._writers.remove(piece)
        if piece.failed:
            piece.pool.abort(piece.slots)
        else:
            whole.setdefault(piece.pool, []).append(piece.slots)
    for pool, slots in whole.items():
        pool.commit(np.sort(np.concatenate(slots)))
    for piece in over:
        for waiter in piece.waiters:
            waiter.waits_for.discard(piece)
            waiter.failed = waiter.failed or piece.failed
            waiter.owner._settle(waiter)


def runs(seqs: Sequence[tuple[int, bool]]) -> Iterator[tuple[int, bytes]]:
    """Results in order as runs of consecutive numbers, each of a message's size at most: (first,
    one byte each)."""
    start = 0
    for i in range(1, len(seqs) + 1):
        full = i - start == limits.MAX_ITEMS_PER_FLUSH
        if i == len(seqs) or full or seqs[i][0] != seqs[i - 1][0] + 1:
            yield seqs[start][0], bytes(kept for _, kept in seqs[start:i])
            start = i
