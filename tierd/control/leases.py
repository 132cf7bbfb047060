"""What an engine is about to load: pages held from lookup to load, and from load to landing.

Pure, one table a group of ranks. A lookup fixes one answer for all ranks and holds its pages: a
lease. A load turns the lease into pins, which last until every rank's copier has retired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tierd.control.catalog import PagePool
from tierd.eviction.policy import Slots

Want = Sequence[tuple[PagePool, Sequence[bytes]]]
"""Per pool of a request, the chain of keys it asks for; all of one length."""

Held = list[tuple[PagePool, Slots]]


@dataclass
class Lease:
    """One answered lookup. `signature` is what was asked, byte for byte."""

    signature: bytes
    lengths: list[int]
    held: Held
    expires: float


@dataclass
class Pins:
    """One step's loads. `ranks_left`: ranks whose copies have not retired.

    `plan`: per request its slots, or None if the step cannot be served as a whole.
    """

    signature: bytes
    plan: list[Held] | None
    ranks_left: set[int]
    deadline: float
    held: Held = field(default_factory=list)


class Leases:
    """Leases and pins of one group.

    Args:
        lease_s: How long a lease lasts if nothing happens.
        max_share: Leases never hold more than this share of a pool's slots.
    """

    def __init__(self, *, lease_s: float, max_share: float) -> None:
        self._lease_s = lease_s
        self._max_share = max_share
        self._leases: dict[str, Lease] = {}
        self._pins: dict[int, Pins] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def restoring(self) -> int:
        """Steps whose loads are not over."""
        return len(self._pins)

    def lookup(self, rid: str, want: Want, signature: bytes, *, now: float, tick: int) -> list[int]:
        """Restorable page counts, ascending, the same for every rank that asks the same.

        Few: the longest and some shorter ones. SGLang builds a mask from the list one element at
        a time (0.5.23, `_sync_restorable_prefix`).
        """
        lease = self._leases.get(rid)
        if lease is not None:
            if lease.signature == signature:
                lease.expires = now + self._lease_s
                return lease.lengths
            self._end(rid)
        runs = [pool.prefix(keys) for pool, keys in want]
        longest = min(len(run) for run in runs)
        for (pool, keys), _ in zip(want, runs, strict=True):
            pool.hits += longest
            pool.misses += len(keys) - longest
        for (pool, _), run in zip(want, runs, strict=True):
            room = max(0, int(self._max_share * pool.capacity) - pool.held)
            # A prefix that many requests share is held already, and takes no more of the share.
            more = np.cumsum(~pool.are_held(run[:longest]))
            longest = int(np.searchsorted(more, room, side="right"))
        if not longest:
            return []
        held: Held = []
        for (pool, _), run in zip(want, runs, strict=True):
            slots = run[:longest]
            pool.touch(slots, tick)
            pool.hold(slots)
            held.append((pool, slots))
        lengths = sorted({longest, longest * 3 // 4, longest // 2, longest // 4} - {0})
        self._leases[rid] = Lease(signature, lengths, held, now + self._lease_s)
        return lengths

    def pin(
        self,
        number: int,
        wants: Sequence[tuple[str, Want]],
        signature: bytes,
        ranks: set[int],
        *,
        deadline: float,
        tick: int,
    ) -> Pins:
        """Turn the leases of a step's loads into pins; decided once, whichever rank asks first.

        A request without a lease (it ran out) is served all the same if its pages are here. If
        any page is not, nothing of the step is restored: it has one verdict.
        """
        pins = self._pins.get(number)
        if pins is not None:
            return pins
        plan: list[Held] | None = []
        for _, want in wants:
            runs = [(pool, pool.prefix(keys)) for pool, keys in want]
            whole = all(
                len(run) == len(keys) for (_, run), (_, keys) in zip(runs, want, strict=True)
            )
            if not whole:
                plan = None
                break
            assert plan is not None
            plan.append(runs)
        pins = Pins(signature, plan, set(ranks), deadline)
        for held in plan or ():
            for pool, slots in held:
                pool.touch(slots, tick)
                pool.hold(slots)
                pins.held.append((pool, slots))
        for rid, _ in wants:
            self._end(rid)
        self._pins[number] = pins
        return pins

    def retire(self, number: int, rank: int) -> None:
        """A rank's copies of a step are off the wire, or were never on it."""
        pins = self._pins.get(number)
        if pins is None:
            return
        pins.ranks_left.discard(rank)
        if not pins.ranks_left:
            _release(pins.held)
            del self._pins[number]

    def cancel(self, rid: str) -> None:
        """The request will not load."""
        self._end(rid)

    def expire(self, now: float) -> None:
        """End what ran out."""
        for rid in [rid for rid, lease in self._leases.items() if lease.expires <= now]:
            self._end(rid)

    def unfinished(self, rank: int) -> list[int]:
        """Steps whose copies of this rank have not retired."""
        return [number for number, pins in self._pins.items() if rank in pins.ranks_left]

    def overdue(self, now: float) -> list[tuple[int, set[int]]]:
        """Steps past their deadline: (number, ranks that are still to come or to retire)."""
        return [
            (number, set(pins.ranks_left))
            for number, pins in self._pins.items()
            if pins.deadline <= now
        ]

    def end_all(self) -> None:
        """The group is gone or starts afresh. Pins stay until their copies have retired."""
        for rid in list(self._leases):
            self._end(rid)

    def _end(self, rid: str) -> None:
        lease = self._leases.pop(rid, None)
        if lease is not None:
            _release(lease.held)


def _release(held: Held) -> None:
    for pool, slots in held:
        pool.release(slots)
