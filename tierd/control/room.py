"""Room for pages: which pool gets which chunk of the one budget, and which gives one back.

A pool grows while the budget lasts and evicts once it does not. Chunks move to the pools that have
to evict from those whose pages are older, so that no fixed ratio leaves one full and another empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tierd.control.catalog import Catalog, PagePool
from tierd.control.copiers import Copier, CopierState
from tierd.eviction.policy import Slots
from tierd.memory.chunks import Chunk, ChunkRows, ChunkStore
from tierd.wire import messages
from tierd.wire.geometry import HostLayout

log = logging.getLogger("tierd.control")


AHEAD_BYTES = 512 << 20
"""Free room that a pool in use is kept at, a shard, while the budget lasts: pinning takes longer
than a burst of backups may wait."""

PROMISE_S = 2.0
NEVER_COLD = 1 << 62

Tell = Callable[[Copier, messages.Message, "int | None"], None]


class RoomKeeper:
    """The chunks of all pools.

    Args:
        budget_bytes: What all chunks together may take.
        tell: Sends a message to a copier, with a descriptor beside it or None.
        shares: By pool name, the share of the budget that pools of that name may take together.
    """

    def __init__(
        self, budget_bytes: int, tell: Tell, shares: Mapping[str, float] | None = None
    ) -> None:
        self.store = ChunkStore(budget_bytes)
        self._shares = shares or {}
        self._tell = tell
        self._rows: dict[int, ChunkRows] = {}
        self._pools: dict[int, PagePool] = {}
        self._catalogs: dict[int, Catalog] = {}
        # Rows that are not usable yet: (pool, ordinal) -> (copier, chunk) still to pin.
        self._claims: dict[tuple[int, int], set[tuple[str, int]]] = {}
        # Chunks that copiers still have to unmap: chunk -> (itself, who).
        self._drops: dict[int, tuple[Chunk, set[str]]] = {}
        self._holders: dict[str, Copier] = {}
        # Pools that have evicted for want of room since the last look.
        self._pressed: set[int] = set()
        # The pool that a chunk was taken from another for, and how long the others leave it alone.
        self._promise: tuple[int, float] | None = None
        self._now = 0.0

    @property
    def busy(self) -> bool:
        """Are copiers pinning or unmapping chunks right now?"""
        return bool(self._claims or self._drops)

    def open_pool(
        self, catalog: Catalog, name: str, page_tokens: int, host: HostLayout, window: int = 0
    ) -> None:
        """Make a catalog's pool known; it gets chunks once it needs them."""
        if name in catalog.pools:
            return
        rows = ChunkRows(host)
        pool = PagePool(name, page_tokens, host, catalog.world_size, rows, window)
        catalog.add_pool(pool)
        self._rows[id(pool)] = rows
        self._pools[id(pool)] = pool
        self._catalogs[id(pool)] = catalog

    def locate(
        self, pool: PagePool, slots: Slots, shard: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Chunk numbers and slots within them of a pool's slots, for one shard."""
        return self._rows[id(pool)].locate(slots, shard)

    def share(self, catalog: Catalog, shard: int, holder: Copier) -> set[int]:
        """A copier will work on a shard of a catalog: have it pin what it lacks.

        Returns: the chunks in which it cannot reach the pages yet.
        """
        chunks = [
            row[shard]
            for pool in catalog.pools.values()
            for row in self._rows[id(pool)].rows.values()
        ]
        for chunk in chunks:
            self._add(holder, chunk)
        return {chunk.number for chunk in chunks if not holder.chunks[chunk.number]}

    def make_room(
        self,
        catalog: Catalog,
        pool: PagePool,
        missing: int,
        sharers: Sequence[tuple[int, Copier]],
    ) -> bool | None:
        """Find `missing` more free slots for a pool.

        Returns: True: they are free now. None: a chunk is on its way; ask again later. False:
            there is no room to be had.
        """
        self._grow(catalog, pool, missing, sharers)
        if any(key[0] == id(pool) for key in self._claims):
            return None
        wanted = pool.free_slots + missing
        if missing <= pool.pages - pool.held:  # in vain, it would cost pages for nothing
            self._pressed.add(id(pool))
            pool.evict(missing)
        if pool.free_slots >= wanted:
            return True
        if self.busy:
            return None
        # It has too little of its own: whoever has something gives.
        if self._take(pool, NEVER_COLD):
            self._promise = (id(pool), self._now + PROMISE_S)
            return None
        return False

    def rebalance(self, now: float) -> None:
        """Let pools that have had to evict take chunks in which everything is older than in their
        own: in the end the least recently used pages of all pools are the ones that go.

        Call every now and then; one chunk moves at a time.
        """
        self._now = now
        if self._promise is not None and self._promise[1] <= now:
            self._promise = None
        if self._drops or self._promise is not None:
            return
        pressed, self._pressed = self._pressed, set()
        for pool in [self._pools[number] for number in pressed if number in self._pools]:
            if pool.name in self._shares:
                continue  # it has what it may have
            mine = pool.coldest_chunk(self._usable_rows(pool))
            if mine is not None and self._take(pool, mine[0]):
                self._promise = (id(pool), now + PROMISE_S)
                return

    def grow_ahead(
        self, catalog: Catalog, pool: PagePool, sharers: Sequence[tuple[int, Copier]]
    ) -> None:
        """Have chunks pinned before the last one is full, while the budget lasts."""
        slots = -(-AHEAD_BYTES // pool.host.slot_bytes)
        if pool.free_slots < slots:
            self._grow(catalog, pool, slots - pool.free_slots, sharers)

    def ready(self, holder: Copier, number: int, error: str) -> None:
        """A copier has pinned a chunk, or could not."""
        if error:
            holder.chunks.pop(number, None)
        else:
            holder.chunks[number] = True
        for (pool_id, ordinal), waiting in list(self._claims.items()):
            if (holder.device, number) not in waiting:
                continue
            waiting.discard((holder.device, number))
            if error:
                log.error(
                    "%s; serving on with the %d MiB of host memory that are in use",
                    error,
                    self.store.claimed_bytes >> 20,
                )
                del self._claims[pool_id, ordinal]
                self._drop_row(pool_id, ordinal)
                self.store.budget_bytes = self.store.claimed_bytes - self._dropping_bytes()
            elif not waiting:
                del self._claims[pool_id, ordinal]
                self._pools[pool_id].add_chunk(ordinal)

    def dropped(self, holder: Copier, number: int) -> None:
        """A copier has unmapped a chunk."""
        if number not in self._drops:
            return
        chunk, waiting = self._drops[number]
        waiting.discard(holder.device)
        if not waiting:
            del self._drops[number]
            self.store.give_back(chunk)

    def lost(self, holder: Copier) -> None:
        """A copier died: it maps nothing, and will be told anew what to pin."""
        for key, waiting in list(self._claims.items()):
            waiting -= {entry for entry in waiting if entry[0] == holder.device}
            if not waiting:
                del self._claims[key]
                self._pools[key[0]].add_chunk(key[1])
        for number in list(self._drops):
            self.dropped(holder, number)

    def dissolve(self, catalog: Catalog) -> bool:
        """Evict what nobody holds and give back what is empty. True: nothing is left."""
        for pool in catalog.pools.values():
            pool.clear()
            rows = self._rows[id(pool)].rows
            if pool.free_slots == pool.capacity:
                for ordinal in [o for o in rows if (id(pool), o) not in self._claims]:
                    pool.remove_chunk(ordinal)
                    self._drop_row(id(pool), ordinal)
        if any(self._rows[id(pool)].rows for pool in catalog.pools.values()):
            return False
        for pool in catalog.pools.values():
            del self._rows[id(pool)], self._pools[id(pool)], self._catalogs[id(pool)]
            if self._promise is not None and self._promise[0] == id(pool):
                self._promise = None
        return True

    def close(self) -> None:
        """Close every chunk. The copiers must be gone."""
        for rows in self._rows.values():
            for row in rows.rows.values():
                for chunk in row:
                    chunk.close()
        for chunk, _ in self._drops.values():
            chunk.close()
        self._rows.clear()
        self._drops.clear()

    # --- inside -------------------------------------------------------------------------------

    def _grow(
        self,
        catalog: Catalog,
        pool: PagePool,
        slots: int,
        sharers: Sequence[tuple[int, Copier]],
    ) -> None:
        """Claim chunks for so many more slots, less what is being pinned already."""
        if self._promise is not None and self._promise[0] != id(pool):
            return
        pinning = sum(key[0] == id(pool) for key in self._claims)
        rows = -(-slots // pool.host.chunk_slots) - pinning
        while rows > 0 and self._may_have(catalog, pool):
            self._claim(catalog, pool, sharers)
            self._promise = None
            rows -= 1

    def _may_have(self, catalog: Catalog, pool: PagePool) -> bool:
        """Is there a row of chunks for a pool, within the budget and within its cap?"""
        if not self.store.fits(pool.host, catalog.world_size):
            return False
        if pool.name not in self._shares:
            return True
        namesakes = [p for p in self._pools.values() if p.name == pool.name]
        taken = sum(
            chunk.size
            for p in namesakes
            for row in self._rows[id(p)].rows.values()
            for chunk in row
        )
        row = pool.host.chunk_bytes * catalog.world_size
        return taken + row <= self._shares[pool.name] * self.store.budget_bytes

    def _claim(
        self, catalog: Catalog, pool: PagePool, sharers: Iterable[tuple[int, Copier]]
    ) -> None:
        rows = self._rows[id(pool)]
        ordinal = rows.next_ordinal()
        row = self.store.claim(
            pool.host,
            shards=catalog.world_size,
            ordinal=ordinal,
            namespace=catalog.digest,
            pool=pool.name,
        )
        rows.rows[ordinal] = row
        # One that is being started again is told by `share` when it is back.
        living = [(s, holder) for s, holder in sharers if holder.state is not CopierState.DEAD]
        waiting = {(holder.device, row[shard].number) for shard, holder in living}
        if not waiting:
            pool.add_chunk(ordinal)
            return
        self._claims[id(pool), ordinal] = waiting
        for shard, holder in living:
            self._add(holder, row[shard])

    def _add(self, holder: Copier, chunk: Chunk) -> None:
        self._holders[holder.device] = holder
        if chunk.number not in holder.chunks:
            holder.chunks[chunk.number] = False
            self._tell(holder, messages.AddChunk(chunk=chunk.number, size=chunk.size), chunk.fd)

    def _drop_row(self, pool_id: int, ordinal: int) -> None:
        for chunk in self._rows[pool_id].rows.pop(ordinal):
            holders = [h for h in self._holders.values() if chunk.number in h.chunks]
            self._drops[chunk.number] = (chunk, {h.device for h in holders})
            for holder in holders:
                self._tell(holder, messages.DropChunk(chunk=chunk.number), None)
            if not holders:
                del self._drops[chunk.number]
                self.store.give_back(chunk)

    def _dropping_bytes(self) -> int:
        return sum(chunk.size for chunk, _ in self._drops.values())

    def _usable_rows(self, pool: PagePool) -> list[int]:
        return [n for n in self._rows[id(pool)].rows if (id(pool), n) not in self._claims]

    def _take(self, pool: PagePool, colder_than: int) -> bool:
        """Have another pool give up the coldest chunk of all, if it is colder than that."""
        coldest: tuple[int, int, PagePool] | None = None
        for other in self._pools.values():
            # A model's pools are of use together: none takes the last that another one has.
            siblings = self._catalogs[id(other)] is self._catalogs[id(pool)]
            if siblings and len(self._rows[id(other)].rows) == 1:
                continue
            found = other.coldest_chunk(self._usable_rows(other)) if other is not pool else None
            if found is not None and found[0] < colder_than:
                colder_than = found[0]
                coldest = (*found, other)
        if coldest is None:
            return False
        _, ordinal, other = coldest
        other.remove_chunk(ordinal)
        self._drop_row(id(other), ordinal)
        return True
