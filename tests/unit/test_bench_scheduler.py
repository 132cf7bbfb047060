"""The table of `tierd bench scheduler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from tierd.bench.scheduler import as_table, machine_line
from tierd.bench.scheduler_targets import as_targets_table


def row(tier: str, metric: str, batch: int, p50_us: float, case: str = "FULL") -> dict[str, Any]:
    return {
        "case": case,
        "keys": 1000,
        "pools": 1,
        "tier": tier,
        "metric": metric,
        "batch": batch,
        "p50_us": p50_us,
        "p99_us": 10 * p50_us,
    }


def lines(rows: list[dict[str, Any]], as_table: Callable[..., Table] = as_table) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as printed:
        console.print(as_table(rows))
    table = [line for line in printed.get().splitlines() if line.strip()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_tiers_stand_side_by_side_and_what_is_not_there_is_empty() -> None:
    rows = [
        row("tierd", "lookup, miss", 1000, 12.4),
        row("tierd", "finish, a request", 64, 150.0),
        row("none", "finish, a request", 64, 1.25),
        row("hicache", "finish, a request", 64, 1234.5),
    ]
    assert lines(rows) == [
        ["FULL", "64 finish: each", "1.2 / 12", "", "1,234 / 12,345", "150 / 1,500"],
        ["", "lookup, miss, 1,000 pages", "", "", "", "12 / 124"],
    ]


def test_cases_come_in_the_order_in_which_they_ran() -> None:
    rows = [
        row("none", metric, batch, 1.0, case)
        for case in ("second by name", "first by name")
        for metric, batch in (("no acks waiting", 0), ("acks, a step", 8), ("acks, a step", 1))
    ]
    assert [line[:2] for line in lines(rows)] == [
        ["second by name", "1 finish: acks"],
        ["", "8 finish: acks"],
        ["", "no acks waiting"],
        ["first by name", "1 finish: acks"],
        ["", "8 finish: acks"],
        ["", "no acks waiting"],
    ]


def test_a_run_without_a_gpu_says_what_it_is_not() -> None:
    machine = {"cpus": 2, "gpu": None, "sglang": "0.5.23", "torch": "2.13.0", "python": "3.11.7"}
    assert "no GPU: a comparison on one machine, not a result" in machine_line(machine)
    assert "NVIDIA H200" in machine_line({**machine, "gpu": "NVIDIA H200"})


def test_what_is_promised_stands_beside_what_was_measured() -> None:
    rows = [
        row("tierd", "offload", 0, 0.75),
        row("tierd", "flush, the linker's part", 64, 400.0),
        row("hicache", "flush, a step", 64, 3000.0),
        row("tierd", "finish, a request", 64, 150.0),
        row("noop", "finish, a request", 64, 115.0),
        row("tierd", "finish, a request, no-op linker on tierd's tree", 64, 145.0),
        row("hicache", "finish, a request", 64, 600.0),
        row("tierd", "lookup, first hit under load", 100, 70.0),
        row("none", "match, miss", 100, 20.0),
    ]
    assert [line[1:] for line in lines(rows, as_targets_table)] == [
        ["`offload()`, a node", "2", "0.8", "", ""],
        ["flush of a step, one message", "300", "400.0", "", "3,000.0"],
        ["finish path, a request", "155", "150.0", "145.0", "600.0"],
        ["lookup of 100 pages, first hit under load, p99", "1,000", "700.0", "", ""],
    ]
