"""The snapshot behind `tierd status --json`: plain data, built on request.

Counts are since the daemon started; names end in their unit (`_bytes`, `_s`, `_seconds`).

- `version`, `protocol`, `pid`, `socket`, `uptime_s`
- `paused`, `draining`: lookups miss and backups are shed, until `tierd resume` or for good
- `longest_turn_s`: the longest that control's loop has been busy at a stretch
- `memory`: `total_bytes` (the budget), `claimed_bytes` (by pools), `chunk_bytes` (the unit of
  claims), `pinned_bytes`, `pin_ahead_bytes` (what is to be pinned before it is needed), `by_page`
  (bytes that have been made, by the size of the memory pages that they were asked for in, in
  bytes), `joined_bytes` (of those in ordinary pages, what the kernel had joined to huge ones when
  copiers pinned it; 0 also before Linux 6.7, which cannot say)
- `pools`, an entry for each pool of each namespace: `namespace` (the first digits of its digest),
  `pool`, `shards`, `page_tokens`, `slot_bytes` (of a page, all shards), `slots_total`,
  `slots_used`, `bytes_total`, `bytes_used`, `pages` (that can be hit), `leased` (pages that must
  stay: an engine is about to load them, or does), `evictions`, `hits` and `misses` (pages that were
  asked for; what the presence table answers is not among them), `copy_path` (once a rank uses it)
- `queue`: `backups` and `backup_pages` on their way, `restores` under way, `oldest_s` (how long the
  oldest backup has waited for a decision)
- `sessions`, an entry for each rank: `instance` (the engine), `rank`, `world_size`, `pid` (in its
  own PID namespace), `device`, `namespace`, `epoch` (empty: shared with other engines),
  `connected_s`, `software`
- `copiers`, an entry for each device: `device`, `pid` (0: none right now), `state` (`starting`,
  `ready`, `ending`, `restarting`), `restarts`, `silent_s` (it does not answer, for so long; 0 if it
  does), `killed_at_s` (silent for so long, it is killed), `backup_pages`, `backup_bytes`,
  `backup_seconds` and the same of restores (bytes over seconds is the rate while it copied),
  `detail` (facts about the device)
- `counters`: `messages` (of the hot path), `backups_kept`, `backups_shed` (nodes), `lookups`,
  `lookup_hits`, `restores`, `restores_failed` (steps, a count for each rank), `pages_evicted`,
  `pages_healed`, `pages_corrupt` (found by `--verify`), `errors` (messages that made no sense)
- `shed`: of `backups_shed`, why: `paused` (or ending), `ranks` (one is missing, late, or reports
  other pages or none), `copier` (one does not answer, or has to pin memory again), `epoch` (their
  engine has moved on), `no_room`, `late_room` (it was not there in time), `repeated_key`; the rest
  are failed copies
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tierd import __version__
from tierd.control.catalog import Catalog
from tierd.control.copiers import Copier, Moved
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
    shed: dict[str, int],
) -> dict[str, Any]:
    """All of it, as this module's first docstring describes it.

    Args: `now`: control's monotonic clock, seconds.
    """
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
            "joined_bytes": stock.store.joined_bytes,
        },
        "pools": pools,
        "queue": _queue(groups, now),
        "sessions": [_session(session, now) for session in sessions],
        "copiers": [_copier(copier) for copier in copiers],
        "counters": {
            **counters,
            "pages_evicted": counters["pages_evicted"] + sum(p["evictions"] for p in pools),
        },
        "shed": shed,
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
        **_moved("backup", copier.backups),
        **_moved("restore", copier.restores),
        "detail": copier.detail,
    }


def _moved(kind: str, moved: Moved) -> dict[str, Any]:
    return {
        f"{kind}_pages": moved.pages,
        f"{kind}_bytes": moved.nbytes,
        f"{kind}_seconds": moved.seconds,
    }
