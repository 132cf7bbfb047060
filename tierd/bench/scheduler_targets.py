"""What tierd promises the scheduler's thread, beside what was measured of it and of HiCache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

FLUSH_US, FLUSH_KEY_US = 150.0, 0.15
"""A step's flush at p50: so much, and so much more a key."""
FINISH_US = 10.0
"""What a request's finish path may cost above a linker that does nothing, at p50, on one tree."""
BATCH = 64


class Target(NamedTuple):
    """One promise, in microseconds. `percentile`: p50_us or p99_us. `above`: it is meant on top of
    this metric of the no-op linker on tierd's tree."""

    metric: str
    words: str
    batch: int
    most_us: float
    percentile: str = "p50_us"
    above: str = ""


def targets(keys: int, pools: int) -> Iterator[Target]:
    """Those of one kind of engine and request.

    Args:
        keys: Of a step in which `BATCH` requests finish, in one pool.
        pools: That have a key for each page.
    """
    yield Target("offload", "`offload()`, a node", 0, 2.0)
    flush_us = FLUSH_US + FLUSH_KEY_US * keys * pools
    yield Target("flush, the linker's part", "flush of a step, one message", BATCH, flush_us)
    finish = "finish, a request"
    above = f"{finish}, no-op linker on tierd's tree"
    yield Target(finish, "finish path, a request", BATCH, FINISH_US, above=above)
    yield Target("no acks waiting", "no acks waiting", 0, 5.0)
    yield Target("lookup, miss", "lookup of 100 pages, first one absent", 100, 25.0)
    yield Target("lookup, hit again", "lookup of 100 pages, leased already", 100, 50.0)
    yield Target("lookup, first hit", "lookup of 100 pages, first hit", 100, 300.0)
    words = "lookup of 100 pages, first hit under load, p99"
    yield Target("lookup, first hit under load", words, 100, 1000.0, "p99_us")


def as_targets_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table that is Markdown as it stands: a line for each promise that was measured.

    Args: `rows`: as `tierd.bench.scheduler.as_table` takes them, with `keys` and `pools`.
    """
    table = Table(box=box.MARKDOWN)
    for title in ("case", "p50, us, of 64 that finish at once"):
        table.add_column(title, no_wrap=True)
    for title in ("target", "tierd", "no-op linker", "HiCache"):
        table.add_column(title, justify="right", no_wrap=True)
    found = {(row["case"], row["tier"], row["metric"], row["batch"]): row for row in rows}
    last = ""
    for case, (keys, pools) in {r["case"]: (r["keys"], r["pools"]) for r in rows}.items():
        for target in targets(keys, pools):
            values = {
                tier: found[case, tier, target.metric, target.batch][target.percentile]
                for tier in ("tierd", "noop", "hicache")
                if (case, tier, target.metric, target.batch) in found
            }
            if "tierd" not in values:
                continue
            most = target.most_us
            if target.above:
                values["noop"] = found[case, "tierd", target.above, target.batch][target.percentile]
                most += values["noop"]
            # HiCache has no linker: what it does at that point is the whole flush.
            if target.metric.startswith("flush"):
                row = found.get((case, "hicache", "flush, a step", target.batch))
                values |= {} if row is None else {"hicache": row[target.percentile]}
            name = "" if case == last else case
            last = case
            table.add_row(
                name,
                target.words,
                f"{most:,.0f}",
                f"{values['tierd']:,.1f}",
                *(f"{values[t]:,.1f}" if t in values else "" for t in ("noop", "hicache")),
            )
    return table
