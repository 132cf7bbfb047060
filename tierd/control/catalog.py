"""The index: which pages of which pool lie in which slot, who holds them, and which go next.

Pure: it moves no byte. What it decides about a slot it writes to that slot's header through
`SlotRecords`, because the header is the record that outlives this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.eviction.chain_reuse import ChainReuse
from tierd.eviction.policy import NO_PARENT, EvictionPolicy, Slots
from tierd.eviction.window_lru import WindowLru
from tierd.wire.geometry import HostLayout
from tierd.wire.layout import COMMITTED, FREE, WRITING
from tierd.wire.presence import PresenceTable, Salt

SPAN = 4096
"""Slots that are searched at a time for free ones."""


_SPOILED = 3
"""A slot whose page has gone, though somebody still holds it. Its header says FREE."""

CHUNKS_TRIED = 4
"""The coldest chunks of a pool that are looked at for one that nobody uses right now."""


class SlotRecords(Protocol):
    """Where the headers of a pool's slots are written."""

    def writing(self, slot: int, key: bytes, parent: bytes | None) -> None: ...
    def committed(self, slots: Slots) -> None: ...
    def freed(self, slots: Slots) -> None: ...


class PagePool:
    """Pages of one pool of one namespace.

    `window`: how many pages before a boundary it takes to resume there; 0 is the whole chain.
    Pages of a windowed pool mean nothing without the chain's pages in the pools without one: when
    one of those goes, `Catalog` has its namesakes here go too.

    A slot is FREE, WRITING (reserved by one backup until all its shards have been copied, or have
    failed and retired) or COMMITTED. A page is visible to lookups only when COMMITTED. `hold`
    keeps committed pages from eviction: leases and pins are holds.
    """

    def __init__(
        self,
        name: str,
        page_tokens: int,
        host: HostLayout,
        shards: int,
        records: SlotRecords,
        window: int = 0,
    ) -> None:
        self.name = name
        self.page_tokens = page_tokens
        self.host = host
        self.shards = shards
        self.window = window
        self.policy: EvictionPolicy = WindowLru() if window else ChainReuse()
        self.on_commit: Callable[[bytes], None] | None = None
        """Told of each page that becomes visible."""
        self.on_drop: Callable[[bytes, bool], None] | None = None
        """Told of each page that goes, and whether it was visible."""
        self.evictions = 0
        self.hits = 0
        self.misses = 0
        self._records = records
        self._slots: dict[bytes, int] = {}
        self._keys: list[bytes] = []
        self._state: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._usable: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self._holds: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._capacity = 0
        self._held = 0
        self._free = 0
        # Free slots in each SPAN of them: a free slot is found without a look at every slot.
        self._free_in: npt.NDArray[np.int64] = np.empty(0, np.int64)
        # Pages whose predecessor is known by key and not here: key of it -> their slots.
        self._orphans: dict[bytes, list[int]] = {}
        self._orphan_of: dict[int, bytes] = {}

    # --- room ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots in chunks that the pool has now."""
        return self._capacity

    @property
    def free_slots(self) -> int:
        return self._free

    @property
    def pages(self) -> int:
        """Committed pages."""
        return int(np.count_nonzero(self._state == COMMITTED))

    @property
    def held(self) -> int:
        """Pages under at least one lease or pin."""
        return self._held

    def add_chunk(self, ordinal: int) -> None:
        """The slots of chunk `ordinal` may be used."""
        first, end = self._span(ordinal)
        more = end - len(self._state)
        if more > 0:
            self._state = np.concatenate([self._state, np.zeros(more, np.uint8)])
            self._usable = np.concatenate([self._usable, np.zeros(more, np.bool_)])
            self._holds = np.concatenate([self._holds, np.zeros(more, np.int32)])
            self._keys.extend([b""] * more)
            self.policy.grow(end)
        self._usable[first:end] = True
        self._capacity += end - first
        self._free += end - first
        self._count_free(first, end, 1)

    def coldest_chunk(self, ordinals: Sequence[int]) -> tuple[int, int] | None:
        """Of some chunks the one that was used least recently, of those whose pages and all that
        follow them may go.

        Returns: its last use (0 if it is empty) and its ordinal; None if there is none such.
        """
        ages = [(self.policy.recency(np.arange(*self._span(n))), n) for n in ordinals]
        for age, ordinal in sorted(ages)[:CHUNKS_TRIED]:
            doomed = np.flatnonzero(self._doomed(ordinal))
            if not self._holds[doomed].any() and not (self._state[doomed] == WRITING).any():
                return age, ordinal
        return None

    def remove_chunk(self, ordinal: int) -> int:
        """Evict every page of a chunk with all that follows them, and give its slots up.

        Returns the number of pages evicted. `coldest_chunk` says which chunk allows it.
        """
        doomed = self._doomed(ordinal) & (self._state == COMMITTED)
        evicted = 0
        with self._dropping() as drop:
            for slot in np.flatnonzero(doomed).tolist():
                # From each leaf upwards: a page goes after everything that follows it.
                while slot != NO_PARENT and doomed[slot] and not self.policy.children[slot]:
                    above = int(self.policy.parent[slot])
                    doomed[slot] = False
                    drop(slot)
                    evicted += 1
                    slot = above
        self.evictions += evicted
        first, end = self._span(ordinal)
        self._usable[first:end] = False
        self._capacity -= end - first
        self._free -= end - first
        self._count_free(first, end, -1)
        return evicted

    def evict(self, count: int) -> int:
        """Evict up to `count` pages; returns how many went."""
        with self._dropping() as drop:
            gone = self.policy.evict(count, self._evictable, drop)
        self.evictions += gone
        return gone

    def clear(self) -> int:
        """Evict everything that nobody holds."""
        return self.evict(len(self._state))

    # --- pages --------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The slot of a page, whether WRITING or COMMITTED."""
        return self._slots.get(key)

    def is_committed(self, slot: int) -> bool:
        return bool(self._state[slot] == COMMITTED)

    def are_held(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of these are under a lease or pin. Shape: (len(slots),)."""
        return self._holds[slots] > 0

    def prefix(self, keys: Sequence[bytes]) -> Slots:
        """Slots of the longest run of committed pages from the first key on."""
        slots = []
        get = self._slots.get
        for key in keys:
            slot = get(key)
            if slot is None:
                break
            slots.append(slot)
        found = np.array(slots, np.int64)
        missing = np.flatnonzero(self._state[found] != COMMITTED)
        return found[: missing[0]] if len(missing) else found

    def touch(self, slots: Slots, now: int) -> None:
        """A chain was used. Its order also teaches predecessors that were not known before."""
        self.policy.touch(slots, now)
        if self.window:
            return
        unknown = np.flatnonzero(self.policy.parent[slots[1:]] == NO_PARENT) + 1
        for i in unknown.tolist():
            self._adopt(int(slots[i]), int(slots[i - 1]), now)

    def present(self, keys: Sequence[bytes]) -> Slots:
        """The slot of each committed page, -1 for those that are not here. Shape: (len(keys),)."""
        get = self._slots.get
        slots = np.array([get(key, -1) for key in keys], np.int64)
        known = np.flatnonzero(slots >= 0)
        slots[known[self._state[slots[known]] != COMMITTED]] = -1
        return slots

    def before(self, key: bytes, count: int) -> list[bytes]:
        """Up to `count` pages of a chain that end with this one, in chain order."""
        chain: list[bytes] = []
        slot = self._slots.get(key)
        while slot is not None and slot != NO_PARENT and len(chain) < count:
            chain.append(self._keys[slot])
            slot = int(self.policy.parent[slot])
        return chain[::-1]

    def forget(self, key: bytes) -> None:
        """The chain up to this page is gone: it serves nobody. It goes now, or as soon as nobody
        holds it."""
        slot = self._slots.get(key)
        if slot is None:
            return
        if self._evictable(slot):
            with self._dropping() as drop:
                drop(slot)
            self.evictions += 1
        else:
            self.policy.touch(np.array([slot], np.int64), 0)

    def hold(self, slots: Slots) -> None:
        self._held += len(np.unique(slots[self._holds[slots] == 0]))
        self._holds[slots] += 1

    def release(self, slots: Slots) -> None:
        self._holds[slots] -= 1
        left = np.unique(slots[self._holds[slots] == 0])
        self._held -= len(left)
        self._set_free(left[self._state[left] == _SPOILED])

    def reserve(
        self, keys: Sequence[bytes], parent: bytes | None, known: Sequence[int | None], now: int
    ) -> Slots:
        """Give slots to the pages of a chain that have none yet; they are WRITING from now on.

        Args:
            keys: The chain, in order.
            parent: Key of the page before the first: b"" if there is none, None if not known.
            known: Per key its slot if the page is here already, else None. Their number of Nones
                must not exceed `free_slots`.
            now: The caller's count.

        Returns: Slots of all keys, shape (len(keys),).
        """
        fresh = iter(self._take(sum(slot is None for slot in known)))
        slots = np.empty(len(keys), np.int64)
        if self.window:
            parent = None
        before = parent
        previous: int | None = self._slots.get(parent) if parent else None
        if parent and previous is None:
            now = 0  # nothing can use this chain until its beginning is here
        for i, (key, here) in enumerate(zip(keys, known, strict=True)):
            if here is None:
                slot = next(fresh)
                self._place(slot, key, before, previous, now)
            else:
                slot = here
                if previous is not None and self.policy.parent[slot] == NO_PARENT:
                    self._adopt(slot, previous, now)
            slots[i] = slot
            if not self.window:
                before, previous = key, slot
        if now:
            self.policy.touch(slots, now)
        if self.window:
            # Enough for the boundary at the end; those in between are kept while there is room.
            self.policy.touch(slots[: -self.window], 0)
        return slots

    def commit(self, slots: Slots) -> None:
        """All shards of these WRITING pages are in place: they are visible."""
        self._state[slots] = COMMITTED
        self._records.committed(slots)
        if self.on_commit is not None:
            for slot in slots.tolist():
                self.on_commit(self._keys[slot])

    def abort(self, slots: Slots) -> None:
        """These WRITING pages will not come, and nothing writes to their slots any more."""
        with self._dropping() as drop:
            for slot in reversed(slots.tolist()):
                self._orphan_followers(np.array([slot]))
                drop(slot)

    def spoil(self, slots: Slots) -> int:
        """The bytes of these pages are not what they were: nobody finds them from now on, and what
        comes after them waits for them to be backed up again. A slot that is held is free once it
        is released.

        Returns how many there were; some may have gone already.
        """
        slots = slots[self._state[slots] == COMMITTED]
        self._orphan_followers(slots)
        with self._dropping() as drop:
            for slot in slots.tolist():
                drop(slot)
        held = slots[self._holds[slots] > 0]
        self._state[held] = _SPOILED
        self._free -= len(held)
        np.subtract.at(self._free_in, held // SPAN, 1)
        return len(slots)

    # --- inside -------------------------------------------------------------------------------

    def _orphan_followers(self, slots: Slots) -> None:
        """What comes after these pages, whose slots are about to be given up, waits for them."""
        for slot in slots[self.policy.children[slots] > 0].tolist():
            for child in np.flatnonzero(self.policy.parent == slot).tolist():
                self.policy.orphan(child)
                self._wait_for(child, self._keys[slot])

    def _set_free(self, slots: Slots) -> None:
        self._state[slots] = FREE
        self._free += len(slots)
        np.add.at(self._free_in, slots // SPAN, 1)

    def _span(self, ordinal: int) -> tuple[int, int]:
        return ordinal * self.host.chunk_slots, (ordinal + 1) * self.host.chunk_slots

    def _doomed(self, ordinal: int) -> npt.NDArray[np.bool_]:
        """Slots of a chunk and of every page that follows one of them. Shape: (slots,)."""
        first, end = self._span(ordinal)
        doomed = np.zeros(len(self._state), np.bool_)
        doomed[first:end] = True
        ancestor = self.policy.parent.copy()
        # Doubling: after k rounds a page has looked 2**k links up.
        while (linked := ancestor != NO_PARENT).any():
            doomed[linked] |= doomed[ancestor[linked]]
            ancestor[linked] = ancestor[ancestor[linked]]
        return doomed

    def _take(self, count: int) -> list[int]:
        """The lowest free slots: a run of pages gets a run of slots wherever one is free."""
        if count > self._free:
            raise AssertionError(f"{count} slots wanted of {self._free}")
        self._free -= count
        taken: list[int] = []
        for span in np.flatnonzero(self._free_in).tolist():
            if len(taken) == count:
                break
            first, end = span * SPAN, (span + 1) * SPAN
            free = np.flatnonzero(self._usable[first:end] & (self._state[first:end] == FREE))
            free = free[: count - len(taken)] + first
            self._free_in[span] -= len(free)
            taken += free.tolist()
        return taken

    def _count_free(self, first: int, end: int, sign: int) -> None:
        """Slots `first` to `end`, all free, are usable from now on (1), or no more (-1)."""
        spans = np.bincount(np.arange(first, end) // SPAN)
        more = max(0, len(spans) - len(self._free_in))
        self._free_in = np.concatenate([self._free_in, np.zeros(more, np.int64)])
        self._free_in[: len(spans)] += sign * spans

    def _place(
        self, slot: int, key: bytes, before: bytes | None, previous: int | None, now: int
    ) -> None:
        self._state[slot] = WRITING
        self._keys[slot] = key
        self._slots[key] = slot
        self._records.writing(slot, key, before)
        if previous is not None:
            self.policy.insert(slot, previous, now)
        elif before:
            self.policy.insert_orphan(slot)
            self._wait_for(slot, before)
        else:
            self.policy.insert(slot, NO_PARENT, now)
        for child in list(self._orphans.get(key, ())):
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
        self._forget_orphan(slot)
        self.policy.link(slot, parent, now)

    def _wait_for(self, slot: int, parent: bytes) -> None:
        self._orphans.setdefault(parent, []).append(slot)
        self._orphan_of[slot] = parent

    def _forget_orphan(self, slot: int) -> None:
        parent = self._orphan_of.pop(slot, None)
        if parent is not None:
            siblings = self._orphans[parent]
            siblings.remove(slot)
            if not siblings:
                del self._orphans[parent]

    def _evictable(self, slot: int) -> bool:
        return bool(self._state[slot] == COMMITTED and not self._holds[slot])

    def _drop(self, slot: int) -> None:
        self._forget_orphan(slot)
        self.policy.remove(slot)
        key = self._keys[slot]
        visible = self.is_committed(slot)
        del self._slots[key]
        self._keys[slot] = b""
        self._state[slot] = FREE
        self._free += 1
        self._free_in[slot // SPAN] += 1
        if self.on_drop is not None:
            self.on_drop(key, visible)

    @contextmanager
    def _dropping(self) -> Iterator[Callable[[int], None]]:
        """Gives what drops a page; their headers are written as one when all are dropped."""
        slots: list[int] = []

        def drop(slot: int) -> None:
            self._drop(slot)
            slots.append(slot)

        yield drop
        self._records.freed(np.array(slots, np.int64))


class Catalog:
    """The pages of one namespace: pools by name.

    Args:
        private: An epoch that only one engine uses; it goes when that engine leaves it.
        presence: Where ranks see which pages there are.
    """

    def __init__(
        self,
        digest: bytes,
        world_size: int,
        private: bool,
        presence: PresenceTable | None = None,
    ) -> None:
        self.digest = digest
        self.world_size = world_size
        self.private = private
        self.pools: dict[str, PagePool] = {}
        self._presence = presence

    def add_pool(self, pool: PagePool) -> None:
        """Take in a new pool."""
        self.pools[pool.name] = pool
        if pool.window:
            return
        salt = Salt(self.digest, pool.name)
        presence = self._presence

        def show(key: bytes) -> None:
            if presence is not None:
                presence.add(key, salt)

        def forget(key: bytes, visible: bool) -> None:
            if presence is not None and visible:
                presence.remove(key, salt)
            for other in self.pools.values():
                if other.window:
                    other.forget(key)

        pool.on_commit, pool.on_drop = show, forget

    def touch_boundary(self, key: bytes, now: int) -> None:
        """A request has gone on from the boundary after this page: all it needs is as recent.

        An engine that hits a prefix on its GPU never asks for it here, but it backs up what comes
        after.
        """
        whole = next((pool for pool in self.pools.values() if not pool.window), None)
        for pool in self.pools.values():
            if whole is not None and pool.window:
                slots = pool.present(whole.before(key, pool.window))
                pool.touch(slots[slots >= 0], now)
