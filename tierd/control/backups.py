"""Backups of one group of ranks: put in order, decided once for all, acked when all have them.

Pure. `Sequencer` waits until every rank has reported a sequence number; `Backups` turns the
reports into slots and copies, and copies that have retired into acks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierd.control.catalog import PagePool
from tierd.eviction.policy import Slots
from tierd.wire import limits


@dataclass(frozen=True)
class OfferPart:
    """The pages of one pool in a rank's report: their keys, and where their numbers lie."""

    pool: str
    keys: tuple[bytes, ...]
    ring: int


@dataclass(frozen=True)
class Offer:
    """What one rank reports of one backup. `parent`: None if it cannot tell."""

    epoch: str
    parts: tuple[OfferPart, ...]
    ticket: int
    fence: int
    parent: bytes | None

    @property
    def ring_end(self) -> int:
        """The ring position after the last page number."""
        return max((part.ring + len(part.keys) for part in self.parts), default=0)

    def same_pages(self, other: Offer) -> bool:
        """All that must not differ between ranks."""
        return (
            self.epoch == other.epoch
            and self.parent == other.parent
            and len(self.parts) == len(other.parts)
            and all(
                a.pool == b.pool and a.keys == b.keys
                for a, b in zip(self.parts, other.parts, strict=True)
            )
        )


@dataclass
class _Reported:
    first: float
    offers: dict[int, Offer | None] = field(default_factory=dict)


class Sequencer:
    """Yields each sequence number once, in order, with all ranks' offers or as shed.

    Args:
        ranks: The group's ranks, each with the first number it will report.
        timeout_s: How long a number waits for the last rank.
    """

    def __init__(self, ranks: dict[int, int], timeout_s: float) -> None:
        self._ranks = set(ranks)
        self._timeout_s = timeout_s
        self._next = max(ranks.values())
        self._reported: dict[int, _Reported] = {}

    @property
    def waiting(self) -> int:
        """Numbers reported by some rank and not decided."""
        return len(self._reported)

    def oldest_s(self, now: float) -> float:
        return max((now - r.first for r in self._reported.values()), default=0.0)

    def report(self, rank: int, seq: int, offer: Offer | None, now: float) -> bool:
        """A rank reports a number; None: it had to shed it. False: decided already, too late."""
        if seq < self._next:
            return False
        self._reported.setdefault(seq, _Reported(now)).offers.setdefault(rank, offer)
        return True

    def ready(self, now: float) -> tuple[int, dict[int, Offer] | None] | None:
        """The next number that can be decided: its offers by rank, or None if it is shed."""
        if not self._reported:
            return None
        seq = min(self._reported)
        reported = self._reported[seq]
        complete = self._ranks == set(reported.offers)
        if not complete and now - reported.first < self._timeout_s:
            return None
        offers = {rank: offer for rank, offer in reported.offers.items() if offer is not None}
        if len(offers) < len(self._ranks):
            return seq, None
        first, *rest = offers.values()
        return seq, offers if all(first.same_pages(other) for other in rest) else None

    def decided(self, seq: int) -> None:
        """`ready`'s answer was acted on."""
        self._reported.pop(seq, None)
        self._next = seq + 1

    def drop(self) -> list[int]:
        """Give up on everything that waits; returns the numbers."""
        seqs = sorted(self._reported)
        self._reported.clear()
        if seqs:
            self._next = max(self._next, seqs[-1] + 1)
        return seqs


@dataclass(eq=False)
class Backup:
    """One decided backup. `fresh`: per part, which of its pages are to be copied, and where."""

    seq: int
    fresh: list[tuple[PagePool, Slots]]
    owner: Backups
    copies: int = 0
    failed: bool = False
    copied: bool = False
    awaits_prefix: bool = False
    """Its ack waits until what comes before it has been copied, or cannot be."""
    prefix_of: Backup | None = None
    """It has no ack of its own: it is what another one waits for."""
    waits_for: set[Backup] = field(default_factory=set)
    waiters: list[Backup] = field(default_factory=list)
    result: bool | None = None

    @property
    def pages(self) -> int:
        return sum(len(slots) for _, slots in self.fresh)


@dataclass(frozen=True)
class Copy:
    """Pages that every rank has to copy for a backup: part number, which pages, to which slots."""

    part: int
    pool: PagePool
    pages: Slots
    slots: Slots


class NoRoomError(Exception):
    """Not enough slots now. `missing`: pool and how many it lacks."""

    def __init__(self, pool: PagePool, missing: int) -> None:
        super().__init__(pool.name)
        self.pool = pool
        self.missing = missing


class Writers:
    """Which backup is writing which page, over all groups: a page is copied once."""

    def __init__(self) -> None:
        self._writers: dict[tuple[int, int], Backup] = {}

    def __len__(self) -> int:
        return len(self._writers)

    def of(self, pool: PagePool, slot: int) -> Backup | None:
        return self._writers.get((id(pool), slot))

    def add(self, pool: PagePool, slots: Slots, backup: Backup) -> None:
        for slot in slots.tolist():
            self._writers[id(pool), slot] = backup

    def remove(self, pool: PagePool, slots: Slots) -> None:
        for slot in slots.tolist():
            del self._writers[id(pool), slot]


class Backups:
    """Backups of one group from decision to ack.

    Args:
        ranks: How many copies each backup needs.
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
        self._queue.append(Backup(seq, [], self, copied=True, failed=True))
        self._settle(self._queue[-1])

    def decide(
        self, seq: int, offer: Offer, pools: Sequence[PagePool], tick: int
    ) -> tuple[Backup, list[Copy]]:
        """Give slots to the pages that are not here yet.

        Args:
            offer: Any rank's; they are the same in all that matters here.
            pools: Per part, its pool.

        Raises: NoRoomError: nothing was changed; make room and ask again.
        """
        known = _known(offer, pools)
        backup = Backup(seq, [], self)
        copies = self._place(backup, offer, pools, known, tick)
        self._queue.append(backup)
        self._settle(backup)
        return backup, copies

    def await_prefix(self, backup: Backup) -> bool:
        """What comes before this backup has been lost: its ack waits for that to be copied.
        False: it has been acked already."""
        backup.awaits_prefix = backup.result is None
        return backup.awaits_prefix

    def copy_prefix(
        self, backup: Backup, offer: Offer, pools: Sequence[PagePool], tick: int
    ) -> tuple[Backup, list[Copy]]:
        """Give slots to those of the pages before a backup that are not here.

        Raises: NoRoomError: nothing was changed; make room and ask again, or `give_up_prefix`.
        """
        known = _known(offer, pools)
        prefix = Backup(backup.seq, [], self, prefix_of=backup)
        copies = self._place(prefix, offer, pools, known, tick)
        self._settle(prefix)
        return prefix, copies

    def give_up_prefix(self, backup: Backup) -> None:
        """What comes before this backup will not come."""
        backup.awaits_prefix = False
        self._settle(backup)

    def _place(
        self,
        backup: Backup,
        offer: Offer,
        pools: Sequence[PagePool],
        known: list[list[int | None]],
        tick: int,
    ) -> list[Copy]:
        """Give slots to the pages that have none; what others are writing is waited for."""
        copies = []
        for number, (part, pool, here) in enumerate(zip(offer.parts, pools, known, strict=True)):
            for slot in here:
                writer = None if slot is None else self._writers.of(pool, slot)
                if writer is not None:
                    backup.waits_for.add(writer)
            slots = pool.reserve(part.keys, offer.parent, here, tick)
            pages = np.array([i for i, slot in enumerate(here) if slot is None], np.int64)
            if len(pages):
                fresh = slots[pages]
                self._writers.add(pool, fresh, backup)
                backup.fresh.append((pool, fresh))
                copies.append(Copy(number, pool, pages, fresh))
        for writer in backup.waits_for:
            writer.waiters.append(backup)
        backup.copies = self._ranks if copies else 0
        backup.copied = not copies
        self.pages_in_flight += backup.pages
        return copies

    def copied(self, backup: Backup, ok: bool) -> None:
        """One rank's copies of a backup have retired."""
        backup.copies -= 1
        backup.failed = backup.failed or not ok
        if backup.copies:
            return
        backup.copied = True
        self.pages_in_flight -= backup.pages
        for pool, slots in backup.fresh:
            self._writers.remove(pool, slots)
            if backup.failed:
                pool.abort(slots)
            else:
                pool.commit(slots)
        # They wait for these pages alone, not for what else this one's ack waits for: two
        # backups that build on each other's pages would wait for ever.
        for waiter in backup.waiters:
            waiter.waits_for.discard(backup)
            waiter.failed = waiter.failed or backup.failed
            waiter.owner._settle(waiter)
        self._settle(backup)

    def _settle(self, backup: Backup) -> None:
        """Fix the result once it is known, and ack."""
        if backup.result is None and backup.copied:
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


def _known(offer: Offer, pools: Sequence[PagePool]) -> list[list[int | None]]:
    """Per part, the slot of each page, None for those that are not here.

    Raises: NoRoomError: there are more of those than free slots.
    """
    known = [
        [pool.find(key) for key in part.keys] for part, pool in zip(offer.parts, pools, strict=True)
    ]
    for pool, here in zip(pools, known, strict=True):
        missing = sum(slot is None for slot in here) - pool.free_slots
        if missing > 0:
            raise NoRoomError(pool, missing)
    return known


def runs(seqs: Sequence[tuple[int, bool]]) -> Iterator[tuple[int, bytes]]:
    """Results in order as runs of consecutive numbers, each of a message's size at most: (first,
    one byte each)."""
    start = 0
    for i in range(1, len(seqs) + 1):
        full = i - start == limits.MAX_ITEMS_PER_FLUSH
        if i == len(seqs) or full or seqs[i][0] != seqs[i - 1][0] + 1:
            yield seqs[start][0], bytes(kept for _, kept in seqs[start:i])
            start = i
