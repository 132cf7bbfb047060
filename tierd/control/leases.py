"""What an engine is about to load: pages held from lookup to load, and from load to landing.

Pure, one table a group of ranks. A lookup fixes one answer for all ranks and holds its pages: a
lease. A load turns the lease into pins, which last until every rank's copier has retired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierd.control.keys import Keys
from tierd.control.pages import PagePool
from tierd.eviction.policy import Slots
from tierd.wire.limits import KEY_BYTES

FEW = 4
"""Boundaries that a lookup answers with, at most."""
MAX_LEASED_KEYS = 1 << 23
"""What the lookups behind a group's leases have asked for: control remembers some 40 bytes of each.
Pages count against a pool's share once, however many leases hold them, so that this is what bounds
thousands of long prompts with a prefix in common. Those beyond it miss until others have loaded."""

Want = Sequence[tuple[PagePool, Keys]]
"""Per pool of a load, the keys of the pages that it restores."""

Held = list[tuple[PagePool, Slots]]


@dataclass
class Lease:
    """One answered lookup: of which pools, of which chain."""

    pools: list[PagePool]
    keys: Keys
    lengths: list[int]
    held: Held
    positions: dict[int, Slots]
    """By windowed pool (its id), where in the chain each of its held pages stands, ascending."""
    expires: float
    noted: bool = False
    """Has the eviction been told that its pages were used?"""


@dataclass
class Pins:
    """One step's loads. `ranks_left`: ranks whose copies have not retired.

    `signature`: what must be equal on every rank.
    `plan`: per request its slots, or None if the step cannot be served as a whole.
    `held`: those, and whatever else the leases of its requests have held.
    """

    signature: object
    plan: list[Held] | None
    ranks_left: set[int]
    deadline: float
    held: Held = field(default_factory=list)
    noted: bool = False
    """As of `Lease`."""


class Leases:
    """Leases and pins of one group.

    Args:
        lease_s: How long a lease lasts if nothing happens.
        max_share: Leases never hold more than this share of a pool's slots.
        max_keys: Keys that they remember together, at most.
    """

    def __init__(
        self, *, lease_s: float, max_share: float, max_keys: int = MAX_LEASED_KEYS
    ) -> None:
        self._lease_s = lease_s
        self._max_share = max_share
        self._max_keys = max_keys
        self._keys = 0
        self._leases: dict[str, Lease] = {}
        self._pins: dict[int, Pins] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def restoring(self) -> int:
        """Steps whose loads are not over."""
        return len(self._pins)

    def lookup(
        self,
        rid: str,
        keys: Keys,
        pools: list[PagePool],
        *,
        now: float,
        answer: Callable[[list[int], float], None] = lambda _, __: None,
    ) -> list[int]:
        """Page counts at which a chain can be resumed, ascending, the same for every rank that
        asks the same. All the pages that they need are leased.

        Few: the longest and some shorter ones. SGLang builds a mask from the list one element at
        a time (0.5.23, `_sync_restorable_prefix`).

        Args:
            pools: Whose pages a boundary needs. At least one has no window.
            answer: Told the counts as soon as they are known, and for how many seconds they are
                held, before the rest is done: nobody has to wait for that. If it raises, nothing
                more is leased.
        """
        lease = self._leases.get(rid)
        if lease is not None:
            if lease.pools == pools and lease.keys == keys:
                # Who waits for the memory of pages that have been withdrawn waits no longer than
                # for what was granted before.
                if not any(pool.slots.is_any_withdrawn(slots) for pool, slots in lease.held):
                    lease.expires = now + self._lease_s
                answer(lease.lengths, max(0.0, lease.expires - now))
                return lease.lengths
            self._end(rid)
        if self._keys + len(keys) > self._max_keys:
            answer([], self._lease_s)
            return []
        whole = [pool for pool in pools if not pool.window]
        windowed = [pool for pool in pools if pool.window]
        runs = [pool.prefix(keys) for pool in whole]
        longest = min(len(run) for run in runs)
        for pool, run in zip(whole, runs, strict=True):
            pool.hits += longest
            pool.misses += len(keys) - longest
            room = self._room(pool)
            if longest > room:
                # A prefix that many requests share is held already, and takes no more of the share.
                more = np.cumsum(~pool.slots.are_held(run[:longest]))
                longest = int(np.searchsorted(more, room, side="right"))
        windows = [pool.present(keys[:longest]) for pool in windowed]
        lengths = few(boundaries(longest, windowed, windows), spread=not windowed)
        held: Held = []
        positions: dict[int, Slots] = {}
        for pool, slots in zip(windowed, windows, strict=True):
            lengths, needed = self._fit(pool, slots, lengths)
            held.append((pool, slots[needed]))
            positions[id(pool)] = needed
        answer(lengths, self._lease_s)
        if not lengths:
            return []
        held += [(pool, run[: lengths[-1]]) for pool, run in zip(whole, runs, strict=True)]
        for pool, slots in held:
            pool.hold(slots)
        self._leases[rid] = Lease(pools, keys, lengths, held, positions, now + self._lease_s)
        self._keys += len(keys)
        return lengths

    def note_use(self, rid: str, tick: int) -> None:
        """Tell the eviction what a lookup has found, once. Apart from `lookup`, because nobody has
        to wait for it."""
        lease = self._leases.get(rid)
        if lease is None or lease.noted:
            return
        lease.noted = True
        for pool, slots in lease.held:
            pool.touch(slots, tick)

    def _room(self, pool: PagePool) -> int:
        """How many more pages of a pool leases may hold."""
        return max(0, int(self._max_share * pool.capacity) - pool.held)

    def _fit(self, pool: PagePool, slots: Slots, lengths: list[int]) -> tuple[list[int], Slots]:
        """The longest boundaries whose windows fit in a pool's share, and where in the chain their
        pages stand."""
        room = self._room(pool)
        kept: list[int] = []
        needed: set[int] = set()
        for n in reversed(lengths):
            more = needed | set(range(max(0, n - pool.window), n))
            pages = slots[np.fromiter(more, np.int64)]
            if int(np.count_nonzero(~pool.slots.are_held(pages))) > room:
                break
            kept.append(n)
            needed = more
        return kept[::-1], np.array(sorted(needed), np.int64)

    def pin(
        self,
        number: int,
        wants: Sequence[tuple[str, Want]],
        signature: object,
        ranks: set[int],
        *,
        deadline: float,
    ) -> Pins:
        """Turn the leases of a step's loads into pins; decided once, whichever rank asks first.

        A request without a lease (it ran out) is served all the same if its pages are here. If
        any page is not, nothing of the step is restored: it has one verdict.
        """
        pins = self._pins.get(number)
        if pins is not None:
            return pins
        held: Held = []
        loads = [self._load(rid, want, held) for rid, want in wants]
        plan = [load for load in loads if load is not None]
        if len(plan) == len(loads):
            pins = Pins(signature, plan, set(ranks), deadline, held)
        else:
            _release(held)
            pins = Pins(signature, None, set(ranks), deadline)
        self._pins[number] = pins
        return pins

    def note_load(self, number: int, tick: int) -> None:
        """Tell the eviction what a step loads, once. Apart from `pin`, because nobody has to wait
        for it."""
        pins = self._pins.get(number)
        if pins is None or pins.noted:
            return
        pins.noted = True
        for load in pins.plan or ():
            for pool, slots in load:
                if not pool.slots.is_any_withdrawn(slots):
                    pool.touch(slots, tick)

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

    def _load(self, rid: str, want: Want, held: Held) -> Held | None:
        """End a request's lease, and hold what it loads. None: not all of it is here.

        Args: `held`: gets all that is held for it from now on. What the lease has held is handed
            over, not held anew.
        """
        lease = self._forget(rid)
        if lease is not None:
            held += lease.held
        load: Held = []
        for pool, keys in want:
            slots = _leased(lease, pool, keys) if lease is not None else None
            if slots is None:
                slots = pool.present(keys)
                if (slots < 0).any():
                    return None
                pool.hold(slots)
                held.append((pool, slots))
            load.append((pool, slots))
        return load

    def _forget(self, rid: str) -> Lease | None:
        """A lease that is over; what it holds is the caller's."""
        lease = self._leases.pop(rid, None)
        if lease is not None:
            self._keys -= len(lease.keys)
        return lease

    def _end(self, rid: str) -> None:
        lease = self._forget(rid)
        if lease is not None:
            _release(lease.held)


def boundaries(
    longest: int, pools: Sequence[PagePool], slots: Sequence[Slots]
) -> Sequence[int] | Slots:
    """Page counts up to `longest` at which the window of every pool is complete.

    Args:
        slots: Per pool, its slot of each page of the chain or -1. Each of shape (longest,).
    """
    if not pools:
        return range(1, longest + 1)
    counts = np.arange(1, longest + 1)
    fits = np.ones(longest, np.bool_)
    for pool, here in zip(pools, slots, strict=True):
        # How many pages in a row, up to each, are here.
        missing = np.where(here < 0, counts, 0)
        in_a_row = counts - np.maximum.accumulate(missing)
        fits &= in_a_row >= np.minimum(counts, pool.window)
    return counts[fits]


def few(counts: Sequence[int] | Slots, *, spread: bool) -> list[int]:
    """The longest of some ascending counts, and a few others for ranks to meet at: the ones just
    below it, or spread over the whole."""
    if not len(counts):
        return []
    if not spread:
        return [int(n) for n in counts[-FEW:]]
    last = len(counts) - 1
    return sorted({int(counts[last * part // FEW]) for part in range(1, FEW + 1)})


def _leased(lease: Lease, pool: PagePool, keys: Keys) -> Slots | None:
    """The slots of some pages in a row, as a lease holds them: still theirs, also if nobody else
    can find them any more. None: it does not hold all of them, or their bytes are not right."""
    slots = next((slots for leased, slots in lease.held if leased is pool), None)
    if slots is None:
        return None
    if pool.window:
        # They stand anywhere in the chain, most likely at its end.
        at, odd = divmod(lease.keys.blob.rfind(keys.blob), KEY_BYTES)
        positions = lease.positions[id(pool)]
        first = int(positions.searchsorted(at))
        stand = positions[first : first + len(keys)]
        mine = slots[first : first + len(keys)]
        there = at >= 0 and not odd and np.array_equal(stand, np.arange(at, at + len(keys)))
    else:
        mine = slots[: len(keys)]
        there = len(mine) == len(keys) and lease.keys.blob.startswith(keys.blob)
    return mine if there and not pool.slots.is_any_spoiled(mine) else None


def _release(held: Held) -> None:
    for pool, slots in held:
        pool.release(slots)
