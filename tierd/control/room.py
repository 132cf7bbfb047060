"""Room for pages: which pool gets which chunk of the one budget, and which gives one back.

A pool grows while the budget lasts and evicts once it does not. A pool that has less than its
fair share takes chunks from one that has more, or from one that no engine uses now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

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

Tell = Callable[[Copier, messages.Message, "int | None"], None]


class RoomKeeper:
    """The chunks of all pools.

    Args:
        budget_bytes: What all chunks together may take.
        tell: Sends a message to a copier, with a descriptor beside it or None.
    """

    def __init__(self, budget_bytes: int, tell: Tell) -> None:
        self.store = ChunkStore(budget_bytes)
        self._tell = tell
        self._rows: dict[int, ChunkRows] = {}
        self._pools: dict[int, PagePool] = {}
        # Rows that are not usable yet: (pool, ordinal) -> (copier, chunk) still to pin.
        self._claims: dict[tuple[int, int], set[tuple[str, int]]] = {}
        # Chunks that copiers still have to unmap: chunk -> (itself, who).
        self._drops: dict[int, tuple[Chunk, set[str]]] = {}
        self._holders: dict[str, Copier] = {}
        # The pool that a chunk was last taken from another for: the others leave it alone.
        self._promised: int | None = None

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
        if not self._drops:
            # Its own pages make room until this has come.
            self._take_from_another(pool)
        wanted = pool.free_slots + missing
        if missing <= pool.pages - pool.held:  # in vain, it would cost pages for nothing
            pool.evict(missing)
        if pool.free_slots >= wanted:
            return True
        return None if self._drops else False

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
            del self._rows[id(pool)], self._pools[id(pool)]
            if self._promised == id(pool):
                self._promised = None
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
        if self._promised not in (None, id(pool)):
            return
        pinning = sum(key[0] == id(pool) for key in self._claims)
        rows = -(-slots // pool.host.chunk_slots) - pinning
        while rows > 0 and self.store.fits(pool.host, catalog.world_size):
            self._claim(catalog, pool, sharers)
            self._promised = None
            rows -= 1

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

    def _bytes(self, pool: PagePool) -> int:
        return sum(chunk.size for row in self._rows[id(pool)].rows.values() for chunk in row)

    def _take_from_another(self, pool: PagePool) -> None:
        """Have another pool give up its coldest chunk, if it has more than it should and this
        one less."""
        fair = self.store.budget_bytes // max(1, len(self._pools))
        if self._bytes(pool) >= fair:
            return
        others = [p for p in self._pools.values() if p is not pool and self._bytes(p) > fair]
        for other in sorted(others, key=self._bytes, reverse=True):
            rows = self._rows[id(other)].rows
            ready = [o for o in rows if (id(other), o) not in self._claims]
            ordinal = other.coldest_chunk(ready)
            if ordinal is not None:
                other.remove_chunk(ordinal)
                self._drop_row(id(other), ordinal)
                self._promised = id(pool)
                return
