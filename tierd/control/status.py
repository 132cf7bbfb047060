"""The snapshot behind `tierd status`: plain data, built on request.

Shape (all counts since the daemon started): `version`, `protocol`, `pid`, `socket`, `uptime_s`,
`paused`, `draining`, `longest_turn_s` (of the loop); `memory` (bytes: total, claimed by pools, of a
chunk, pinned, to be pinned ahead of use, and `by_page`, what has been made by the size of its
memory pages); `pools`, one entry a pool of a namespace; `queue`; `sessions`, one a rank; `copiers`,
one a device; `counters`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tierd import __version__
from tierd.control.catalog import Catalog
from tierd.control.copiers import Copier
from tierd.control.groups import Group, Session
from tierd.control.stock import Stock
from tierd.wire import limits


def snapshot(
    *,
    socket: str,
    uptime_s: float,
    paused: bool,
    draining: bool,
    longest_turn_s: float,
    now: float,
    stock: Stock,
    catalogs: Iterable[Catalog],
    groups: Iterable[Group],
    copiers: Iterable[Copier],
    counters: Counter[str],
) -> dict[str, Any]:
    groups = list(groups)
    sessions = [session for group in groups for session in group.sessions.values()]
    pools = [entry for catalog in catalogs for entry in _pools(catalog, sessions)]
    return {
        "version": __version__,
        "protocol": limits.PROTOCOL_VERSION,
        "pid": os.getpid(),
        "socket": socket,
        "uptime_s": uptime_s,
        "paused": paused,
        "draining": draining,
        "longest_turn_s": longest_turn_s,
        "memory": {
            "total_bytes": stock.store.budget_bytes,
            "claimed_bytes": stock.store.claimed_bytes,
            "chunk_bytes": stock.store.chunk_bytes,
            "pinned_bytes": stock.pinned_bytes,
            "pin_ahead_bytes": stock.ahead_bytes,
            "by_page": {str(page): n for page, n in stock.store.bytes_by_page.items() if n},
        },
        "pools": pools,
        "queue": _queue(groups, now),
        "sessions": [_session(session, now) for session in sessions],
        "copiers": [_copier(copier) for copier in copiers],
        "counters": {
            **counters,
            "pages_evicted": counters["pages_evicted"] + sum(p["evictions"] for p in pools),
        },
    }


def _pools(catalog: Catalog, sessions: list[Session]) -> Iterable[dict[str, Any]]:
    paths: dict[str, set[str]] = {}
    for session in sessions:
        if catalog in session.group.catalogs.values():
            for spec, path in zip(session.info.pools, session.paths, strict=False):
                paths.setdefault(spec.name, set()).add(path)
    for pool in catalog.pools.values():
        slot_bytes = pool.host.slot_bytes * pool.shards
        used = pool.capacity - pool.free_slots
        yield {
            "namespace": catalog.digest.hex()[:12],
            "pool": pool.name,
            "shards": pool.shards,
            "page_tokens": pool.page_tokens,
            "slot_bytes": slot_bytes,
            "slots_total": pool.capacity,
            "slots_used": used,
            "bytes_total": pool.capacity * slot_bytes,
            "bytes_used": used * slot_bytes,
            "pages": pool.pages,
            "leased": pool.held,
            "evictions": pool.evictions,
            "hits": pool.hits,
            "misses": pool.misses,
            "copy_path": ", ".join(sorted(paths.get(pool.name, ()))),
        }


def _queue(groups: list[Group], now: float) -> dict[str, Any]:
    waiting = [group.sequencer for group in groups if group.sequencer]
    deciding = [group.backups for group in groups if group.backups]
    return {
        "backups": sum(g.undecided for g in groups) + sum(len(b) for b in deciding),
        "backup_pages": sum(b.pages_in_flight for b in deciding),
        "restores": sum(group.leases.restoring for group in groups),
        "oldest_s": max((s.oldest_s(now) for s in waiting), default=0.0),
    }


def _session(session: Session, now: float) -> dict[str, Any]:
    info = session.info
    return {
        "instance": info.instance,
        "rank": info.rank,
        "world_size": info.world_size,
        "pid": info.pid,
        "device": session.copier.device,
        "namespace": session.group.digest(session.epoch).hex()[:12],
        "epoch": session.epoch,
        "connected_s": now - session.since,
        "software": info.software,
    }


def _copier(copier: Copier) -> dict[str, Any]:
    return {
        "device": copier.device,
        "pid": copier.pid,
        "state": copier.state.value,
        "restarts": copier.restarts,
        "silent_s": copier.pulse.silent_s if copier.pulse.quiet else 0.0,
        "killed_at_s": copier.killed_at_s,
        **vars(copier.totals),
        "detail": copier.detail,
    }
