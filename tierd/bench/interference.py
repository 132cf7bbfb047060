"""The table of `tierd bench interference`: what traffic costs a decode-like loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table


def loop_line(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]) -> str:
    """Where this ran, and the loop's step without traffic."""
    quiet = sorted(row["step_ms"] for row in rows)
    return (
        f"{machine['gpu']}, {machine['cpus']} cores, torch {machine['torch']}; a step of the loop "
        f"alone takes {quiet[0]:.3f} to {quiet[-1]:.3f} ms"
    )


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table that is Markdown as it stands.

    Args:
        rows: As `python -m tierd_client.bench.interference` gives them.
    """
    table = Table(box=box.MARKDOWN)
    for name in ("memory", "path", "pages", "traffic"):
        table.add_column(name, no_wrap=True)
    for name in (
        "wanted",
        "D2H, GB/s",
        "H2D, GB/s",
        "loop slower by",
        "from - to",
        "control, cores",
        "copier, cores",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        run = "" if row["run"] == 1 else f" in runs of {row['run']}"
        ways = [name for name in ("backups", "restores") if row[name]]
        slowdowns = row["slowdowns"]
        table.add_row(
            row["placement"],
            row["path"],
            f"{row['page_tokens']} tok{run}",
            " + ".join(ways),
            "flat out" if row["wanted_gbps"] is None else f"{row['wanted_gbps']:g} GB/s each",
            f"{row['backup_gbps']:.1f}" if row["backups"] else "",
            f"{row['restore_gbps']:.1f}" if row["restores"] else "",
            f"{row['slowdown']:.1%}",
            f"{min(slowdowns):.1%} - {max(slowdowns):.1%}",
            f"{row['control_cores']:.2f}",
            f"{row['copier_cores']:.2f}",
        )
    return table
