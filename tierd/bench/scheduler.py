"""The table of `tierd bench scheduler`: what each tier costs, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

TIERS = {"none": "L1 only", "noop": "no-op linker", "hicache": "HiCache", "tierd": "tierd"}
_PER_BATCH = {
    "finish, a request": "{n} finish: each",
    "finish, a request, no-op linker on tierd's tree": "{n} finish: each, with a no-op linker",
    "flush, a step": "{n} finish: flush",
    "flush, the linker's part": "{n} finish: flush, the linker's part",
    "flush, a step, CPU time": "{n} finish: flush, CPU time",
    "acks, a step": "{n} finish: acks",
    "all of it, a request": "{n} finish: all of it, a request",
}


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table that is Markdown as it stands.

    Args:
        rows: As `python -m tierd_client.bench.scheduler` gives them: `case`, `tier`, `metric`,
            `batch`, `p50_us`, `p99_us`. A tier without a row for a metric has nothing to measure.
    """
    cells: dict[tuple[str, str, int], dict[str, str]] = {}
    for row in rows:
        key = (row["case"], row["metric"], row["batch"])
        cells.setdefault(key, {})[row["tier"]] = f"{_us(row['p50_us'])} / {_us(row['p99_us'])}"
    table = Table(box=box.MARKDOWN)
    table.add_column("case", no_wrap=True)
    table.add_column("p50 / p99, us", no_wrap=True)
    for title in TIERS.values():
        table.add_column(title, justify="right", no_wrap=True)
    last = ""
    for key in sorted(cells, key=_order(cells)):
        case, metric, batch = key
        found = cells[key]
        name = "" if case == last else case
        table.add_row(name, _describe(metric, batch), *(found.get(tier, "") for tier in TIERS))
        last = case
    return table


def memory_line(memory: Mapping[str, int]) -> str:
    """What the client adds to the engine's process, in words."""
    mib = {name: value / 2**20 for name, value in memory.items()}
    return (
        f"tierd's client in the engine's process: {mib['private_bytes']:.1f} MiB of its own, "
        f"{mib['code_bytes']:.1f} MiB of libraries that nothing else there has mapped, and "
        f"{mib['segment_bytes']:.1f} MiB shared with the daemon, of which "
        f"{mib['ring_bytes']:.1f} MiB are rings for token slots"
    )


def load_line(load: Mapping[str, float]) -> str:
    """What "under load" was, in words."""
    return (
        f"Under load: another engine backed up {load['wanted_pages_per_s']:,.0f} one-token pages a "
        f"second, of which the tier kept {load['kept_pages_per_s']:,.0f}"
    )


def machine_line(machine: Mapping[str, Any]) -> str:
    """Where this ran, in words."""
    where = machine["gpu"] or "no GPU: a comparison on one machine, not a result"
    return (
        f"{machine['cpus']} cores, {where}; SGLang {machine['sglang']}, torch {machine['torch']}, "
        f"Python {machine['python']}"
    )


def _order(cells: Mapping[tuple[str, str, int], object]) -> Any:
    """Cases in the order in which they ran; in them, what depends on the step's requests first."""
    cases = {case: i for i, case in enumerate(dict.fromkeys(case for case, _, _ in cells))}
    metrics = {name: i for i, name in enumerate(_PER_BATCH)}

    def key(cell: tuple[str, str, int]) -> tuple[Any, ...]:
        case, metric, batch = cell
        if metric in metrics:
            return (cases[case], 0, metrics[metric], batch, "")
        return (cases[case], 1 if not batch else 2, 0, batch, metric)

    return key


def _describe(metric: str, batch: int) -> str:
    if metric in _PER_BATCH:
        return _PER_BATCH[metric].format(n=batch)
    return f"{metric}, {batch:,} pages" if batch else metric


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"
