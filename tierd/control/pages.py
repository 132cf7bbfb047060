"""The index of one pool: which pages lie in which slots, who holds them, and which go next.

Pure: it moves no byte. What it decides about a slot it writes to that slot's header through
`SlotRecords`, because the header is the record that outlives this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.control.chains import chains
from tierd.control.keys import MISSING, KeyIndex, Keys
from tierd.control.orphans import Orphans
from tierd.control.pool_chunks import PoolChunks
from tierd.control.slot_table import SlotTable
from tierd.eviction.chain_reuse import ChainReuse
from tierd.eviction.policy import NO_PARENT, EvictionPolicy, Slots
from tierd.eviction.window_lru import WindowLru
from tierd.wire.geometry import HostLayout
from tierd.wire.layout import HAS_PARENT, PARENT_KNOWN
from tierd.wire.limits import KEY_BYTES


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

    A page is visible to lookups once it is COMMITTED (see `SlotTable`). `hold` keeps it from
    eviction: leases and pins are holds.

    `most`: how many slots to expect; more cost a copy of what is known of the others.
    `policy`: None is the one for pools of this kind.
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
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.name = name
        self.page_tokens = page_tokens
        self.host = host
        self.shards = shards
        self.window = window
        self.policy = policy or (WindowLru(most) if window else ChainReuse(most))
        self.slots = SlotTable(host.chunk_slots, most)
        """What is in them: to be asked, not to be changed."""
        self.chunks = PoolChunks(self.slots, self.policy, self)
        """They come, go, and are compared by their age."""
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
        self._orphans = Orphans(self.policy)

    # --- room ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots in chunks that the pool has now."""
        return self.slots.capacity

    @property
    def free_slots(self) -> int:
        """Slots that can be given to pages now."""
        return self.slots.free

    @property
    def pages(self) -> int:
        """Committed pages."""
        return self.slots.committed

    @property
    def held(self) -> int:
        """Pages under at least one lease or pin."""
        return self.slots.held

    def grow(self, capacity: int) -> None:
        """Slots 0 .. capacity - 1 may be used from now on."""
        self._index.grow(capacity)
        self.policy.grow(capacity)

    # --- what is here -------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The slot of a page, whether WRITING or COMMITTED."""
        return self._index.get(key)

    def find_all(self, keys: Keys) -> Slots:
        """The slot of each page, whether WRITING or COMMITTED; MISSING for those that are not
        here. Shape: (len(keys),)."""
        return self._index.find(keys)

    def prefix(self, keys: Keys) -> Slots:
        """Slots of the longest run of committed pages from the first key on. Shape: (run,)."""
        return self.slots.committed_prefix(self._index.prefix(keys))

    def present(self, keys: Keys) -> Slots:
        """The slot of each committed page, MISSING for those that are not here.
        Shape: (len(keys),)."""
        slots = self._index.find(keys)
        known = np.flatnonzero(slots != MISSING)
        slots[known[~self.slots.are_committed(slots[known])]] = MISSING
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
        return map(self._index.keys_of, self.slots.all_committed())

    # --- what is used -------------------------------------------------------------------------

    def touch(self, slots: Slots, now: int) -> None:
        """A chain was used. Its order also teaches predecessors that were not known before."""
        self.policy.touch(slots, now)
        if self.window:
            return
        unknown = np.flatnonzero(self.policy.parent[slots[1:]] == NO_PARENT) + 1
        for i in unknown.tolist():
            self._orphans.adopt(int(slots[i]), int(slots[i - 1]), now)

    def hold(self, slots: Slots) -> None:
        """Keep pages from eviction until as many calls of `release`. One may be named twice."""
        self.slots.hold(slots)

    def release(self, slots: Slots) -> None:
        """Undo a `hold` of these pages."""
        left, gone = self.slots.release(slots)
        self.policy.allow(left)
        if len(gone):
            self._records.freed(gone)

    # --- what comes ---------------------------------------------------------------------------

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
        all_fresh = bool(fresh.all())
        slots = self.slots.take(len(keys) if all_fresh else int(np.count_nonzero(fresh)))
        if not all_fresh:
            known = known.copy()
            known[fresh] = slots
            slots = known
        if self.window:
            self._place(slots[fresh], keys.where(fresh), None, None, now)
            self.policy.touch(slots, now)
            # Enough for the boundary at the end; those in between are kept while there is room.
            self.policy.touch(slots[: max(0, len(slots) + follow - self.window)], 0)
            return slots
        previous = self._index.get(parent) if parent else None
        if parent and previous is None:
            now = 0  # nothing can use this chain until its beginning is here
        if all_fresh:
            self._place(slots, keys, parent, previous, now)
            return slots
        for first, end in _stretches(fresh):
            before = keys[first - 1] if first else parent
            above = int(slots[first - 1]) if first else previous
            self._place(slots[first:end], keys[first:end], before, above, now)
        for i in np.flatnonzero(~fresh & (self.policy.parent[slots] == NO_PARENT)).tolist():
            above = int(slots[i - 1]) if i else previous
            if above is not None:
                self._orphans.adopt(int(slots[i]), above, now)
        if now:
            self.policy.touch(slots, now)
        return slots

    def commit(self, slots: Slots) -> None:
        """All shards of these WRITING pages are in place: they are visible."""
        self.slots.commit(slots)
        self.policy.allow(slots)
        self._records.committed(slots)
        if self.on_commit is not None:
            self.on_commit(self._index.keys_of(slots))
        late = self.slots.leaving(slots)
        if len(late):
            self.withdraw(late)

    def abort(self, slots: Slots) -> None:
        """These WRITING pages will not come, and nothing writes to their slots any more.

        Args: `slots`: in chain order.
        """
        if self.window:
            self._drop([slots], visible=False)
            return
        self._orphans.add_followers(slots, self._index.key_of)
        parent = self.policy.parent
        upwards = slots[::-1]
        breaks = np.flatnonzero(parent[upwards[:-1]] != upwards[1:]) + 1
        self._drop(np.split(upwards, breaks), visible=False)

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
        self.slots.recover(found)
        refused = slots[~self.slots.are_committed(slots)]
        self._records.freed(np.sort(np.concatenate([stale, refused])))
        if self.on_commit is not None:
            self.on_commit(self._index.keys_of(found))
        return len(found)

    # --- what goes ----------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Evict up to `count` pages; returns how many went."""
        return len(self.evict_coldest(count))

    def evict_coldest(self, count: int) -> Slots:
        """The same; returns their slots."""
        runs: list[Slots] = []

        def drop(run: Slots) -> None:
            self.policy.remove(run)
            runs.append(run)

        self.evictions += self.policy.evict(count, self.slots.are_evictable, drop)
        return self._let_go(runs)

    def evict_all(self, doomed: set[int]) -> int:
        """Evict these pages, that nothing else follows and nobody holds. Returns how many."""
        gone = self._drop_all(doomed)
        self.evictions += gone
        return gone

    def withdraw(self, slots: Slots) -> int:
        """Evict these pages, whoever holds them; what comes after them elsewhere waits for them to
        be backed up again. Returns how many there were."""
        gone = self._withdraw(slots)
        self.evictions += gone
        return gone

    def forget(self, keys: Keys) -> None:
        """The chain up to each of these pages is gone: they serve nobody. They go now, or as soon
        as nobody holds them."""
        slots = self._index.find(keys)
        slots = slots[slots != MISSING]
        if not len(slots):
            return
        free = self.slots.are_evictable(slots)
        if free.any():
            self.evictions += len(self._drop([slots[free]]))
        self.policy.touch(slots[~free], 0)

    def spoil(self, slots: Slots) -> int:
        """The bytes of these pages are not what they were: nobody finds them from now on, and what
        comes after them waits for them to be backed up again. A slot that is held is free once it
        is released.

        Returns how many there were; some may have gone already.
        """
        known = np.unique(slots)
        known = known[self.slots.are_intact(known)]
        self._withdraw(known[self.slots.are_committed(known)])
        self._records.freed(self.slots.spoil(known))
        return len(known)

    # --- inside -------------------------------------------------------------------------------

    def _withdraw(self, slots: Slots) -> int:
        """These pages go, whoever holds them. Returns how many there were."""
        self._orphans.add_followers(slots, self._index.key_of)
        return self._drop_all(set(slots.tolist()))

    def _place(
        self, slots: Slots, keys: Keys, before: bytes | None, above: int | None, now: int
    ) -> None:
        """A run of pages takes slots. `before`: the key of what it follows; `above`: its slot."""
        if not len(slots):
            return
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
                    self._orphans.adopt(child, slot, now)

    def _drop_all(self, doomed: set[int]) -> int:
        """These pages go, that nothing else follows. Returns how many there were."""
        parent, children = self.policy.parent, self.policy.children
        runs: list[Slots] = []
        for slot in sorted(doomed):
            # From each leaf upwards: a page goes after everything that follows it.
            run: list[int] = []
            while slot in doomed and children[slot] == bool(run):
                doomed.discard(slot)
                run.append(slot)
                slot = int(parent[slot])
            if run:
                runs.append(np.array(run))
                self.policy.remove(runs[-1])
        return len(self._let_go(runs))

    def _drop(self, runs: Sequence[Slots], *, visible: bool = True) -> Slots:
        """These runs of pages go, each named from its last page upwards. Returns all of them."""
        for run in runs:
            self.policy.remove(run)
        return self._let_go(runs, visible=visible)

    def _let_go(self, runs: Sequence[Slots], *, visible: bool = True) -> Slots:
        """The policy has let go of these pages; now everybody else does, for all runs together,
        which costs little more than for one. Returns all of them.

        Args: `visible`: they could be hit.
        """
        if not runs:
            return np.empty(0, np.int64)
        slots = np.concatenate(runs)
        if self._orphans:
            for slot in slots.tolist():
                self._orphans.discard(slot)
        keys = self._index.remove(slots)
        freed = self.slots.let_go(slots, visible)
        if self.on_drop is not None:
            self.on_drop(keys, visible)
        self._records.freed(np.sort(freed))
        return slots


def _stretches(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(first, end) of each stretch of true elements."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)
