"""Pages that an earlier daemon has left in a `PersistDirectory`: found, checked, and indexed again.

All that is read there may be damaged, or another version's. What does not fit in every respect is
dropped: a page that is lost is a miss.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierd.control.catalog import Catalog
from tierd.control.pages import PagePool
from tierd.control.rows import Row
from tierd.control.state import State
from tierd.eviction.policy import Slots
from tierd.memory.limits import format_size
from tierd.memory.persist import FoundChunk, PersistDirectory
from tierd.wire import layout
from tierd.wire.errors import ProtocolError
from tierd.wire.geometry import HostLayout, NamespaceRecord, host_layout, read_namespace_record

log = logging.getLogger("tierd.control")

NOT_IN_USE = "they were not in use"
"""No loss: a daemon that was killed has left what it had made ahead of use."""

Headers = npt.NDArray[np.void]
"""Slot headers of a chunk, copied out of it. Shape: (slots,), dtype `layout.SLOT_HEADER`."""


@dataclass(frozen=True)
class PoolOnRecord:
    """A pool of a namespace, as its record has it and as this version would lay it out."""

    page_tokens: int
    window: int
    shards: int
    host: HostLayout


@dataclass(frozen=True)
class Claim:
    """What a chunk's own header says that it is."""

    digest: bytes
    pool: str
    ordinal: int
    shard: int


@dataclass
class Found:
    """Chunks that fit together, and what became of the others: reason -> how many.

    `rows`: the chunks of each row of a pool, by shard, in the order of their ordinals.
    """

    worlds: dict[bytes, int] = field(default_factory=dict)
    pools: dict[tuple[bytes, str], PoolOnRecord] = field(default_factory=dict)
    rows: list[tuple[bytes, str, list[FoundChunk]]] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)


def recover(state: State, directory: PersistDirectory) -> None:
    """Take over what is in a directory, as far as it fits into this daemon. The rest is removed.

    Call before any copier is started and any rank let in.
    """
    found = _sort(directory, state.room.store.chunk_bytes)
    tick = state.next_tick()
    pools: dict[PagePool, tuple[Catalog, list[Row]]] = {}
    # All pools' first rows come first: if there is room for a part only, it is of use.
    for digest, name, chunks in found.rows:
        spec = found.pools[digest, name]
        catalog = state.catalogs.get(digest)
        if catalog is None:
            catalog = Catalog(digest, found.worlds[digest], private=False, presence=state.presence)
            state.catalogs[digest] = catalog
        state.room.rows.open_pool(
            catalog, name, spec.page_tokens, spec.host, spec.window, shards=spec.shards
        )
        pool = catalog.pools[name]
        row = state.room.adopt(pool, chunks, directory)
        if row is None:
            found.rejected["there is no room for them (--memory, --pool)"] += len(chunks)
            for chunk in chunks:
                directory.reject(chunk)
        else:
            pools.setdefault(pool, (catalog, []))[1].append(row)
    pages = 0
    # A page of a pool with a window is of use only if the chain's page is there.
    for pool in sorted(pools, key=lambda pool: bool(pool.window)):
        pages += _index(state, pool, *pools[pool], tick)
    directory.forget_others(state.catalogs)
    _report(state, directory, pages, found.rejected)


def _sort(directory: PersistDirectory, chunk_bytes: int) -> Found:
    """Look at every chunk's header and put together what belongs together."""
    found = Found()
    rows: dict[tuple[int, bytes, str], dict[int, FoundChunk]] = {}
    for chunk in directory.found():
        try:
            claim = _read_claim(chunk, directory, found, chunk_bytes)
            row = rows.setdefault((claim.ordinal, claim.digest, claim.pool), {})
            if claim.shard in row:
                raise ProtocolError("there is another chunk for their place")
            row[claim.shard] = chunk
        except ProtocolError as reason:
            found.rejected[str(reason)] += 1
            directory.reject(chunk)
    for (_, digest, name), row in sorted(rows.items()):
        whole = [row[shard] for shard in sorted(row)]
        if len(row) < found.pools[digest, name].shards:
            found.rejected["those of other ranks are missing"] += len(row)
        elif not any(_committed(whole, found.pools[digest, name].host)):
            found.rejected["no page in them is complete"] += len(row)
        else:
            found.rows.append((digest, name, whole))
            continue
        for chunk in whole:
            directory.reject(chunk)
    return found


def _read_claim(
    chunk: FoundChunk, directory: PersistDirectory, found: Found, chunk_bytes: int
) -> Claim:
    """Check a chunk's header against its namespace's record and this version's layout.

    Raises: ProtocolError: why it cannot be taken over.
    """
    data = os.pread(chunk.fd, layout.CHUNK_HEADER.itemsize, 0)
    if len(data) < layout.CHUNK_HEADER.itemsize:
        raise ProtocolError("they are cut short")
    header = np.frombuffer(data, layout.CHUNK_HEADER)[0]
    if header["magic"] != layout.CHUNK_MAGIC:
        raise ProtocolError(NOT_IN_USE)
    if header["version"] != layout.CHUNK_VERSION:
        raise ProtocolError(f"they are of layout version {header['version']}, not of ours")
    digest = bytes(header["namespace"])
    if digest not in found.worlds:
        _read_record(directory.record(digest), digest, found, chunk_bytes)
    try:
        name = bytes(header["pool"]).decode()
    except UnicodeDecodeError:
        raise ProtocolError("their pool has no name") from None
    spec = found.pools.get((digest, name))
    if spec is None:
        raise ProtocolError("their namespace has no such pool")
    host = spec.host
    here = tuple(int(header[n]) for n in ("slots", "block_slots", "slot_bytes", "data_offset"))
    if here != (host.chunk_slots, host.block_slots, host.slot_bytes, host.data_offset):
        raise ProtocolError("their pages lie in another way than this version's")
    if chunk.size != host.chunk_bytes:
        raise ProtocolError("they are of another size than this version's")
    if header["world_size"] != spec.shards or header["shard"] >= spec.shards:
        raise ProtocolError("they are a shard that their namespace does not have")
    return Claim(digest, name, int(header["ordinal"]), int(header["shard"]))


def _read_record(data: bytes | None, digest: bytes, found: Found, chunk_bytes: int) -> None:
    """Note what a namespace is.

    Raises: ProtocolError: nobody knows, or its pages are not to be found again.
    """
    if data is None:
        raise ProtocolError(
            "nothing says of which namespace they are; those of an epoch of one engine alone end "
            "with the daemon"
        )
    record: NamespaceRecord = read_namespace_record(data, digest)
    if record.epoch:
        # Its engine may have gone meanwhile, and another one of that name begun to count anew.
        raise ProtocolError("those of an epoch of one engine alone end with the daemon")
    for name, (page_tokens, window, rows, replicated) in record.pools:
        host = host_layout([row_bytes for row_bytes, _ in rows], chunk_bytes=chunk_bytes)
        shards = 1 if replicated else record.world_size
        found.pools[digest, name] = PoolOnRecord(page_tokens, window, shards, host)
    found.worlds[digest] = record.world_size


def _committed(row: Sequence[FoundChunk], host: HostLayout) -> npt.NDArray[np.bool_]:
    """Which slots of a row hold a page, the same one in every shard. Shape: (slots,)."""
    return complete([_read_headers(chunk, host) for chunk in row])


def _read_headers(chunk: FoundChunk, host: HostLayout) -> Headers:
    data = os.pread(chunk.fd, host.chunk_slots * layout.SLOT_HEADER.itemsize, layout.PAGE)
    if len(data) < host.chunk_slots * layout.SLOT_HEADER.itemsize:
        return np.zeros(host.chunk_slots, layout.SLOT_HEADER)
    return np.frombuffer(data, layout.SLOT_HEADER)


def complete(shards: Sequence[Headers]) -> npt.NDArray[np.bool_]:
    """Which slots hold a page: COMMITTED in every shard, and the same in each. Shape: (slots,)."""
    first, *others = shards
    whole = first["state"] == layout.COMMITTED
    for other in others:
        for name in ("state", "generation", "key", "parent"):
            whole &= first[name] == other[name]
        control_flags = np.uint32(layout.PARENT_KNOWN | layout.HAS_PARENT)
        whole &= (first["flags"] ^ other["flags"]) & control_flags == 0
    return np.asarray(whole, np.bool_)


def _index(state: State, pool: PagePool, catalog: Catalog, rows: Iterable[Row], tick: int) -> int:
    """Put the pages of some rows into a pool's index; free the slots of all others.

    Returns how many there are.
    """
    slots: list[Slots] = []
    headers: list[Headers] = []
    stale: list[Slots] = []
    for row in rows:
        shards = state.room.rows.headers(row)
        first, _ = pool.slots.span(row.ordinal)
        whole = complete(shards)
        slots.append(np.flatnonzero(whole) + first)
        headers.append(shards[0][whole])
        used = np.any([shard["state"] != layout.FREE for shard in shards], axis=0)
        stale.append(np.flatnonzero(used & ~whole) + first)
    mine, record = np.concatenate(slots), np.concatenate(headers)
    if pool.window:
        chains = [other for other in catalog.pools.values() if not other.window]
        kept = np.array([all(c.find(k) is not None for c in chains) for k in _keys(record)], bool)
        stale.append(mine[~kept])
        mine, record = mine[kept], record[kept]
    flags = record["flags"]
    parents = [
        (parent if flag & layout.HAS_PARENT else b"") if flag & layout.PARENT_KNOWN else None
        for parent, flag in zip(_keys(record, "parent"), flags.tolist(), strict=True)
    ]
    return pool.recover(mine, _keys(record), parents, np.concatenate(stale), tick)


def _keys(record: Headers, name: str = "key") -> list[bytes]:
    blob = np.ascontiguousarray(record[name]).tobytes()
    return [blob[i : i + 32] for i in range(0, len(blob), 32)]


def _report(state: State, directory: PersistDirectory, pages: int, rejected: Counter[str]) -> None:
    if pages:
        log.info(
            "took over %d pages (%s of chunks) of %d namespaces from %s; they can be hit once an "
            "engine of theirs registers",
            pages,
            format_size(state.room.store.claimed_bytes),
            len(state.catalogs),
            directory.path,
        )
    unused = rejected.pop(NOT_IN_USE, 0)
    if unused:
        log.info("gave back %d chunks in %s that nobody had used", unused, directory.path)
    for reason, count in sorted(rejected.items()):
        log.warning("dropped %d chunks in %s: %s", count, directory.path, reason)
