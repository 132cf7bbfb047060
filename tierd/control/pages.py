"""The index of one pool: which pages lie in which slots, who holds them, and which go next.

Pure: it moves no byte. What it decides about a slot it writes to that slot's header through
`SlotRecords`, because the header is the record that outlives this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.control.chains import chains
from tierd.control.chunk_ages import ChunkAges
from tierd.control.free_slots import FreeSlots
from tierd.control.keys import MISSING, KeyIndex, Keys
from tierd.control.orphans import Orphans
from tierd.eviction.chain_reuse import ChainReuse
from tierd.eviction.columns import column, grown
from tierd.eviction.policy import NO_PARENT, Drop, EvictionPolicy, Slots
from tierd.eviction.window_lru import WindowLru
from tierd.wire.geometry import HostLayout
from tierd.wire.layout import COMMITTED, FREE, HAS_PARENT, PARENT_KNOWN, WRITING
from tierd.wire.limits import KEY_BYTES

SPAN = 4096
"""Slots whose keys are named at a time."""

_COMMITTED = bytes([COMMITTED])
_SPOILED, _WITHDRAWN = 3, 4
"""A slot whose page has gone, though somebody still holds it. Its bytes are wrong, and its header
says FREE; or they are right, and whoever holds it may load it."""

CHUNKS_TRIED = 4
"""The coldest chunks of a pool that are looked at for one that nobody uses right now."""
MOST_FOLLOWERS = 4096
"""Pages elsewhere that may go with a chunk. One that more than these follow, as a prompt that all
requests share, is worth keeping, and would take long to give up."""
MOST_LOOSENED = 1024
"""Pages that go at a time where that stands in the way of everything."""


class SlotRecords(Protocol):
    """Where the headers of a pool's slots are written."""

    def writing(
        self, slots: Slots, keys: bytes, parents: bytes, flags: npt.NDArray[np.uint32]
    ) -> None:
        """Pages take slots. Per slot: its page's key, the key of the page before it, and what is
        known of that (`layout.PARENT_KNOWN`, `HAS_PARENT`). Slots are ascending in all calls."""

    def committed(self, slots: Slots) -> None:
        """All shards of the pages in these slots are in place."""

    def freed(self, slots: Slots) -> None:
        """There is no page in these slots any more."""


class PagePool:
    """Pages of one pool of one namespace.

    `window`: how many pages before a boundary it takes to resume there; 0 is the whole chain.
    Pages of a windowed pool mean nothing without the chain's pages in the pools without one: when
    one of those goes, `Catalog` has its namesakes here go too.

    A slot is FREE, WRITING (reserved by one backup until all its shards have been copied, or have
    failed and retired) or COMMITTED. A page is visible to lookups only when COMMITTED. `hold`
    keeps committed pages from eviction: leases and pins are holds.

    `most`: how many slots to expect; more cost a copy of what is known of the others.
    """

    def __init__(
        self,
        name: str,
        page_tokens: int,
        host: HostLayout,
        shards: int,
        records: SlotRecords,
        window: int = 0,
        most: int = 0,
    ) -> None:
        self.name = name
        self.page_tokens = page_tokens
        self.host = host
        self.shards = shards
        self.window = window
        self.policy: EvictionPolicy = WindowLru(most) if window else ChainReuse(most)
        self.on_commit: Callable[[Keys], None] | None = None
        """Told of pages that become visible."""
        self.on_drop: Callable[[Keys, bool], None] | None = None
        """Told of pages that go, and whether they were visible."""
        self.arrivals = 0
        """Pages that have got a slot so far."""
        self.evictions = 0
        self.hits = 0
        self.misses = 0
        self._records = records
        self._index = KeyIndex(most)
        self._state: npt.NDArray[np.uint8] = column(np.uint8, most)
        self._holds: npt.NDArray[np.int32] = column(np.int32, most)
        self._capacity = 0
        self._committed = 0
        self._held = 0
        self._withdrawn = 0
        # Chunks that are given up as soon as nobody uses a page of theirs.
        self._leaving: set[int] = set()
        self._free = FreeSlots(most)
        self._ages = ChunkAges(lambda n: self.policy.recency(slice(*self._span(n))))
        self._orphans = Orphans()

    # --- room ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots in chunks that the pool has now."""
        return self._capacity

    @property
    def free_slots(self) -> int:
        """Slots that can be given to pages now."""
        return len(self._free)

    @property
    def pages(self) -> int:
        """Committed pages."""
        return self._committed

    @property
    def held(self) -> int:
        """Pages under at least one lease or pin."""
        return self._held

    @property
    def withdrawn(self) -> int:
        """Slots whose pages have gone, and that somebody holds still."""
        return self._withdrawn

    def add_chunk(self, ordinal: int) -> None:
        """The slots of chunk `ordinal` may be used."""
        first, end = self._span(ordinal)
        self._state = grown(self._state, end)
        self._holds = grown(self._holds, end)
        self._index.grow(end)
        self.policy.grow(end)
        self._free.add_range(first, end)
        self._capacity += end - first
        self._ages.add(ordinal)

    def coldest_chunk(self, but: Set[int] = frozenset()) -> tuple[int, int] | None:
        """The chunk that was used least recently, of those whose pages and all that follow them
        may go; of a pool of many chunks, one of the coldest.

        Args: `but`: not these.
        Returns: its last use (0 if it is empty) and its ordinal; None if there is none such.
        """
        for age, ordinal in islice(self._ages.coldest(but), CHUNKS_TRIED):
            if self.may_remove(ordinal, MOST_FOLLOWERS):
                return age, ordinal
        return None

    def oldest_chunk(self, but: Set[int] = frozenset()) -> tuple[int, int] | None:
        """The same, whether or not its pages may go. None: there is no chunk."""
        return next(self._ages.coldest(but), None)

    def may_remove(self, ordinal: int, most: int | None = None) -> bool:
        """May the pages of a chunk go, with all that follow them? Not while one of them is held or
        being written, nor if more than `most` that lie elsewhere follow."""
        doomed = self._doomed(ordinal, most)
        if doomed is None:
            return False
        slots = np.array(list(doomed), np.int64)
        return bool(self._evictable(slots).all())

    def remove_chunk(self, ordinal: int) -> int:
        """Evict every page of a chunk with all that follows them, and give its slots up.

        Returns the number of pages evicted. `may_remove`, or of one that was withdrawn `is_vacant`,
        says whether a chunk allows it.
        """
        if ordinal in self._leaving:
            self._leaving.discard(ordinal)
            return 0
        evicted = self._drop_all(self._doomed(ordinal) or set())
        self.evictions += evicted
        first, end = self._span(ordinal)
        self._free.remove_range(first, end)
        self._capacity -= end - first
        self._ages.remove(ordinal)
        return evicted

    def withdraw_chunk(self, ordinal: int) -> int:
        """Nobody finds the pages of a chunk from now on, and none come to it; those that are being
        written there go once they have come. Whoever holds a page may still load it. What comes
        after these pages elsewhere waits for them to be backed up again.

        Returns the number of pages evicted. `is_vacant` says when the last one has left.
        """
        first, end = self._span(ordinal)
        states = self._state[first:end]
        free = np.flatnonzero(states == FREE) + first
        self._leaving.add(ordinal)
        self._ages.remove(ordinal)
        self._free.remove(free)
        self._capacity -= len(free)
        evicted = self._withdraw(np.flatnonzero(states == COMMITTED) + first)
        self.evictions += evicted
        return evicted

    def is_vacant(self, ordinal: int) -> bool:
        """Is there no page in a chunk, nor one that is held or being written?"""
        return not self._state[slice(*self._span(ordinal))].any()

    def evict(self, count: int) -> int:
        """Evict up to `count` pages; returns how many went."""
        with self._dropping() as drop:
            gone = self.policy.evict(count, self._evictable, drop)
        self.evictions += gone
        return gone

    def loosen(self) -> bool:
        """So much follows the coldest chunks that none can be given up as it is: evict the coldest
        pages, the deepest first, a chunk's worth at most. Call it again and again.

        Returns: whether some went. None do while so many pages are held or being written that one
            could lie in every chunk: it might be in vain.
        """
        fixed = self._capacity - len(self._free) - (self._committed - self._held)
        if fixed >= self._capacity // self.host.chunk_slots:
            return False
        gone: list[Slots] = []
        with self._dropping() as drop:

            def note(run: Slots) -> None:
                drop(run)
                gone.append(run)

            most = min(self.host.chunk_slots, MOST_LOOSENED)
            self.evictions += self.policy.evict(most, self._evictable, note)
        for ordinal in {slot // self.host.chunk_slots for run in gone for slot in run.tolist()}:
            self._ages.look_again(ordinal)
        return bool(gone)

    # --- pages --------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The slot of a page, whether WRITING or COMMITTED."""
        return self._index.get(key)

    def find_all(self, keys: Keys) -> Slots:
        """The slot of each page, whether WRITING or COMMITTED; MISSING for those that are not
        here. Shape: (len(keys),)."""
        return self._index.find(keys)

    def being_written(self, slots: Slots) -> Slots:
        """Those of these slots that are WRITING, in their order; MISSING is none of them."""
        here = slots[slots != MISSING]
        writing: Slots = here[self._state[here] == WRITING]
        return writing

    def are_committed(self, slots: Slots) -> bool:
        """Can all of these be hit?"""
        return bool((self._state[slots] == COMMITTED).all())

    def are_withdrawn(self, slots: Slots) -> bool:
        """Are some of these held, though nobody else can find them any more?"""
        return self._withdrawn > 0 and bool((self._state[slots] >= _SPOILED).any())

    def may_load(self, slots: Slots) -> bool:
        """Are the bytes of all these right? Only for slots that the caller holds."""
        states = self._state[slots]
        return bool(((states == COMMITTED) | (states == _WITHDRAWN)).all())

    def are_held(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these are under a lease or pin. Shape: (len(slots),)."""
        return self._holds[slots] > 0

    def prefix(self, keys: Keys) -> Slots:
        """Slots of the longest run of committed pages from the first key on. Shape: (run,)."""
        found = self._index.prefix(keys)
        states = self._state[found].tobytes()
        run = len(states) - len(states.lstrip(_COMMITTED))
        return found if run == len(states) else found[:run]

    def touch(self, slots: Slots, now: int) -> None:
        """A chain was used. Its order also teaches predecessors that were not known before."""
        self.policy.touch(slots, now)
        if self.window:
            return
        unknown = np.flatnonzero(self.policy.parent[slots[1:]] == NO_PARENT) + 1
        for i in unknown.tolist():
            self._adopt(int(slots[i]), int(slots[i - 1]), now)

    def present(self, keys: Keys) -> Slots:
        """The slot of each committed page, MISSING for those that are not here.
        Shape: (len(keys),)."""
        slots = self._index.find(keys)
        known = np.flatnonzero(slots != MISSING)
        slots[known[self._state[slots[known]] != COMMITTED]] = MISSING
        return slots

    def before(self, key: bytes, count: int) -> Keys:
        """Up to `count` pages of a chain that end with this one, in chain order."""
        chain: list[int] = []
        slot = self._index.get(key)
        parent = self.policy.parent.item
        while slot is not None and slot != NO_PARENT and len(chain) < count:
            chain.append(slot)
            slot = parent(slot)
        return self._index.keys_of(np.array(chain[::-1], np.int64))

    def committed_keys(self) -> Iterator[Keys]:
        """The keys of all pages that can be hit, a span of slots at a time."""
        for first in range(0, len(self._state), SPAN):
            slots = np.flatnonzero(self._state[first : first + SPAN] == COMMITTED) + first
            if len(slots):
                yield self._index.keys_of(slots)

    def forget(self, keys: Keys) -> None:
        """The chain up to each of these pages is gone: they serve nobody. They go now, or as soon
        as nobody holds them."""
        slots = self._index.find(keys)
        slots = slots[slots != MISSING]
        if not len(slots):
            return
        free = (self._state[slots] == COMMITTED) & (self._holds[slots] == 0)
        if free.any():
            with self._dropping() as drop:
                drop(slots[free])
            self.evictions += int(np.count_nonzero(free))
        self.policy.touch(slots[~free], 0)

    def hold(self, slots: Slots) -> None:
        """Keep pages from eviction until as many calls of `release`. One may be named twice."""
        holds = self._holds[slots]
        self._held += len(_distinct(slots[holds == 0]))
        self._holds[slots] = holds + 1

    def release(self, slots: Slots) -> None:
        """Undo a `hold` of these pages."""
        self._holds[slots] -= 1
        left = _distinct(slots[self._holds[slots] == 0])
        gone = left[self._state[left] >= _SPOILED] if self._withdrawn else left[:0]
        self._held -= len(left) - len(gone)
        self.policy.allow(left)
        if len(gone):
            self._withdrawn -= len(gone)
            self._records.freed(gone)
            self._set_free(gone)

    def reserve(
        self, keys: Keys, parent: bytes | None, known: Slots, now: int, *, follow: int = 0
    ) -> Slots:
        """Give slots to the pages of a chain that have none yet; they are WRITING from now on.

        Args:
            keys: The chain, in order; no key twice.
            parent: Key of the page before the first: b"" if there is none, None if not known.
            known: The slot of each page that is here already, else MISSING, as `find_all` says.
                The number that is missing must not exceed `free_slots`.
            now: The caller's count.
            follow: How many more pages of the chain come with the next calls.

        Returns: Slots of all keys, shape (len(keys),).
        """
        fresh = known == MISSING
        slots: Slots = known.copy()
        slots[fresh] = self._free.take(int(np.count_nonzero(fresh)))
        if self.window:
            self._place(slots[fresh], keys.where(fresh), None, None, now)
            self.policy.touch(slots, now)
            # Enough for the boundary at the end; those in between are kept while there is room.
            self.policy.touch(slots[: max(0, len(slots) + follow - self.window)], 0)
            return slots
        previous = self._index.get(parent) if parent else None
        if parent and previous is None:
            now = 0  # nothing can use this chain until its beginning is here
        for first, end in _stretches(fresh):
            before = keys[first - 1] if first else parent
            above = int(slots[first - 1]) if first else previous
            self._place(slots[first:end], keys[first:end], before, above, now)
        if fresh.all():
            return slots
        for i in np.flatnonzero(~fresh & (self.policy.parent[slots] == NO_PARENT)).tolist():
            above = int(slots[i - 1]) if i else previous
            if above is not None:
                self._adopt(int(slots[i]), above, now)
        if now:
            self.policy.touch(slots, now)
        return slots

    def commit(self, slots: Slots) -> None:
        """All shards of these WRITING pages are in place: they are visible."""
        self._state[slots] = COMMITTED
        self._committed += len(slots)
        self.policy.allow(slots)
        self._records.committed(slots)
        if self.on_commit is not None:
            self.on_commit(self._index.keys_of(slots))
        if self._leaving:
            here = np.isin(slots // self.host.chunk_slots, list(self._leaving))
            self.evictions += self._withdraw(slots[here])

    def abort(self, slots: Slots) -> None:
        """These WRITING pages will not come, and nothing writes to their slots any more.

        Args: `slots`: in chain order.
        """
        if self.window:
            with self._dropping(visible=False) as drop:
                drop(slots)
            return
        self._orphan_followers(slots)
        parent = self.policy.parent
        upwards = slots[::-1]
        breaks = np.flatnonzero(parent[upwards[:-1]] != upwards[1:]) + 1
        with self._dropping(visible=False) as drop:
            for run in np.split(upwards, breaks):
                drop(run)

    def recover(
        self,
        slots: Slots,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        stale: Slots,
        now: int,
    ) -> int:
        """Take in pages that an earlier daemon has left in slots that are free here.

        Args:
            keys, parents: Of the page in each slot, as in `reserve`.
            stale: Slots without a page whose headers say something else than FREE.
            now: The caller's count.

        Returns: how many there are. Two pages with one key are one.
        """
        if self.window:
            parents = [None] * len(keys)
        taken = [np.empty(0, np.int64)]
        for run in chains(keys, parents):
            here, parent = slots[run], parents[run[0]]
            above = self._index.get(parent) if parent else None
            self._index.add(Keys.of(keys[i] for i in run), here)
            if parent and above is None:
                self.policy.insert(here, NO_PARENT, 0)
                self._orphans.add(int(here[0]), parent)
            else:
                self.policy.insert(here, NO_PARENT if above is None else above, now)
            taken.append(here)
        found = np.sort(np.concatenate(taken))
        self._state[found] = COMMITTED
        self._committed += len(found)
        self._free.remove(found)
        refused = slots[self._state[slots] != COMMITTED]
        self._records.freed(np.sort(np.concatenate([stale, refused])))
        if self.on_commit is not None:
            self.on_commit(self._index.keys_of(found))
        return len(found)

    def spoil(self, slots: Slots) -> int:
        """The bytes of these pages are not what they were: nobody finds them from now on, and what
        comes after them waits for them to be backed up again. A slot that is held is free once it
        is released.

        Returns how many there were; some may have gone already.
        """
        known = np.unique(slots)
        known = known[(self._state[known] == COMMITTED) | (self._state[known] == _WITHDRAWN)]
        self._withdraw(known[self._state[known] == COMMITTED])
        held = known[self._state[known] == _WITHDRAWN]
        self._state[held] = _SPOILED
        self._records.freed(held)
        return len(known)

    # --- inside -------------------------------------------------------------------------------

    def _withdraw(self, slots: Slots) -> int:
        """These pages go, whoever holds them. Returns how many there were."""
        self._orphan_followers(slots)
        return self._drop_all(set(slots.tolist()))

    def _orphan_followers(self, slots: Slots) -> None:
        """What comes after these pages elsewhere waits for them: their slots are about to be given
        up."""
        here = set(slots.tolist())
        inside = Counter(self.policy.parent[slots].tolist())
        children = self.policy.children[slots].tolist()
        followed = [s for s, n in zip(slots.tolist(), children, strict=True) if n > inside[s]]
        for slot in followed:
            for child in self.policy.following(slot):
                if child not in here:
                    self.policy.orphan(child)
                    self._orphans.add(child, self._index.keys_of(np.array([slot])).blob)

    def _set_free(self, slots: Slots) -> None:
        self._state[slots] = FREE
        if self._leaving:
            stays = ~np.isin(slots // self.host.chunk_slots, list(self._leaving))
            self._capacity -= len(slots) - int(np.count_nonzero(stays))
            slots = slots[stays]
        self._free.add(slots)

    def _span(self, ordinal: int) -> tuple[int, int]:
        return ordinal * self.host.chunk_slots, (ordinal + 1) * self.host.chunk_slots

    def _doomed(self, ordinal: int, most: int | None = None) -> set[int] | None:
        """Slots with a page of a chunk, and of every page that follows one of them; None: more
        than `most` of those lie elsewhere."""
        first, end = self._span(ordinal)
        doomed = set((np.flatnonzero(self._state[first:end] != FREE) + first).tolist())
        enough = len(doomed) + most if most is not None else len(self._state)
        left = [slot for slot in doomed if self.policy.children[slot]]
        while left:
            new = [slot for slot in self.policy.following(left.pop()) if slot not in doomed]
            doomed.update(new)
            if len(doomed) > enough:
                return None
            left += new
        return doomed

    def _place(
        self, slots: Slots, keys: Keys, before: bytes | None, above: int | None, now: int
    ) -> None:
        """A run of pages takes slots. `before`: the key of what it follows; `above`: its slot."""
        if not len(slots):
            return
        self._state[slots] = WRITING
        self.arrivals += len(slots)
        self._index.add(keys, slots)
        parents = (before or bytes(KEY_BYTES)) + keys.blob[:-KEY_BYTES]
        flags = np.full(len(slots), PARENT_KNOWN | HAS_PARENT, np.uint32)
        flags[0] = PARENT_KNOWN * (before is not None) | HAS_PARENT * bool(before)
        if self.window:
            parents, flags = bytes(len(keys.blob)), np.zeros(len(slots), np.uint32)
        self._records.writing(slots, keys.blob, parents, flags)
        self.policy.insert(slots, NO_PARENT if above is None else above, now)
        if above is None and before:
            self._orphans.add(int(slots[0]), before)
        if self._orphans:
            for key, slot in zip(keys.split(), slots.tolist(), strict=True):
                for child in self._orphans.of(key):
                    self._adopt(child, slot, now)

    def _adopt(self, slot: int, parent: int, now: int) -> None:
        """Link a page to a predecessor that was not here or not known before.

        Chained hashes cannot form a ring, but keys come from outside: one that would is ignored.
        """
        step = parent
        while step != NO_PARENT:
            if step == slot:
                return
            step = int(self.policy.parent[step])
        self._orphans.discard(slot)
        self.policy.link(slot, parent, now)

    def _evictable(self, slots: Slots) -> npt.NDArray[np.bool_]:
        may_go: npt.NDArray[np.bool_] = self._holds[slots] == 0
        may_go &= self._state[slots] == COMMITTED
        return may_go

    def _drop_all(self, doomed: set[int]) -> int:
        """These pages go, that nothing else follows. Returns how many there were."""
        evicted = 0
        with self._dropping() as drop:
            parent, children = self.policy.parent, self.policy.children
            for slot in sorted(doomed):
                # From each leaf upwards: a page goes after everything that follows it.
                run: list[int] = []
                while slot in doomed and children[slot] == bool(run):
                    doomed.discard(slot)
                    run.append(slot)
                    slot = int(parent[slot])
                if run:
                    drop(np.array(run))
                    evicted += len(run)
        return evicted

    def _drop(self, slots: Slots, visible: bool) -> None:
        """The policy has let go of these pages; now everybody else does, but for those who hold
        some of them: what they hold stays as it is until they are done."""
        if self._orphans:
            for slot in slots.tolist():
                self._orphans.discard(slot)
        keys = self._index.remove(slots)
        self._committed -= len(slots) if visible else 0
        held = self._holds[slots] > 0
        if held.any():
            self._state[slots[held]] = _WITHDRAWN
            self._held -= int(np.count_nonzero(held))
            self._withdrawn += int(np.count_nonzero(held))
            slots = slots[~held]
        self._set_free(slots)
        if self.on_drop is not None:
            self.on_drop(keys, visible)
        self._records.freed(np.sort(slots))

    @contextmanager
    def _dropping(self, *, visible: bool = True) -> Iterator[Drop]:
        """Gives what drops a run of pages, from the last one upwards. The policy lets go of it at
        once; all else is done for all runs together, which costs little more than for one."""
        runs: list[Slots] = []

        def drop(run: Slots) -> None:
            self.policy.remove(run)
            runs.append(run)

        yield drop
        if runs:
            self._drop(np.concatenate(runs), visible)


def _distinct(slots: Slots) -> Slots:
    """Each of them once, ascending. `numpy.unique` costs several times as much for few."""
    if (slots[1:] > slots[:-1]).all():
        return slots
    ordered = np.sort(slots)
    again = ordered[1:] == ordered[:-1]
    return np.delete(ordered, np.flatnonzero(again)) if again.any() else ordered


def _stretches(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(first, end) of each stretch of true elements."""
    if mask.all():
        if len(mask):
            yield 0, len(mask)
        return
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)
