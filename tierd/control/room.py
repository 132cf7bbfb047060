"""Room for pages: which pool gets which chunk of the one stock, and which gives one back.

A pool grows while the budget lasts and evicts once it does not. Chunks move to the pools that have
to evict from those whose pages are older, so that no fixed ratio leaves one full and another empty.
Where somebody uses a page of every chunk, the oldest one is cleared: it goes to the pool that needs
it once the last lease, pin or copy there has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from tierd.control.catalog import Catalog
from tierd.control.clearings import Clearings, Row
from tierd.control.copiers import Copier, CopierState
from tierd.control.pages import PagePool
from tierd.control.promises import PROMISE_S, Promises
from tierd.control.stock import Stock
from tierd.eviction.policy import Slots
from tierd.memory.chunks import Chunk, ChunkRows, ChunkStore
from tierd.memory.persist import FoundChunk, PersistDirectory
from tierd.wire.geometry import HostLayout

log = logging.getLogger("tierd.control")

AHEAD_PAGES, AHEAD_PART = 128, 256
"""A full pool evicts so many pages at least, or this part of it: for one by one it costs several
times as much."""
DISSOLVED_PAGES, DISSOLVED_ROWS = 1024, 16
"""What a namespace that nobody uses gives back at a time."""
NEVER_COLD = 1 << 62


class RoomKeeper:
    """The chunks of all pools.

    Args:
        stock: What they are taken from, and given back to.
        shares: By pool name, the share of the budget that pools of that name may take together.
    """

    def __init__(self, stock: Stock, shares: Mapping[str, float] | None = None) -> None:
        self.stock = stock
        self._shares = shares or {}
        self._rows: dict[int, ChunkRows] = {}
        self._pools: dict[int, PagePool] = {}
        self._catalogs: dict[int, Catalog] = {}
        self._places: dict[int, Row] = {}
        """Of every claimed chunk."""
        # Rows that are not usable yet: (copier, chunk) still to pin.
        self._claims: dict[Row, set[tuple[str, int]]] = {}
        # Rows in use with a chunk that a copier could not pin again: they go as soon as they can.
        self._broken: dict[Row, set[int]] = {}
        # Pools that have evicted for want of room since the last look.
        self._pressed: set[int] = set()
        self._promises = Promises()
        self._clearings = Clearings()
        # By pool, since when there has been no room for it.
        self._lacking: dict[int, float] = {}
        self._now = 0.0

    @property
    def store(self) -> ChunkStore:
        """Every chunk there is, and the budget."""
        return self.stock.store

    @property
    def busy(self) -> bool:
        """Does somebody wait for copiers to pin or unmap chunks?"""
        return bool(self._claims or self._broken) or self.stock.busy

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
        most = self.store.budget_bytes // (host.chunk_bytes * shards)
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
        self._rows[id(pool)] = rows
        self._pools[id(pool)] = pool
        self._catalogs[id(pool)] = catalog

    def locate(
        self, pool: PagePool, slots: Slots, rank: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Chunk numbers and slots within them of a pool's slots, in a rank's shard. Shapes:
        (len(slots),)."""
        return self._rows[id(pool)].locate(slots, _shard(pool, rank))

    def share(self, catalog: Catalog, rank: int, holder: Copier) -> set[int]:
        """A copier will work on a rank's shards of a catalog: have it pin what it lacks.

        Returns: the chunks in which it cannot reach the pages yet.
        """
        chunks = [
            row[_shard(pool, rank)]
            for pool in catalog.pools.values()
            for row in self._rows[id(pool)].rows.values()
        ]
        return {chunk.number for chunk in chunks if not self.stock.add(holder, chunk)}

    def adopt(
        self, pool: PagePool, row: Sequence[FoundChunk], directory: PersistDirectory
    ) -> int | None:
        """Take in a row of chunks that an earlier daemon has left, one a shard; its slots count as
        free until `PagePool.recover` says what is in them.

        Returns: its ordinal; None: there is no room.
        """
        if not self._may_have(pool):
            return None
        chunks = self.stock.adopt(row, directory)
        ordinal = self._rows[id(pool)].add(chunks)
        for chunk in chunks:
            chunk.take_over(pool.host, ordinal)
            self._places[chunk.number] = (id(pool), ordinal)
        pool.chunks.add(ordinal)
        return ordinal

    def headers(self, pool: PagePool, ordinal: int) -> list[npt.NDArray[np.void]]:
        """The slot headers of a row, copied: for each shard, shape (slots of a chunk,), dtype
        `layout.SLOT_HEADER`."""
        return [chunk.headers.copy() for chunk in self._rows[id(pool)].rows[ordinal]]

    def verified(self, number: int, corrupt: Slots) -> int:
        """A copier has compared the pages of a chunk with their checksums.

        Args: `corrupt`: slots within the chunk of those that have changed: nobody is to get them.
        Returns: how many there were.
        """
        row = self._places.get(number)
        if row is None:
            return 0
        for chunk in self._chunks(row):
            if chunk.number == number:
                chunk.unverified = None
        pool = self._pools[row[0]]
        return pool.spoil(corrupt + row[1] * pool.host.chunk_slots)

    def make_room(
        self,
        pool: PagePool,
        missing: int,
        sharers: Sequence[tuple[int, Copier]],
    ) -> bool | None:
        """Find `missing` more free slots for a pool.

        Returns: True: they are free now. None: a chunk is on its way; ask again later. False:
            there is no room to be had.
        """
        made = self._make_room(pool, missing, sharers)
        if made:
            self._lacking.pop(id(pool), None)
        return made

    def _make_room(
        self,
        pool: PagePool,
        missing: int,
        sharers: Sequence[tuple[int, Copier]],
    ) -> bool | None:
        wanted = pool.free_slots + missing
        self._hand_over()
        self._grow(pool, missing, sharers)
        lack = wanted - pool.free_slots
        if lack <= 0:
            return True
        if self.stock.wanted or any(key[0] == id(pool) for key in self._claims):
            return None
        if lack <= pool.pages - pool.held:  # in vain, it would cost pages for nothing
            self._pressed.add(id(pool))
            pool.evict(max(lack, min(AHEAD_PAGES, pool.capacity // AHEAD_PART)))
            self._promises.make(pool, self._now)
        if pool.free_slots >= wanted:
            return True
        if self.busy:
            return None
        if wanted > self._most_slots(pool):
            return False  # whatever others gave
        # It has too little of its own: whoever has something gives.
        if not self._take(pool, NEVER_COLD):
            settled = [p for p in self._givers(pool) if not self._promises.new_rows(p)]
            if any(other.chunks.loosen() for other in settled):
                return None
            self._clear_for(pool, wanted - pool.free_slots)
            others = (other for other in self._pools.values() if other is not pool)
            wait = any(self._promises.is_left_alone(other, self._now) for other in others)
            return None if wait else False
        self._promises.owe(pool, _row_bytes(pool), self._now)
        self._grow(pool, wanted - pool.free_slots, sharers)
        return True if pool.free_slots >= wanted else None

    def rebalance(self, now: float) -> None:
        """Let pools that have had to evict take chunks in which everything is older than in their
        own: in the end the least recently used pages of all pools are the ones that go.

        Call every now and then; one chunk moves at a time.
        """
        self._now = now
        self.stock.tick()
        for key in list(self._broken):
            self._drop_broken(key)
        self._hand_over()
        # A model's pools are of use together: what one has been promised waits for the others.
        waiting = [self._catalogs[n] for n in self._clearings.takers if n in self._catalogs]
        self._promises.expire(now, lambda number: self._catalogs[number] in waiting)
        if self.stock.busy or self._promises.is_one_fresh(now) or len(self._pools) == 1:
            return
        pressed, self._pressed = self._pressed, set()
        for pool in [self._pools[number] for number in pressed if number in self._pools]:
            if pool.name in self._shares:
                continue  # it has what it may have
            # Whether it could give one of its own now, which it writes to, does not matter.
            mine = pool.chunks.oldest(self._broken_rows(pool))
            if mine is not None and self._take(pool, mine[0]):
                self._promises.owe(pool, _row_bytes(pool), now)
                return

    def ready(self, holder: Copier, number: int, error: str) -> bool:
        """A copier has pinned a chunk, or could not. False: its pages are still to go, and must
        not be asked for on its device before the chunk is dropped."""
        if self.stock.ready(holder, number, error):
            return True
        row = self._places.get(number)
        if row is None:
            return True
        waiting = self._claims.get(row)
        if error and waiting is None:
            log.error("%s; dropping the pages that lie there, to be computed again", error)
            self._broken.setdefault(row, set()).add(number)
            self._drop_broken(row)
            return False
        if error:
            del self._claims[row]
            self._drop_row(row, {number})
            self.stock.stop_growing(error)
        elif waiting is not None:
            waiting.discard((holder.device, number))
            if not waiting:
                self._open(row)
        return True

    def lost(self, holder: Copier) -> None:
        """A copier died: it maps nothing, and will be told anew what to pin."""
        self.stock.lost(holder)
        for row, waiting in list(self._claims.items()):
            waiting -= {entry for entry in waiting if entry[0] == holder.device}
            if not waiting:
                self._open(row)

    def dissolve(self, catalog: Catalog) -> bool:
        """Evict some of what nobody holds and give back some of what is empty; call it again and
        again. True: nothing is left."""
        for pool in catalog.pools.values():
            pool.evict(DISSOLVED_PAGES)
            rows = self._rows[id(pool)].rows
            if pool.free_slots == pool.capacity:
                free = [o for o in rows if (id(pool), o) not in self._claims]
                for ordinal in free[:DISSOLVED_ROWS]:
                    self._remove((id(pool), ordinal))
        if any(self._rows[id(pool)].rows for pool in catalog.pools.values()):
            return False
        for pool in catalog.pools.values():
            del self._rows[id(pool)], self._pools[id(pool)], self._catalogs[id(pool)]
            self._promises.forget_pool(pool)
            self._lacking.pop(id(pool), None)
        return True

    def close(self) -> None:
        """Close every chunk. The copiers must be gone."""
        for rows in self._rows.values():
            for row in rows.rows.values():
                for chunk in row:
                    chunk.close()  # and its file, if it has one, is for the next daemon
        self._rows.clear()
        self.stock.close()

    # --- inside -------------------------------------------------------------------------------

    def _grow(
        self,
        pool: PagePool,
        slots: int,
        sharers: Sequence[tuple[int, Copier]],
    ) -> None:
        """Claim chunks for so many more slots, less what is being pinned already."""
        pinning = sum(key[0] == id(pool) for key in self._claims)
        rows = -(-slots // pool.host.chunk_slots) - pinning
        while rows > 0 and self._may_have(pool) and self._claim(pool, sharers):
            rows -= 1

    def _may_have(self, pool: PagePool) -> bool:
        """Is there a row of chunks for a pool, that was promised to no other, within its cap?"""
        return _row_bytes(pool) <= self._free_bytes(pool) and self._is_below_cap(pool)

    def _free_bytes(self, pool: PagePool) -> int:
        """What nobody has claimed of the budget, less what was promised to other pools."""
        owed = self._promises.owed_to_others(pool)
        return self.store.budget_bytes - self.store.claimed_bytes - owed

    def _most_slots(self, pool: PagePool) -> int:
        """How many slots a pool could have, if no other had any."""
        budget = self._shares.get(pool.name, 1.0) * self.store.budget_bytes
        return int(budget / _row_bytes(pool)) * pool.host.chunk_slots

    def _is_below_cap(self, pool: PagePool) -> bool:
        """May a pool and its namesakes have one more row?"""
        if pool.name not in self._shares:
            return True
        namesakes = [p for p in self._pools.values() if p.name == pool.name]
        taken = sum(
            chunk.size
            for p in namesakes
            for row in self._rows[id(p)].rows.values()
            for chunk in row
        )
        return taken + _row_bytes(pool) <= self._shares[pool.name] * self.store.budget_bytes

    def _claim(self, pool: PagePool, sharers: Sequence[tuple[int, Copier]]) -> bool:
        """Claim a row: usable at once if the stock has it pinned. False: not now."""
        # Each chunk lies near a copier that lives, if one does. One that is being started again is
        # told by `share` when it is back. What all of them share lies near each in turn.
        turn = (
            self._rows[id(pool)].next_ordinal % len(sharers) if sharers and pool.shards == 1 else 0
        )
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
            return False
        chunks = self.stock.acquire(found, pool.host.chunk_bytes)
        if chunks is None:
            return False
        row = (id(pool), self._rows[id(pool)].add(chunks))
        self._promises.claim(pool, row, _row_bytes(pool), self._now)
        self._places |= dict.fromkeys((chunk.number for chunk in chunks), row)
        waiting = {
            (holder.device, chunk.number)
            for holder, chunk in (
                (holder, chunks[_shard(pool, rank)])
                for rank, holder in sharers
                if holder.state is not CopierState.DEAD
            )
            if not self.stock.add(holder, chunk)
        }
        if waiting:
            self._claims[row] = waiting
        else:
            self._open(row)
        for holder in found:
            self.stock.fill(holder)
        return True

    def _open(self, row: Row) -> None:
        """A row can be used: whoever lives and needs it has pinned it."""
        self._claims.pop(row, None)
        pool, catalog, chunks = self._pools[row[0]], self._catalogs[row[0]], self._chunks(row)
        for shard, chunk in enumerate(chunks):
            chunk.lay_out(
                pool.host,
                shard=shard,
                shards=len(chunks),
                ordinal=row[1],
                namespace=catalog.digest,
                pool=pool.name,
            )
        pool.chunks.add(row[1])
        self._promises.make(pool, self._now)

    def _chunks(self, row: Row) -> list[Chunk]:
        return self._rows[row[0]].rows[row[1]]

    def _remove(self, row: Row) -> None:
        """Evict what is in a row and give its chunks back."""
        self._clearings.discard(row)
        self._pools[row[0]].chunks.remove(row[1])
        self._drop_row(row, self._broken.pop(row, set()))

    def _drop_row(self, row: Row, broken: Set[int] = frozenset()) -> None:
        self._promises.forget_row(row)
        for chunk in self._rows[row[0]].remove(row[1]):
            del self._places[chunk.number]
            self.stock.give_back(chunk, broken=chunk.number in broken)

    def _drop_broken(self, row: Row) -> None:
        """Drop the pages of a row that a copier cannot reach, unless somebody uses them now."""
        if self._pools[row[0]].chunks.may_remove(row[1]):
            self._remove(row)
            self.stock.stop_growing("a copier could not pin a chunk again")

    def _broken_rows(self, pool: PagePool) -> set[int]:
        return {ordinal for owner, ordinal in self._broken if owner == id(pool)}

    def _givers(self, pool: PagePool) -> Iterator[PagePool]:
        """The pools that may have to give a chunk to this one."""
        capped = not self._is_below_cap(pool)
        for other in self._pools.values():
            # A model's pools are of use together: none takes the last that another one has.
            siblings = self._catalogs[id(other)] is self._catalogs[id(pool)]
            left = len(self._rows[id(other)].rows) - self._clearings.count_of(id(other))
            of_no_use = capped and other.name != pool.name
            if other is pool or (siblings and left <= 1) or of_no_use:
                continue
            if not self._promises.is_unused(other, self._now):
                yield other

    def _staying(self, pool: PagePool) -> set[int]:
        """The rows of a pool that it gives to nobody: those that are to be dropped, and those that
        it has just got."""
        return self._broken_rows(pool) | self._promises.new_rows(pool)

    def _take(self, pool: PagePool, colder_than: int) -> bool:
        """Have another pool give up the coldest chunk of all, if it is colder than that."""
        coldest: tuple[int, int, PagePool] | None = None
        for other in self._givers(pool):
            found = other.chunks.coldest(self._staying(other))
            if found is not None and found[0] < colder_than:
                colder_than = found[0]
                coldest = (*found, other)
        if coldest is None:
            return False
        _, ordinal, other = coldest
        self._remove((id(other), ordinal))
        return True

    def _clear_for(self, pool: PagePool, lack: int) -> None:
        """No chunk can be given up as it is. Have the oldest ones cleared for a pool, and for those
        of its model that have none either: leases that follow each other for ever must not keep
        anybody from a first chunk. A pool that has some can wait for a while: most often its own
        pages are about to be there.

        Args: `lack`: so many slots are missing.
        """
        since = self._lacking.setdefault(id(pool), self._now)
        if pool.capacity and self._now - since < PROMISE_S:
            return
        own = pool.pages - pool.held
        self._clear_rows_for(pool, -(-max(1, lack - own) // pool.host.chunk_slots))
        for sibling in self._catalogs[id(pool)].pools.values():
            if sibling is not pool and not self._rows[id(sibling)].rows:
                self._clear_rows_for(sibling, 1)

    def _clear_rows_for(self, taker: PagePool, rows: int) -> None:
        if id(taker) in self._clearings.takers:
            return
        needed = rows * _row_bytes(taker)
        lack = needed - self._free_bytes(taker)
        while lack > 0:
            oldest: tuple[int, int, PagePool] | None = None
            for other in self._givers(taker):
                found = other.chunks.oldest(self._staying(other))
                if found is not None and (oldest is None or found[0] < oldest[0]):
                    oldest = (*found, other)
            if oldest is None:
                return
            _, ordinal, other = oldest
            row = (id(other), ordinal)
            other.chunks.withdraw(ordinal)
            self._clearings.add(row, id(taker), needed, self._now)
            lack -= sum(chunk.size for chunk in self._chunks(row))

    def _hand_over(self) -> None:
        """What has been cleared goes to whom it was cleared for, and is left to it for as long as
        that took: it may ask seldom."""
        for done in self._clearings.complete(
            lambda row: self._pools[row[0]].slots.is_vacant(row[1])
        ):
            for row in done.rows:
                self._remove(row)
            if done.taker in self._pools:
                time_s = max(PROMISE_S, self._now - done.since)
                self._promises.owe(self._pools[done.taker], done.nbytes, self._now, time_s)


def _row_bytes(pool: PagePool) -> int:
    """What a pool claims at a time: a chunk a shard."""
    return pool.host.chunk_bytes * pool.shards


def _shard(pool: PagePool, rank: int) -> int:
    """The shard of a pool that a rank uses: its own, or the one that all of them have."""
    return rank if pool.shards > 1 else 0
