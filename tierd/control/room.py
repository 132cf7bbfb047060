"""Room for pages: which pool gets which chunk of the one stock, and which gives one back.

A pool grows while the budget lasts and evicts once it does not. Chunks move to the pools that have
to evict from those whose pages are older, so that no fixed ratio leaves one full and another empty.
Where somebody uses a page of every chunk, the oldest one is cleared: it goes to the pool that needs
it once the last lease, pin or copy there has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from tierd.control.catalog import Catalog
from tierd.control.clearings import Clearings
from tierd.control.pages import PagePool
from tierd.control.pool_chunks import PoolChunks
from tierd.control.promises import PROMISE_S, Promises
from tierd.control.rows import Row, Rows, Sharers, row_bytes
from tierd.control.stock import Stock
from tierd.memory.chunks import ChunkStore
from tierd.memory.persist import FoundChunk, PersistDirectory

AHEAD_PAGES, AHEAD_PART = 128, 256
"""A full pool evicts so many pages at least, or this part of it: for one by one it costs several
times as much."""
DISSOLVED_PAGES, DISSOLVED_ROWS = 1024, 16
"""What a namespace that nobody uses gives back at a time."""
NEVER_COLD = 1 << 62

Look = Callable[[PoolChunks, Set[int]], tuple[int, int] | None]
"""One of a pool's chunks, but for some: its last use and its ordinal."""


class RoomKeeper:
    """Decides about the chunks of all pools.

    Args:
        stock: What they are taken from, and given back to.
        shares: By pool name, the share of the budget that pools of that name may take together.
    """

    def __init__(self, stock: Stock, shares: Mapping[str, float] | None = None) -> None:
        self.stock = stock
        self.rows = Rows(stock, opened=self._opened, dropped=self._dropped)
        self._shares = shares or {}
        # Pools that have evicted for want of room since the last look.
        self._pressed: set[PagePool] = set()
        self._promises = Promises()
        self._clearings = Clearings()
        # By pool, since when there has been no room for it.
        self._lacking: dict[PagePool, float] = {}
        self._now = 0.0

    @property
    def store(self) -> ChunkStore:
        """Every chunk there is, and the budget."""
        return self.stock.store

    def adopt(
        self, pool: PagePool, found: Sequence[FoundChunk], directory: PersistDirectory
    ) -> Row | None:
        """Take in a row of chunks that an earlier daemon has left, see `Rows.adopt`. None: there
        is no room."""
        return self.rows.adopt(pool, found, directory) if self._may_have(pool) else None

    def make_room(self, pool: PagePool, missing: int, sharers: Sharers) -> bool | None:
        """Find `missing` more free slots for a pool.

        Returns: True: they are free now. None: a chunk is on its way; ask again later. False:
            there is no room to be had.
        """
        made = self._make_room(pool, missing, sharers)
        if made:
            self._lacking.pop(pool, None)
        return made

    def rebalance(self, now: float) -> None:
        """Let pools that have had to evict take chunks in which everything is older than in their
        own: in the end the least recently used pages of all pools are the ones that go.

        Call every now and then; one chunk moves at a time.
        """
        self._now = now
        self.stock.tick()
        self.rows.drop_broken()
        self._hand_over()
        # A model's pools are of use together: what one has been promised waits for the others.
        takers = [pool for pool in self._clearings.takers if pool in self.rows.pools]
        waiting = [self.rows.catalog_of(pool) for pool in takers]
        self._promises.expire(now, lambda pool: self.rows.catalog_of(pool) in waiting)
        if self.stock.busy or self._promises.is_one_fresh(now) or len(self.rows.pools) == 1:
            return
        pressed, self._pressed = self._pressed, set()
        for pool in [pool for pool in self.rows.pools if pool in pressed]:
            if pool.name in self._shares:
                continue  # it has what it may have
            # Whether it could give one of its own now, which it writes to, does not matter.
            mine = pool.chunks.oldest(self.rows.broken(pool))
            if mine is not None and self._take(pool, mine[0]):
                self._promises.owe(pool, row_bytes(pool), now)
                return

    def dissolve(self, catalog: Catalog) -> bool:
        """Evict some of what nobody holds and give back some of what is empty; call it again and
        again. True: nothing is left."""
        pools = catalog.pools.values()
        for pool in pools:
            pool.evict(DISSOLVED_PAGES)
            if pool.free_slots == pool.capacity:
                for row in self.rows.usable(pool)[:DISSOLVED_ROWS]:
                    self.rows.remove(row)
        if any(self.rows.count(pool) for pool in pools):
            return False
        for pool in pools:
            self.rows.close_pool(pool)
            self._promises.forget_pool(pool)
            self._lacking.pop(pool, None)
        return True

    def close(self) -> None:
        """Close every chunk. The copiers must be gone."""
        self.rows.close()
        self.stock.close()

    def _opened(self, pool: PagePool) -> None:
        self._promises.make(pool, self._now)

    def _dropped(self, row: Row) -> None:
        self._clearings.discard(row)
        self._promises.forget_row(row)

    # --- a pool's own -------------------------------------------------------------------------

    def _make_room(self, pool: PagePool, missing: int, sharers: Sharers) -> bool | None:
        wanted = pool.free_slots + missing
        self._hand_over()
        self._grow(pool, missing, sharers)
        lack = wanted - pool.free_slots
        if lack <= 0:
            return True
        if self.stock.wanted or self.rows.count_pinning(pool):
            return None
        if lack <= pool.pages - pool.held:  # in vain, it would cost pages for nothing
            self._pressed.add(pool)
            pool.evict(max(lack, min(AHEAD_PAGES, pool.capacity // AHEAD_PART)))
            self._promises.make(pool, self._now)
        if pool.free_slots >= wanted:
            return True
        if self.rows.busy:
            return None
        if wanted > self._most_slots(pool):
            return False  # whatever others gave
        # It has too little of its own: whoever has something gives.
        if not self._take(pool, NEVER_COLD):
            settled = [p for p in self._givers(pool) if not self._promises.new_rows(p)]
            if any(other.chunks.loosen() for other in settled):
                return None
            self._clear_for(pool, wanted - pool.free_slots)
            others = (other for other in self.rows.pools if other is not pool)
            wait = any(self._promises.is_left_alone(other, self._now) for other in others)
            return None if wait else False
        self._promises.owe(pool, row_bytes(pool), self._now)
        self._grow(pool, wanted - pool.free_slots, sharers)
        return True if pool.free_slots >= wanted else None

    def _grow(self, pool: PagePool, slots: int, sharers: Sharers) -> None:
        """Claim chunks for so many more slots, less what is being pinned already."""
        rows = -(-slots // pool.host.chunk_slots) - self.rows.count_pinning(pool)
        while rows > 0 and self._may_have(pool):
            row = self.rows.claim(pool, sharers)
            if row is None:
                return
            self._promises.claim(row, row_bytes(pool), self._now)
            rows -= 1

    def _may_have(self, pool: PagePool) -> bool:
        """Is there a row of chunks for a pool, that was promised to no other, within its cap?"""
        return row_bytes(pool) <= self._free_bytes(pool) and self._is_below_cap(pool)

    def _free_bytes(self, pool: PagePool) -> int:
        """What nobody has claimed of the budget, less what was promised to other pools."""
        owed = self._promises.owed_to_others(pool)
        return self.store.budget_bytes - self.store.claimed_bytes - owed

    def _most_slots(self, pool: PagePool) -> int:
        """How many slots a pool could have, if no other had any."""
        budget = self._shares.get(pool.name, 1.0) * self.store.budget_bytes
        return int(budget / row_bytes(pool)) * pool.host.chunk_slots

    def _is_below_cap(self, pool: PagePool) -> bool:
        """May a pool and its namesakes have one more row?"""
        if pool.name not in self._shares:
            return True
        namesakes = (other for other in self.rows.pools if other.name == pool.name)
        taken = sum(self.rows.count(other) * row_bytes(other) for other in namesakes)
        return taken + row_bytes(pool) <= self._shares[pool.name] * self.store.budget_bytes

    # --- what others give ---------------------------------------------------------------------

    def _givers(self, pool: PagePool) -> Iterator[PagePool]:
        """The pools that may have to give a chunk to this one."""
        capped = not self._is_below_cap(pool)
        for other in self.rows.pools:
            # A model's pools are of use together: none takes the last that another one has.
            siblings = self.rows.catalog_of(other) is self.rows.catalog_of(pool)
            left = self.rows.count(other) - self._clearings.count_of(other)
            of_no_use = capped and other.name != pool.name
            if other is pool or (siblings and left <= 1) or of_no_use:
                continue
            if not self._promises.is_unused(other, self._now):
                yield other

    def _coldest(self, taker: PagePool, look: Look, colder_than: int = NEVER_COLD) -> Row | None:
        """The chunk with the least recent use of all that others may have to give, if it is colder
        than that; but for what is to be dropped, and for what its pool has just got."""
        coldest: Row | None = None
        for other in self._givers(taker):
            staying = self.rows.broken(other) | self._promises.new_rows(other)
            found = look(other.chunks, staying)
            if found is not None and found[0] < colder_than:
                colder_than = found[0]
                coldest = Row(other, found[1])
        return coldest

    def _take(self, pool: PagePool, colder_than: int) -> bool:
        """Have another pool give up the coldest chunk whose pages may go, if it is colder than
        that."""
        row = self._coldest(pool, PoolChunks.coldest, colder_than)
        if row is not None:
            self.rows.remove(row)
        return row is not None

    def _clear_for(self, pool: PagePool, lack: int) -> None:
        """No chunk can be given up as it is. Have the oldest ones cleared for a pool, and for those
        of its model that have none either: leases that follow each other for ever must not keep
        anybody from a first chunk. A pool that has some can wait for a while: most often its own
        pages are about to be there.

        Args: `lack`: so many slots are missing.
        """
        since = self._lacking.setdefault(pool, self._now)
        if pool.capacity and self._now - since < PROMISE_S:
            return
        own = pool.pages - pool.held
        self._clear_rows_for(pool, -(-max(1, lack - own) // pool.host.chunk_slots))
        for sibling in self.rows.catalog_of(pool).pools.values():
            if sibling is not pool and not self.rows.count(sibling):
                self._clear_rows_for(sibling, 1)

    def _clear_rows_for(self, taker: PagePool, rows: int) -> None:
        if taker in self._clearings.takers:
            return
        needed = rows * row_bytes(taker)
        lack = needed - self._free_bytes(taker)
        while lack > 0:
            row = self._coldest(taker, PoolChunks.oldest)
            if row is None:
                return
            row.pool.chunks.withdraw(row.ordinal)
            self._clearings.add(row, taker, needed, self._now)
            lack -= row_bytes(row.pool)

    def _hand_over(self) -> None:
        """What has been cleared goes to whom it was cleared for, and is left to it for as long as
        that took: it may ask seldom."""
        for done in self._clearings.complete():
            for row in done.rows:
                self.rows.remove(row)
            if done.taker in self.rows.pools:
                time_s = max(PROMISE_S, self._now - done.since)
                self._promises.owe(done.taker, done.nbytes, self._now, time_s)
