"""The order of one group's backups: a number is decided once for all ranks, in sequence, when each
has reported it or a time is over. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from tierd.control.keys import Keys

MAX_WAITING_NUMBERS = 1 << 20
"""Backups that wait for a decision, at most: a broken client must not take memory without end."""


class OfferPart(NamedTuple):
    """The pages of one pool in a rank's report: their keys, and where their token slots begin in
    its ring. `page_tokens`: how many each page has there."""

    pool: str
    keys: Keys
    ring: int
    page_tokens: int = 1

    @property
    def ring_end(self) -> int:
        """The ring position after the last token slot."""
        return self.ring + len(self.keys) * self.page_tokens


class Offer(NamedTuple):
    """What one rank reports of one backup. `parent`: None if it cannot tell."""

    epoch: str
    parts: tuple[OfferPart, ...]
    ticket: int
    fence: int
    parent: bytes | None

    @property
    def pages(self) -> int:
        """Pages of all its parts."""
        return sum(len(part.keys) for part in self.parts)

    @property
    def ring_end(self) -> int:
        """The ring position after the last token slot."""
        return max((part.ring_end for part in self.parts), default=0)

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


class _Reported(NamedTuple):
    first: float
    offers: dict[int, Offer | None]


class Sequencer:
    """Yields each sequence number once, in order, with all ranks' offers or as shed.

    Args:
        ranks: The group's ranks, each with the first number it will report.
        timeout_s: How long a number waits for the last rank.
        max_pages: What a rank may have waiting for decisions; what is beyond is shed.
        max_numbers: How many numbers wait; what is beyond is too late.
    """

    def __init__(
        self,
        ranks: dict[int, int],
        timeout_s: float,
        *,
        max_pages: int,
        max_numbers: int = MAX_WAITING_NUMBERS,
    ) -> None:
        self._ranks = set(ranks)
        self._timeout_s = timeout_s
        self._max_pages = max_pages
        self._max_numbers = max_numbers
        self._pages = dict.fromkeys(ranks, 0)
        self._next = max(ranks.values())
        # In the order in which they were first reported.
        self._reported: OrderedDict[int, _Reported] = OrderedDict()
        self._order: list[int] = []

    @property
    def waiting(self) -> int:
        """Numbers reported by some rank and not decided."""
        return len(self._reported)

    def oldest_s(self, now: float) -> float:
        """How long the oldest undecided number has waited, seconds; 0 if there is none."""
        return now - next(iter(self._reported.values())).first if self._reported else 0.0

    def report(self, rank: int, seq: int, offer: Offer | None, now: float) -> bool:
        """A rank reports a number; None: it had to shed it. False: decided already, too late."""
        if seq < self._next:
            return False
        reported = self._reported.get(seq)
        if reported is None:
            if len(self._reported) >= self._max_numbers:
                return False
            reported = self._reported[seq] = _Reported(now, {})
            heapq.heappush(self._order, seq)
        offers = reported.offers
        if rank in offers:
            return True
        if offer is not None:
            waiting = self._pages[rank] + offer.pages
            if waiting > self._max_pages:
                offer = None
            else:
                self._pages[rank] = waiting
        offers[rank] = offer
        return True

    def ready(self, now: float) -> tuple[int, dict[int, Offer] | None] | None:
        """The next number that can be decided: its offers by rank, or None if it is shed."""
        if not self._reported:
            return None
        seq = self._order[0]
        reported = self._reported[seq]
        complete = reported.offers.keys() == self._ranks
        if not complete and now - reported.first < self._timeout_s:
            return None
        offers = {rank: offer for rank, offer in reported.offers.items() if offer is not None}
        if len(offers) < len(self._ranks):
            return seq, None
        first, *rest = offers.values()
        return seq, offers if all(first.same_pages(other) for other in rest) else None

    def decided(self, seq: int) -> None:
        """`ready`'s answer was acted on."""
        for rank, offer in self._reported.pop(heapq.heappop(self._order)).offers.items():
            self._pages[rank] -= offer.pages if offer is not None else 0
        self._next = seq + 1

    def drop(self) -> list[int]:
        """Give up on everything that waits; returns the numbers."""
        seqs = sorted(self._reported)
        self._reported.clear()
        self._order.clear()
        self._pages = dict.fromkeys(self._ranks, 0)
        if seqs:
            self._next = max(self._next, seqs[-1] + 1)
        return seqs
