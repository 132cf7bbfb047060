"""The status of a daemon as tables for a terminal. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tierd.memory.limits import format_size

NAME_CHARS = 16
"""Of engines and GPUs: so that a pool's line fits a terminal of 120 columns."""


def render_status(data: Mapping[str, Any]) -> RenderableType:
    """Tables for `tierd status`.

    Args:
        data: A daemon's status, as `tierd.control.status` documents it.
    """
    return Group(
        _headline(data),
        _pools(data["pools"]),
        _sessions(data["sessions"]),
        _copiers(data["copiers"]),
    )


def hit_rate(hits: int, misses: int) -> str:
    """The share of hits, such as "84.2%"; "-" where nothing was asked for."""
    return f"{hits / (hits + misses):.1%}" if hits + misses else "-"


def rate_gbps(nbytes: int, seconds: float) -> str:
    """GB = 1e9 bytes, as link rates are given."""
    return f"{nbytes / seconds / 1e9:.1f} GB/s" if seconds else "-"


def describe(detail: Mapping[str, Any]) -> str:
    """A copier's own words on one line: "gpu NVIDIA H200, gpu memory 524.0 MiB"."""
    return ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} "
        f"{format_size(value) if name.endswith('_bytes') else value}"
        for name, value in detail.items()
    )


def _headline(data: Mapping[str, Any]) -> RenderableType:
    memory, queue = data["memory"], data["queue"]
    text = Text()
    text.append(f"tierd {data['version']}", style="bold")
    text.append(f" on {data['socket']}, pid {data['pid']}, up {duration(data['uptime_s'])}")
    if data["paused"]:
        text.append("  PAUSED: lookups miss, backups are shed (`tierd resume`)", style="bold red")
    if data["draining"]:
        text.append("  ENDING: finishing what is under way, lookups miss", style="bold red")
    text.append(
        f"\nmemory  {format_size(memory['claimed_bytes'])} of "
        f"{format_size(memory['total_bytes'])} claimed by pools"
    )
    if memory["pin_ahead_bytes"]:
        text.append(f", {_pinned(memory)}")
    text.append(
        f"\nqueue   {queue['backups']} backups ({queue['backup_pages']} pages), "
        f"{queue['restores']} restores, oldest {queue['oldest_s']:.1f} s"
    )
    return text


def _pinned(memory: Mapping[str, Any]) -> str:
    """How far pinning ahead of use is: "pinned 12.0 GiB of 64.0 GiB (4.0 KiB pages; the kernel has
    joined 8.0 GiB to huge ones)"."""
    sizes = sorted(memory["by_page"].items(), key=lambda item: int(item[0]), reverse=True)
    pages = ", ".join(
        (f"{format_size(n)} in " if len(sizes) > 1 else "") + f"{format_size(int(page))} pages"
        for page, n in sizes
    )
    if memory["joined_bytes"]:
        pages += f"; the kernel has joined {format_size(memory['joined_bytes'])} to huge ones"
    done = memory["pinned_bytes"] >= memory["pin_ahead_bytes"]
    of = "" if done else f" of {format_size(memory['pin_ahead_bytes'])}"
    return f"pinned {format_size(memory['pinned_bytes'])}{of} ({pages})"


def _pools(pools: list[Mapping[str, Any]]) -> Table:
    table = _table(
        "Pools",
        ["pool", "namespace", "shards", "page"],
        ["slots used", "bytes", "leased", "evicted", "hit rate"],
        ["copy path"],
    )
    for pool in pools:
        table.add_row(
            pool["pool"],
            pool["namespace"],
            str(pool["shards"]),
            f"{pool['page_tokens']} tok, {format_size(pool['slot_bytes'])}",
            f"{pool['slots_used']:,} of {pool['slots_total']:,}",
            format_size(pool["bytes_used"]),
            *(f"{pool[name]:,}" for name in ("leased", "evictions")),
            hit_rate(pool["hits"], pool["misses"]),
            pool["copy_path"].partition(":")[0],
        )
    return table


def _sessions(sessions: list[Mapping[str, Any]]) -> Table:
    table = _table(
        "Engines",
        ["engine", "rank", "device", "namespace", "epoch", "software"],
        ["pid", "connected"],
    )
    for session in sessions:
        table.add_row(
            _short(session["instance"]),
            f"{session['rank']} of {session['world_size']}",
            _short(session["device"]),
            session["namespace"],
            session["epoch"] or "-",
            session["software"],
            str(session["pid"]),
            duration(session["connected_s"]),
        )
    return table


def _copiers(copiers: list[Mapping[str, Any]]) -> Table:
    table = _table(
        "Copiers",
        ["device", "state"],
        ["pid", "restarts", "backed up", "rate", "restored", "rate"],
        ["detail"],
    )
    for copier in copiers:
        table.add_row(
            _short(copier["device"]),
            _copier_state(copier),
            str(copier["pid"]),
            str(copier["restarts"]),
            format_size(copier["backup_bytes"]),
            rate_gbps(copier["backup_bytes"], copier["backup_seconds"]),
            format_size(copier["restore_bytes"]),
            rate_gbps(copier["restore_bytes"], copier["restore_seconds"]),
            describe(copier["detail"]),
        )
    return table


def _copier_state(copier: Mapping[str, Any]) -> Text:
    if copier["silent_s"]:
        return Text(
            f"not answering for {copier['silent_s']:.0f} s; killed and started again at "
            f"{copier['killed_at_s']:.0f} s",
            style="bold red",
        )
    styles = {"ready": "green", "starting": "yellow", "restarting": "red", "ending": "red"}
    return Text(copier["state"], style=styles.get(copier["state"], ""))


def _table(
    title: str, left: list[str], right: list[str], left_again: list[str] | None = None
) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold")
    for name in left_again or ():
        table.add_column(name, overflow="fold")
    return table


def _short(name: str) -> str:
    """The beginning of a UUID, which tells it from others here; `--json` has all of it."""
    return name if len(name) <= NAME_CHARS else f"{name[:NAME_CHARS]}\u2026"


def duration(seconds: float) -> str:
    """A duration for people: "12 s", "3 min", "5.0 h", "2.1 d"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
