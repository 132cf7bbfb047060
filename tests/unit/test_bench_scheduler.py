"""The table of `tierd bench scheduler`."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tierd.bench.scheduler import as_table, machine_line


def row(tier: str, metric: str, batch: int, p50_us: float, case: str = "FULL") -> dict[str, Any]:
    return {
        "case": case,
        "tier": tier,
        "metric": metric,
        "batch": batch,
        "p50_us": p50_us,
        "p99_us": 10 * p50_us,
    }


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
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
