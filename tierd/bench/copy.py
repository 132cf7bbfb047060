"""The tables of `tierd bench copy`: each batch beside one contiguous copy of the same run, and a
restore's layers beside what the link allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

PLACEMENTS = ("arena", "stock")

Row = Mapping[str, Any]


def link_line(link: Mapping[str, float], machine: Mapping[str, Any]) -> str:
    """Where this ran, and what the fractions are of."""
    where = machine["gpu"] or "no GPU: copies in memory, not over a link"
    return (
        f"{where}, {machine['cpus']} cores, torch {machine['torch']}. One contiguous copy between "
        f"the device and pinned memory, GB/s: {link['to_host']:.1f} to the host, "
        f"{link['to_device']:.1f} to the device, {link['both']:.1f} both at once"
    )


def rate_table(rows: Sequence[Row], link: Mapping[str, float]) -> Table:
    """A table that is Markdown as it stands.

    Args:
        rows: As `python -m tierd_client.bench.copy` gives them in `rates`.
        link: Its `link`: GB/s of the contiguous copies.
    """
    table = Table(box=box.MARKDOWN)
    for name in ("model", "pages", "on the device"):
        table.add_column(name, no_wrap=True)
    table.add_column("batch", justify="right", no_wrap=True)
    for placement in PLACEMENTS:
        for name in ("D2H", "H2D", "both"):
            table.add_column(f"{placement} {name}", justify="right", no_wrap=True)
    by_batch: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["model"], row["page_tokens"], row["run"], row["pages"])
        by_batch.setdefault(key, {})[row["placement"]] = row
    last = ""
    for (model, page_tokens, run, pages), found in by_batch.items():
        size = f"{page_tokens} token" + "s" * (page_tokens > 1)
        where = "shuffled" if run == 1 else f"runs of {run}"
        cells = [
            f"{found[placement][name] / link[name]:.2f}" if placement in found else ""
            for placement in PLACEMENTS
            for name in ("to_host", "to_device", "both")
        ]
        table.add_row("" if model == last else model, size, where, f"{pages:,}", *cells)
        last = model
    return table


def time_table(rows: Sequence[Row]) -> Table:
    """How long a batch takes from the engine's side: from offer to ack, from load to verdict."""
    table = Table(box=box.MARKDOWN)
    for name in ("model", "pages", "on the device", "memory", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("batch", "MiB", "backup, ms", "restore, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['page_tokens']} tok",
            "shuffled" if row["run"] == 1 else f"runs of {row['run']}",
            row["placement"],
            row["path"],
            f"{row['pages']:,}",
            f"{row['nbytes'] / 2**20:,.0f}",
            f"{row['backup_s'] * 1e3:.2f}",
            f"{row['restore_s'] * 1e3:.2f}",
        )
    return table


def layer_table(rows: Sequence[Row], link: Mapping[str, float]) -> Table:
    """When a restore's layers can be used, beside its bytes over the contiguous rate."""
    table = Table(box=box.MARKDOWN)
    for name in ("model", "pages", "memory"):
        table.add_column(name, no_wrap=True)
    for name in (
        "restored",
        "first layers, ms",
        "ideal",
        "all layers, ms",
        "ideal",
        "verdict, ms",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        whole = row["nbytes"] / link["to_device"] / 1e9
        first = whole * row["first_group"] / len(row["landed_s"])
        table.add_row(
            row["model"],
            f"{row['page_tokens']} tok",
            row["placement"],
            f"{row['tokens']:,} tok",
            f"{row['first_group']}: {row['landed_s'][0] * 1e3:.2f}",
            f"{first * 1e3:.2f}",
            f"{row['landed_s'][-1] * 1e3:.2f}",
            f"{whole * 1e3:.2f}",
            f"{row['verdict_s'] * 1e3:.2f}",
        )
    return table
