"""What a rank has offered to the tier, until its outcome is known: queued, sent, answered. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tierd.wire import limits, messages
from tierd.wire.layout import TICKETS
from tierd_client.packing import Counted
from tierd_client.ring import RingSpace

MAX_FLUSH_PAGES = limits.MAX_PAGES_PER_MESSAGE // 2
FLUSH_PAGES, FLUSH_ITEMS = 1 << 15, 1 << 10
"""More than so many go in messages of their own: the daemon reads each in a fraction of a
millisecond, with lookups in between."""
SPARE_TICKETS = 64
"""Ready words that flushes leave for restores."""


class Ack(NamedTuple):
    """The outcome of one backup. `kept` false: it is not in the tier, for whatever reason."""

    seq: int
    node_id: int | None
    kept: bool


class Need(NamedTuple):
    """A backup before which the tier has lost pages that are still on the device."""

    seq: int
    node_id: int | None


class Queued(NamedTuple):
    """A backup that has not been sent. `size`: its pages in all pools."""

    seq: int
    pages: Sequence[Counted]
    size: int
    parent: bytes | None


class Batch(NamedTuple):
    """What one message carries: tombstones, and backups."""

    shed: list[int]
    queued: list[Queued]

    def split(self, room: int) -> tuple[list[Queued], list[messages.BackupItem]]:
        """Those whose page numbers find room in the ring, and tombstones of all others."""
        taken = []
        shed = [messages.BackupItem(seq, True, []) for seq in self.shed]
        for queued in self.queued:
            if queued.size <= room:
                room -= queued.size
                taken.append(queued)
            else:
                shed.append(messages.BackupItem(queued.seq, True, []))
        return taken, shed


class _Sent(NamedTuple):
    """A message: its ticket, its last number, where its page numbers end in the ring, and when."""

    ticket: int
    last_seq: int
    ring_end: int
    at: float


class Outbox:
    """Backups of one rank in sequence order.

    Attributes:
        ring: The index ring that their page numbers go through.
        next_seq: Number of the next backup.
    """

    def __init__(self, ring_size: int) -> None:
        self.ring = RingSpace(ring_size)
        self.next_seq = 0
        self._queued: list[Queued] = []
        self._tombstones: list[int] = []
        # Numbers and nodes whose outcome the caller has not had, and those outcomes that are here.
        self._pending: deque[tuple[int, int | None]] = deque()
        self._results: dict[int, bool] = {}
        # Messages whose acks are not all here: their ready words and their ring are in use.
        self._sent: deque[_Sent] = deque()
        self._needs: list[int] = []

    @property
    def first_unsent(self) -> int:
        """The number that a new connection begins with."""
        return self.next_seq - len(self._queued)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def offer(self, pages: Sequence[Counted], node_id: int | None, parent: bytes | None) -> int:
        """Queue a backup. Returns: its number."""
        seq = self.next_seq
        self.next_seq = seq + 1
        self._queued.append(Queued(seq, pages, sum([n for _, n in pages]), parent))
        self._pending.append((seq, node_id))
        return seq

    def batches(self) -> Iterator[Batch]:
        """All that is to be sent, in order, a message at a time. Empties the queue."""
        queued, self._queued = self._queued, []
        shed, self._tombstones = self._tombstones, []
        while len(shed) > FLUSH_ITEMS:
            yield Batch(shed[:FLUSH_ITEMS], [])
            shed = shed[FLUSH_ITEMS:]
        batch: list[Queued] = []
        pages = 0
        for item in queued:
            if batch and (pages + item.size > FLUSH_PAGES or len(batch) >= FLUSH_ITEMS):
                yield Batch(shed, batch)
                shed, batch, pages = [], [], 0
            batch.append(item)
            pages += item.size
        if shed or batch:
            yield Batch(shed, batch)

    def sent(self, ticket: int, last_seq: int, ring_end: int, now: float) -> None:
        """A message is on its way."""
        if self._sent:
            last_seq = max(last_seq, self._sent[-1].last_seq)
        self.ring.head = ring_end
        self._sent.append(_Sent(ticket, last_seq, ring_end, now))

    def not_sent(self, batch: Batch) -> None:
        """A message found no place: its backups go as tombstones, later."""
        self._tombstones += batch.shed
        self._tombstones += [queued.seq for queued in batch.queued]

    def has_ticket(self, ticket: int) -> bool:
        """Are the next ready words after `ticket` free?"""
        return not self._sent or ticket - self._sent[0].ticket < TICKETS - SPARE_TICKETS

    def oldest_s(self, now: float) -> float:
        """How long the oldest message has waited for its acks."""
        return now - self._sent[0].at if self._sent else 0.0

    # --- answers ------------------------------------------------------------------------------

    def settle(self, first_seq: int, results: bytes) -> None:
        """Outcomes have come, a byte each. Numbers that nobody waits for are passed over."""
        first = self._pending[0][0] if self._pending else self.next_seq
        for seq, kept in enumerate(results, first_seq):
            if first <= seq < self.next_seq:
                self._results.setdefault(seq, bool(kept))

    def fail(self) -> None:
        """Nothing that has no outcome yet is kept."""
        for seq, _ in self._pending:
            self._results.setdefault(seq, False)
        self._queued.clear()
        self._tombstones.clear()
        self._sent.clear()
        self._needs.clear()

    def forget(self) -> None:
        """Nobody waits for any outcome."""
        self.fail()
        self._pending.clear()
        self._results.clear()

    def acks(self) -> list[Ack]:
        """Outcomes since the last call, in sequence order, each exactly once."""
        if not self._results:
            return []
        acks: list[Ack] = []
        pending, results = self._pending, self._results
        while pending and (kept := results.pop(pending[0][0], None)) is not None:
            acks.append(Ack(*pending.popleft(), kept))
        first = pending[0][0] if pending else self.next_seq
        while self._sent and self._sent[0].last_seq < first:
            # Also of backups that no copier was told of, whose ring it has not given back.
            self.ring.free_up_to(self._sent.popleft().ring_end)
        return acks

    def need(self, seq: int) -> None:
        """The tier wants what comes before a backup."""
        self._needs.append(seq)

    def needs(self) -> list[Need]:
        """What it wants since the last call."""
        if not self._needs:
            return []
        wanted, self._needs = set(self._needs), []
        return [Need(*pending) for pending in self._pending if pending[0] in wanted]
