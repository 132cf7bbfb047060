"""What a rank has offered to the tier, until its outcome is known: queued, sent, answered. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from operator import itemgetter
from typing import NamedTuple

from tierd.wire import limits
from tierd_client.packing import Parts, no_parts, number_keys
from tierd_client.ring import RingSpace

MAX_FLUSH_PAGES = limits.MAX_PAGES_PER_MESSAGE // 2
FLUSH_PAGES, FLUSH_ITEMS = 1 << 15, 1 << 10
"""More than so many go in messages of their own: the daemon reads each in a fraction of a
millisecond, with lookups in between."""


class Ack(NamedTuple):
    """The outcome of one backup. `kept` false: it is not in the tier, for whatever reason."""

    seq: int
    node_id: int | None
    kept: bool


class Need(NamedTuple):
    """A backup before which the tier has lost pages that are still on the device."""

    seq: int
    node_id: int | None


class Nodes(NamedTuple):
    """Backups by columns: row i of each list is node i.

    Attributes:
        seqs: Their sequence numbers.
        counts: How many of the parts are its: the next ones. 0 for a tombstone.
        parents: The key of the page before its first one: b"" if there is none, None if unknown.
        parts: Those of all nodes, one after the other.
    """

    seqs: list[int]
    counts: list[int]
    parents: list[bytes | None]
    parts: Parts

    def pages(self) -> list[int]:
        """Of each node, in all its pools together."""
        return self._sums(self.parts.pages)

    def tokens(self) -> list[int]:
        """Token slots of each node, in all its pools together."""
        return self._sums(self.parts.tokens)

    def _sums(self, column: Iterable[int]) -> list[int]:
        rest = iter(column)
        return [sum(islice(rest, count)) for count in self.counts]

    def with_tombstones(self, shed: Sequence[int]) -> Nodes:
        """These and others that have no parts, in the order of their numbers."""
        if not shed:
            return self
        own = zip(self.seqs, self.counts, self.parents, strict=True)
        rows = sorted([*own, *((seq, 0, None) for seq in shed)], key=itemgetter(0))
        seqs, counts, parents = zip(*rows, strict=True)
        return Nodes(list(seqs), list(counts), list(parents), self.parts)

    def select(self, wanted: Sequence[bool]) -> Nodes:
        """Some of them."""
        of_parts = [w for w, count in zip(wanted, self.counts, strict=True) for _ in range(count)]
        columns = [list(compress(column, of_parts)) for column in self.parts]
        counts = list(compress(self.counts, wanted))
        return Nodes(
            list(compress(self.seqs, wanted)),
            counts,
            list(compress(self.parents, wanted)),
            number_keys(Parts(*columns), counts),
        )


class Batch(NamedTuple):
    """What one message carries: tombstones, and backups."""

    shed: list[int]
    nodes: Nodes

    def split(self, room: int) -> tuple[list[int], Nodes]:
        """The numbers that go as tombstones, and the backups that fit into a message and whose
        token slots find room in the ring."""
        parts = self.nodes.parts
        if sum(parts.tokens) <= room and sum(parts.pages) <= MAX_FLUSH_PAGES:
            return self.shed, self.nodes
        fits = []
        for pages, tokens in zip(self.nodes.pages(), self.nodes.tokens(), strict=True):
            fits.append(tokens <= room and pages <= MAX_FLUSH_PAGES)
            room -= tokens if fits[-1] else 0
        lost = [seq for seq, fit in zip(self.nodes.seqs, fits, strict=True) if not fit]
        return self.shed + lost, self.nodes.select(fits)


class _Sent(NamedTuple):
    """A message: its ticket, its last number, where its token slots end in the ring, and when."""

    ticket: int
    last_seq: int
    ring_end: int
    at: float


class Outbox:
    """Backups of one rank in sequence order.

    Attributes:
        ring: The index ring that their token slots go through.
        next_seq: Number of the next backup.
    """

    def __init__(self, ring_size: int) -> None:
        self.ring = RingSpace(ring_size)
        self.next_seq = 0
        self._queued, self._queued_keys = _no_nodes(), 0
        self._tombstones: list[int] = []
        # Nodes whose outcome the caller has not had, the oldest of which has the number `_first`,
        # and those outcomes that are here.
        self._node_ids: deque[int | None] = deque()
        self._first = 0
        self._results: dict[int, bool] = {}
        # Messages whose acks are not all here: their ready words and their ring are in use.
        self._sent: deque[_Sent] = deque()
        self._needs: list[int] = []

    @property
    def first_unsent(self) -> int:
        """The number that a new connection begins with."""
        return self.next_seq - len(self._queued.seqs)

    @property
    def pending(self) -> int:
        """Backups whose outcome the caller has not had."""
        return len(self._node_ids)

    def offer(
        self,
        parts: Parts,
        counts: list[int],
        node_ids: Sequence[int | None],
        parents: Sequence[bytes | None],
    ) -> int:
        """Queue backups. Returns: the number of the first one."""
        first = self.next_seq
        self.next_seq = first + len(counts)
        queued = self._queued
        queued.seqs.extend(range(first, self.next_seq))
        queued.counts.extend(counts)
        queued.parents.extend(parents)
        queued.parts.pools.extend(parts.pools)
        queued.parts.keys.extend(parts.keys)
        queued.parts.slots.extend(parts.slots)
        queued.parts.pages.extend(parts.pages)
        queued.parts.tokens.extend(parts.tokens)
        queued.parts.first.extend(map(self._queued_keys.__add__, parts.first))
        self._queued_keys += sum(compress(parts.pages, parts.keys))  # those that have their own
        self._node_ids.extend(node_ids)
        return first

    def batches(self) -> Iterator[Batch]:
        """All that is to be sent, in order, a message at a time. Empties the queue."""
        if not self._queued.seqs and not self._tombstones:
            return
        nodes = self._take_queued()
        shed, self._tombstones = self._tombstones, []
        while len(shed) > FLUSH_ITEMS:
            yield Batch(shed[:FLUSH_ITEMS], _no_nodes())
            shed = shed[FLUSH_ITEMS:]
        if len(nodes.seqs) <= FLUSH_ITEMS and sum(nodes.parts.pages) <= FLUSH_PAGES:
            yield Batch(shed, nodes)
            return
        numbers = _messages(nodes.pages())
        for number in range(numbers[-1] + 1):
            yield Batch(shed, nodes.select([n == number for n in numbers]))
            shed = []

    def _take_queued(self) -> Nodes:
        nodes, self._queued, self._queued_keys = self._queued, _no_nodes(), 0
        return nodes

    def sent(self, ticket: int, last_seq: int, ring_end: int, now: float) -> None:
        """A message is on its way."""
        if self._sent:
            last_seq = max(last_seq, self._sent[-1].last_seq)
        self.ring.head = ring_end
        self._sent.append(_Sent(ticket, last_seq, ring_end, now))

    def not_sent(self, batch: Batch) -> None:
        """A message found no place: its backups go as tombstones, later."""
        self._tombstones += batch.shed + batch.nodes.seqs

    @property
    def tickets(self) -> tuple[int, ...]:
        """The oldest ticket whose ready words may still be looked at; none if nothing waits."""
        return (self._sent[0].ticket,) if self._sent else ()

    @property
    def awaits_answers(self) -> bool:
        """Has a message been sent whose acks are not all here? If not, the daemon has nothing to
        say of backups."""
        return bool(self._sent)

    def oldest_s(self, now: float) -> float:
        """How long the oldest message has waited for its acks."""
        return now - self._sent[0].at if self._sent else 0.0

    # --- answers ------------------------------------------------------------------------------

    def settle(self, first_seq: int, results: bytes) -> None:
        """Outcomes have come, a byte each. Numbers that nobody waits for are passed over."""
        first, end = self._first, self.next_seq
        for seq, kept in enumerate(results, first_seq):
            if first <= seq < end:
                self._results.setdefault(seq, bool(kept))

    def fail(self) -> None:
        """Nothing that has no outcome yet is kept."""
        for seq in range(self._first, self.next_seq):
            self._results.setdefault(seq, False)
        self._take_queued()
        self._tombstones.clear()
        self._sent.clear()
        self._needs.clear()

    def forget(self) -> None:
        """Nobody waits for any outcome."""
        self.fail()
        self._node_ids.clear()
        self._first = self.next_seq
        self._results.clear()

    def acks(self) -> list[Ack]:
        """Outcomes since the last call, in sequence order, each exactly once."""
        if not self._results:
            return []
        acks: list[Ack] = []
        node_ids, results = self._node_ids, self._results
        while (kept := results.pop(self._first, None)) is not None:
            acks.append(Ack(self._first, node_ids.popleft(), kept))
            self._first += 1
        while self._sent and self._sent[0].last_seq < self._first:
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
        wanted, self._needs = sorted(set(self._needs)), []
        return [
            Need(seq, self._node_ids[seq - self._first])
            for seq in wanted
            if self._first <= seq < self.next_seq
        ]


def _no_nodes() -> Nodes:
    return Nodes([], [], [], no_parts())


def _messages(sizes: Sequence[int]) -> list[int]:
    """Which message each node goes into, in order, so that none is too large."""
    numbers: list[int] = []
    number = nodes = pages = 0
    for size in sizes:
        if nodes and (pages + size > FLUSH_PAGES or nodes >= FLUSH_ITEMS):
            number, nodes, pages = number + 1, 0, 0
        numbers.append(number)
        nodes, pages = nodes + 1, pages + size
    return numbers
