"""The chunks that pools have, in rows of one a shard: from the claim, over the pinning by every
copier that needs them, to the return into the stock. Who gets which row is decided in `room`."""

from __future__ import annotations

import logging
from collections.abc import Callable, KeysView, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierd.control.catalog import Catalog
from tierd.control.copiers import Copier, CopierState
from tierd.control.pages import PagePool
from tierd.control.stock import Stock
from tierd.eviction.policy import Slots
from tierd.memory.chunks import Chunk, ChunkRows
from tierd.memory.persist import FoundChunk, PersistDirectory
from tierd.wire.geometry import HostLayout

log = logging.getLogger("tierd.control")

Sharers = Sequence[tuple[int, Copier]]
"""Ranks, and the copiers that work on their shards."""


class Row(NamedTuple):
    """A pool's chunks of one ordinal, one a shard."""

    pool: PagePool
    ordinal: int


@dataclass(frozen=True)
class _Owner:
    """What belongs to a pool that is known."""

    catalog: Catalog
    chunks: ChunkRows


class Rows:
    """The rows of all pools.

    Args:
        stock: What chunks are taken from, and given back to.
        opened: Told of a pool one of whose rows can be used now.
        dropped: Told of a row that leaves its pool.
    """

    def __init__(
        self,
        stock: Stock,
        opened: Callable[[PagePool], None],
        dropped: Callable[[Row], None],
    ) -> None:
        self._stock = stock
        self._opened = opened
        self._dropped = dropped
        self._owners: dict[PagePool, _Owner] = {}
        # The row of every claimed chunk.
        self._places: dict[int, Row] = {}
        # Rows that are not usable yet: (device, chunk) still to pin.
        self._claims: dict[Row, set[tuple[str, int]]] = {}
        # Rows in use with a chunk that a copier could not pin again: they go as soon as they can.
        self._broken: dict[Row, set[int]] = {}

    @property
    def busy(self) -> bool:
        """Does somebody wait for copiers to pin or unmap chunks?"""
        return bool(self._claims or self._broken) or self._stock.busy

    # --- pools --------------------------------------------------------------------------------

    @property
    def pools(self) -> KeysView[PagePool]:
        """All that are known."""
        return self._owners.keys()

    def open_pool(
        self,
        catalog: Catalog,
        name: str,
        page_tokens: int,
        host: HostLayout,
        window: int = 0,
        *,
        shards: int | None = None,
    ) -> None:
        """Make a catalog's pool known; it gets chunks once it needs them.

        Args: `shards`: None is one a rank; 1 is one for all of them.
        """
        if name in catalog.pools:
            return
        rows = ChunkRows(host)
        shards = shards or catalog.world_size
        most = self._stock.store.budget_bytes // (host.chunk_bytes * shards)
        pool = PagePool(
            name,
            page_tokens,
            host,
            shards,
            rows,
            window,
            most=most * host.chunk_slots,
        )
        catalog.add_pool(pool)
        self._owners[pool] = _Owner(catalog, rows)

    def close_pool(self, pool: PagePool) -> None:
        """Forget a pool that has no rows."""
        del self._owners[pool]

    def catalog_of(self, pool: PagePool) -> Catalog:
        """The catalog that a pool is in."""
        return self._owners[pool].catalog

    # --- what there is ------------------------------------------------------------------------

    def count(self, pool: PagePool) -> int:
        """How many rows a pool has, usable or not."""
        return len(self._owners[pool].chunks.rows)

    def count_pinning(self, pool: PagePool) -> int:
        """How many of them are not usable yet."""
        return sum(row.pool is pool for row in self._claims)

    def usable(self, pool: PagePool) -> list[Row]:
        """Those that are."""
        rows = (Row(pool, ordinal) for ordinal in self._owners[pool].chunks.rows)
        return [row for row in rows if row not in self._claims]

    def broken(self, pool: PagePool) -> set[int]:
        """The ordinals of those that go as soon as nobody uses them, because a copier could not pin
        them again."""
        return {row.ordinal for row in self._broken if row.pool is pool}

    def chunks(self, row: Row) -> list[Chunk]:
        """A row's chunks, one a shard."""
        return self._owners[row.pool].chunks.rows[row.ordinal]

    def headers(self, row: Row) -> list[npt.NDArray[np.void]]:
        """The slot headers of a row, copied: for each shard, shape (slots of a chunk,), dtype
        `layout.SLOT_HEADER`."""
        return [chunk.headers.copy() for chunk in self.chunks(row)]

    def locate(
        self, pool: PagePool, slots: Slots, rank: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Chunk numbers and slots within them of a pool's slots, in a rank's shard. Shapes:
        (len(slots),)."""
        return self._owners[pool].chunks.locate(slots, _shard(pool, rank))

    # --- rows come ----------------------------------------------------------------------------

    def claim(self, pool: PagePool, sharers: Sharers) -> Row | None:
        """Claim a row: usable at once if the stock has it pinned. None: not now."""
        # Each chunk lies near a copier that lives, if one does. One that is being started again is
        # told by `share` when it is back. What all of them share lies near each in turn.
        rows = self._owners[pool].chunks
        turn = rows.next_ordinal % len(sharers) if sharers and pool.shards == 1 else 0
        order = sorted(
            (*sharers[turn:], *sharers[:turn]),
            key=lambda sharer: sharer[1].state is CopierState.DEAD,
        )
        homes = [
            next((holder for rank, holder in order if _shard(pool, rank) == n), None)
            for n in range(pool.shards)
        ]
        found = [home for home in homes if home is not None]
        if len(found) < len(homes):
            return None
        chunks = self._stock.acquire(found, pool.host.chunk_bytes)
        if chunks is None:
            return None
        row = Row(pool, rows.add(chunks))
        self._places |= dict.fromkeys((chunk.number for chunk in chunks), row)
        waiting = {
            (holder.device, chunk.number)
            for holder, chunk in (
                (holder, chunks[_shard(pool, rank)])
                for rank, holder in sharers
                if holder.state is not CopierState.DEAD
            )
            if not self._stock.add(holder, chunk)
        }
        if waiting:
            self._claims[row] = waiting
        else:
            self._open(row)
        for holder in found:
            self._stock.fill(holder)
        return row

    def adopt(
        self, pool: PagePool, found: Sequence[FoundChunk], directory: PersistDirectory
    ) -> Row:
        """Take in a row of chunks that an earlier daemon has left, one a shard; its slots count as
        free until `PagePool.recover` says what is in them."""
        chunks = self._stock.adopt(found, directory)
        row = Row(pool, self._owners[pool].chunks.add(chunks))
        for chunk in chunks:
            chunk.take_over(pool.host, row.ordinal)
            self._places[chunk.number] = row
        pool.chunks.add(row.ordinal)
        return row

    def _open(self, row: Row) -> None:
        """A row can be used: whoever lives and needs it has pinned it."""
        self._claims.pop(row, None)
        pool, catalog, chunks = row.pool, self.catalog_of(row.pool), self.chunks(row)
        for shard, chunk in enumerate(chunks):
            chunk.lay_out(
                pool.host,
                shard=shard,
                shards=len(chunks),
                ordinal=row.ordinal,
                namespace=catalog.digest,
                pool=pool.name,
            )
        pool.chunks.add(row.ordinal)
        self._opened(pool)

    # --- rows go ------------------------------------------------------------------------------

    def remove(self, row: Row) -> None:
        """Evict what is in a usable row and give its chunks back. `PoolChunks.remove` says when
        that may be."""
        row.pool.chunks.remove(row.ordinal)
        self._give_back(row, self._broken.pop(row, set()))

    def drop_broken(self) -> None:
        """Drop the pages of rows that a copier cannot reach, where nobody uses them any more."""
        for row in list(self._broken):
            self._drop_if_unused(row)

    def close(self) -> None:
        """Close every chunk that a pool has. The copiers must be gone."""
        for owner in self._owners.values():
            for chunks in owner.chunks.rows.values():
                for chunk in chunks:
                    chunk.close()  # and its file, if it has one, is for the next daemon
        self._owners.clear()

    def _drop_if_unused(self, row: Row) -> None:
        if row.pool.chunks.may_remove(row.ordinal):
            self.remove(row)
            self._stock.stop_growing("a copier could not pin a chunk again")

    def _give_back(self, row: Row, broken: Set[int]) -> None:
        self._dropped(row)
        for chunk in self._owners[row.pool].chunks.remove(row.ordinal):
            del self._places[chunk.number]
            self._stock.give_back(chunk, broken=chunk.number in broken)

    # --- what copiers say ---------------------------------------------------------------------

    def share(self, catalog: Catalog, rank: int, holder: Copier) -> set[int]:
        """A copier will work on a rank's shards of a catalog: have it pin what it lacks.

        Returns: the chunks in which it cannot reach the pages yet.
        """
        chunks = [
            row[_shard(pool, rank)]
            for pool in catalog.pools.values()
            for row in self._owners[pool].chunks.rows.values()
        ]
        return {chunk.number for chunk in chunks if not self._stock.add(holder, chunk)}

    def ready(self, holder: Copier, number: int, error: str) -> bool:
        """A copier has pinned a chunk, or could not. False: its pages are still to go, and must
        not be asked for on its device before the chunk is dropped."""
        if self._stock.ready(holder, number, error):
            return True
        row = self._places.get(number)
        if row is None:
            return True
        waiting = self._claims.get(row)
        if error and waiting is None:
            log.error("%s; dropping the pages that lie there, to be computed again", error)
            self._broken.setdefault(row, set()).add(number)
            self._drop_if_unused(row)
            return False
        if error:
            del self._claims[row]
            self._give_back(row, {number})
            self._stock.stop_growing(error)
        elif waiting is not None:
            waiting.discard((holder.device, number))
            if not waiting:
                self._open(row)
        return True

    def lost(self, holder: Copier) -> None:
        """A copier died: it maps nothing, and will be told anew what to pin."""
        self._stock.lost(holder)
        for row, waiting in list(self._claims.items()):
            waiting -= {entry for entry in waiting if entry[0] == holder.device}
            if not waiting:
                self._open(row)

    def verified(self, number: int, corrupt: Slots) -> int:
        """A copier has compared the pages of a chunk with their checksums.

        Args: `corrupt`: slots within the chunk of those that have changed: nobody is to get them.
        Returns: how many there were.
        """
        row = self._places.get(number)
        if row is None:
            return 0
        for chunk in self.chunks(row):
            if chunk.number == number:
                chunk.unverified = None
        return row.pool.spoil(corrupt + row.ordinal * row.pool.host.chunk_slots)


def row_bytes(pool: PagePool) -> int:
    """What a pool claims at a time: a chunk a shard."""
    return pool.host.chunk_bytes * pool.shards


def _shard(pool: PagePool, rank: int) -> int:
    """The shard of a pool that a rank uses: its own, or the one that all of them have."""
    return rank if pool.shards > 1 else 0
