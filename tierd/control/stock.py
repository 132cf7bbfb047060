"""The stock of chunks: made and pinned ahead of the pools that will claim them, device by device.

A device's copier is told of a few chunks at a time, so that one that a pool waits for is never
behind more than those. Pools take from the stock and give back to it; chunks change devices, by
way of a new one, when a pool needs more than its own device has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierd.control.copiers import Copier, CopierState
from tierd.memory.chunks import Chunk, ChunkStore
from tierd.memory.limits import format_size
from tierd.memory.persist import FoundChunk, PersistDirectory
from tierd.wire import messages
from tierd.wire.geometry import chunk_layout

log = logging.getLogger("tierd.control")

FIRST_BYTES = 512 << 20
"""A device can serve once so much of its stock is pinned; the rest follows while it does."""
SPARE_BYTES = 512 << 20
PINNED_AT_ONCE = 8
"""Chunks that a copier pins, or has waiting to be pinned, for the stock."""

Tell = Callable[[Copier, messages.Message, "int | None"], None]


@dataclass
class Shelf:
    """The unclaimed chunks of one device, by number, and what it may have.

    `bare`: its copier has not been told, or has died since. `limit_bytes`: what is made for it
    ahead of any claim, claimed chunks included; a claim may go beyond.
    """

    device: str
    ahead_bytes: int
    limit_bytes: int
    created_bytes: int = 0
    pinned: dict[int, Chunk] = field(default_factory=dict)
    pinning: dict[int, Chunk] = field(default_factory=dict)
    bare: dict[int, Chunk] = field(default_factory=dict)

    @property
    def chunks(self) -> Iterator[dict[int, Chunk]]:
        """The three of them, the most useful first."""
        yield from (self.pinned, self.pinning, self.bare)

    def unclaimed_bytes(self, chunk_bytes: int) -> int:
        """What is on the shelf, in chunks of the usual size."""
        return sum(map(len, self.chunks)) * chunk_bytes

    def pop(self) -> Chunk | None:
        """The chunk that is usable first."""
        for chunks in self.chunks:
            if chunks:
                return chunks.pop(next(iter(chunks)))
        return None


@dataclass
class _Leaving:
    """A chunk that copiers still have to unmap; then it is discarded, or back in the stock."""

    chunk: Chunk
    waiting: set[str]
    keep: bool


class Stock:
    """Every chunk there is, and the copiers that pin them.

    Args:
        tell: Sends a message to a copier, with a descriptor beside it or None.
        devices: Of all copiers; each may have an equal part of the budget ahead of claims.
        ahead_bytes: What is pinned ahead of use, all devices together.
        spare_bytes: Unclaimed chunks that a device in use is kept at beyond that, while the budget
            lasts: pinning takes longer than a burst of backups may wait.
        touch: Copiers touch every page of a chunk when they map it.
    """

    def __init__(
        self,
        store: ChunkStore,
        tell: Tell,
        devices: Sequence[str],
        *,
        ahead_bytes: int = 0,
        spare_bytes: int = SPARE_BYTES,
        touch: bool = False,
    ) -> None:
        self.store = store
        self._tell = tell
        self._touch = touch
        self._spare_bytes = spare_bytes
        self._holders: dict[str, Copier] = {}
        self._leaving: dict[int, _Leaving] = {}
        self._going_bytes = 0
        share = store.budget_bytes // len(devices)
        ahead = min(ahead_bytes, store.budget_bytes) // len(devices)
        self._shelves = {device: Shelf(device, ahead, share) for device in devices}
        # Somebody waits for what is being given back: nothing is made ahead until he has it.
        self._wanted = False
        self._quarters = 0

    @property
    def busy(self) -> bool:
        """Does somebody wait for copiers to unmap chunks?"""
        return bool(self._leaving) or self._wanted

    @property
    def wanted(self) -> bool:
        """Was something asked for that has to be given back first?"""
        return self._wanted

    @property
    def ahead_bytes(self) -> int:
        """What is to be pinned ahead of use, as far as the budget still allows."""
        return min(sum(s.ahead_bytes for s in self._shelves.values()), self.store.budget_bytes)

    @property
    def pinned_bytes(self) -> int:
        """What copiers have mapped and pinned, claimed or not; what is shared counts once."""
        unpinned = (
            sum(len(s.pinning) + len(s.bare) for s in self._shelves.values())
            * self.store.chunk_bytes
        )
        leaving = sum(entry.chunk.size for entry in self._leaving.values())
        return self.store.created_bytes - unpinned - leaving

    def can_serve(self, holder: Copier) -> bool:
        """Is a first part of a device's memory pinned?"""
        shelf = self._shelves[holder.device]
        if len(shelf.pinned) * self.store.chunk_bytes >= FIRST_BYTES:
            return True
        return not (shelf.pinning or shelf.bare or self._wants_more(shelf))

    def fill(self, holder: Copier) -> None:
        """Have a copier pin more ahead of use, a few at a time. Call whenever one has been, and
        every now and then."""
        self._holders[holder.device] = holder
        shelf, size = self._shelves[holder.device], self.store.chunk_bytes
        while holder.state is CopierState.READY and len(shelf.pinning) < PINNED_AT_ONCE:
            if shelf.bare:
                chunk = shelf.bare.pop(next(iter(shelf.bare)))
            else:
                made = self._create(shelf, size) if self._wants_more(shelf) else None
                if made is None:
                    return
                chunk = made
            shelf.pinning[chunk.number] = chunk
            self.add(holder, chunk)

    def acquire(self, homes: Sequence[Copier], size: int) -> list[Chunk] | None:
        """A chunk for each of some devices, all or none; `add` says whether it is pinned.

        Call only if the budget allows it. None: chunks that nobody has
        claimed have to be given back first; ask again when they are.
        """
        shelves = [self._shelves[home.device] for home in homes]
        usual = size == self.store.chunk_bytes
        taken = [shelf.pop() if usual else None for shelf in shelves]
        lacking = [n for n, chunk in enumerate(taken) if chunk is None]
        needed = len(lacking) * size - (self.store.budget_bytes - self.store.created_bytes)
        self._wanted = needed > 0
        if needed > 0:
            for shelf, chunk in zip(shelves, taken, strict=True):
                if chunk is not None:
                    self._shelve(shelf, chunk)
            self._reclaim(needed, [shelves[n] for n in lacking] if usual else [])
            return None
        for n in lacking:
            taken[n] = self._create(shelves[n], size)
        chunks = [chunk for chunk in taken if chunk is not None]
        if len(chunks) < len(homes):
            for chunk in chunks:
                self.release(chunk)
            return None
        self.store.claimed_bytes += size * len(chunks)
        return chunks

    def adopt(self, row: Sequence[FoundChunk], directory: PersistDirectory) -> list[Chunk]:
        """Take in chunks that an earlier daemon has left, claimed already, one a shard.

        Call only if the budget allows it.
        """
        chunks = []
        shelves = list(self._shelves.values())
        for shard, found in enumerate(row):
            shelf = shelves[shard % len(shelves)]
            chunk = self.store.adopt(partial(directory.adopt, found), found.size, shelf.device)
            shelf.created_bytes += found.size
            self.store.claimed_bytes += found.size
            chunks.append(chunk)
        return chunks

    def add(self, holder: Copier, chunk: Chunk) -> bool:
        """Have a copier pin a chunk, if it has not been told. Returns whether it has it."""
        self._holders[holder.device] = holder
        if chunk.number not in holder.chunks:
            holder.chunks[chunk.number] = False
            host = chunk.unverified
            add = messages.AddChunk(
                chunk=chunk.number,
                size=chunk.size,
                touch=self._touch,
                verify=None if host is None else chunk_layout(host),
            )
            self._tell(holder, add, chunk.fd)
        return holder.chunks[chunk.number]

    def give_back(self, chunk: Chunk, *, broken: bool = False) -> None:
        """A pool has no more use for a chunk, and no copy uses it.

        Args: `broken`: a copier could not pin it; nobody shall have it again.
        """
        self.store.claimed_bytes -= chunk.size
        chunk.wipe()
        self.release(chunk, broken=broken)

    def release(self, chunk: Chunk, *, broken: bool = False) -> None:
        """Put an unclaimed chunk into the stock, or discard it where it is of no use there."""
        store = self.store
        over = store.created_bytes - self._going_bytes > store.budget_bytes
        keep = not broken and not over and chunk.size == store.chunk_bytes
        holders = [
            holder
            for holder in self._holders.values()
            if chunk.number in holder.chunks and not (keep and holder.device == chunk.home)
        ]
        self._leaving[chunk.number] = _Leaving(chunk, {h.device for h in holders}, keep)
        self._going_bytes += 0 if keep else chunk.size
        for holder in holders:
            self._tell(holder, messages.DropChunk(chunk=chunk.number), None)
        self._settle(chunk.number)

    def ready(self, holder: Copier, number: int, error: str) -> bool:
        """A copier has pinned a chunk, or could not. False: not one of the stock's."""
        if not error and number in holder.chunks:
            holder.chunks[number] = True
        shelf = self._shelves[holder.device]
        chunk = shelf.pinning.pop(number, None)
        if chunk is None:
            return False
        if error:
            self.release(chunk, broken=True)
            self.stop_growing(error)
        else:
            shelf.pinned[number] = chunk
            self._log_progress()
        self.fill(holder)
        return True

    def dropped(self, holder: Copier, number: int) -> None:
        """A copier has unmapped a chunk."""
        holder.chunks.pop(number, None)
        if number in self._leaving:
            self._leaving[number].waiting.discard(holder.device)
            self._settle(number)

    def lost(self, holder: Copier) -> None:
        """A copier died: it maps nothing, and will be told anew what to pin."""
        holder.chunks.clear()
        shelf = self._shelves[holder.device]
        shelf.bare |= shelf.pinned | shelf.pinning
        shelf.pinned.clear()
        shelf.pinning.clear()
        for number in list(self._leaving):
            self.dropped(holder, number)

    def stop_growing(self, error: str) -> None:
        """There is no more memory than what has been made: the budget is what there is."""
        left = self.store.created_bytes - self._going_bytes
        if left < self.store.budget_bytes:
            self.store.budget_bytes = left
            log.error(
                "%s; serving on with the %d MiB of host memory there are. For more, free some (or "
                "raise `ulimit -l`) and start the daemon again",
                error,
                left >> 20,
            )

    def tick(self) -> None:
        """Call every now and then."""
        if not self._leaving:
            self._wanted = False
        for holder in self._holders.values():
            self.fill(holder)

    def close(self) -> None:
        """Discard every chunk that no pool has. The copiers must be gone."""
        for shelf in self._shelves.values():
            while (chunk := shelf.pop()) is not None:
                self.store.discard(chunk)
        for entry in self._leaving.values():
            self.store.discard(entry.chunk)
        self._leaving.clear()

    # --- inside -------------------------------------------------------------------------------

    def _wants_more(self, shelf: Shelf) -> bool:
        """Should a device have another chunk ahead of any claim?"""
        size = self.store.chunk_bytes
        after = shelf.created_bytes + size
        within = self.store.created_bytes + size <= self.store.budget_bytes
        if self._wanted or not within or after > shelf.limit_bytes:
            return False
        unclaimed = shelf.unclaimed_bytes(size)
        in_use = shelf.created_bytes > unclaimed
        return after <= shelf.ahead_bytes or (in_use and unclaimed < self._spare_bytes)

    def _create(self, shelf: Shelf, size: int) -> Chunk | None:
        try:
            chunk = self.store.create(size, shelf.device)
        except OSError as error:
            self.stop_growing(f"cannot make a chunk of {size >> 20} MiB: {error}")
            return None
        if chunk is not None:
            shelf.created_bytes += size
        return chunk

    def _settle(self, number: int) -> None:
        """If no copier has still to unmap a chunk that leaves, it has left."""
        entry = self._leaving[number]
        if entry.waiting:
            return
        del self._leaving[number]
        chunk, shelf = entry.chunk, self._shelves[entry.chunk.home]
        if entry.keep:
            self._shelve(shelf, chunk)
        else:
            self._going_bytes -= chunk.size
            shelf.created_bytes -= chunk.size
            self.store.discard(chunk)

    def _shelve(self, shelf: Shelf, chunk: Chunk) -> None:
        holder = self._holders.get(shelf.device)
        told = holder.chunks.get(chunk.number) if holder is not None else None
        chunks = shelf.bare if told is None else shelf.pinned if told else shelf.pinning
        chunks[chunk.number] = chunk

    def _reclaim(self, needed: int, wanting: Sequence[Shelf]) -> None:
        """Have unclaimed chunks given back by the devices that have most of them. Those that want
        some may have as much more from now on: it goes in batches, not chunk by chunk."""
        size = self.store.chunk_bytes
        left = max(needed, self._spare_bytes if wanting else 0) - self._going_bytes
        donors = [shelf for shelf in self._shelves.values() if shelf not in wanting]
        for donor in sorted(donors, key=lambda shelf: -shelf.unclaimed_bytes(size)):
            moved = 0
            while left > moved and (chunk := donor.pop()) is not None:
                self.release(chunk, broken=True)
                moved += size
            left -= moved
            if wanting:
                donor.limit_bytes -= moved
                for shelf in wanting:
                    shelf.limit_bytes += moved // len(wanting)

    def _log_progress(self) -> None:
        pinned, ahead = self.pinned_bytes, self.ahead_bytes
        quarters = 4 * pinned // ahead if ahead else 0
        if quarters <= self._quarters or self._quarters == 4:
            return
        self._quarters = min(quarters, 4)
        sizes = sorted((page, n) for page, n in self.store.bytes_by_page.items() if n)
        joined = self.store.joined_bytes
        log.info(
            "pinned %s of %s ahead of use (%s%s)",
            format_size(pinned),
            format_size(ahead),
            ", ".join(f"{format_size(n)} in pages of {format_size(page)}" for page, n in sizes),
            f"; the kernel has joined {format_size(joined)} to huge ones" if joined else "",
        )
