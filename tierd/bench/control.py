"""`tierd bench control`: how many pages control takes in, what that costs, and what a lookup waits
meanwhile. One real daemon on the host backend for each number of ranks; its pages are tiny."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from tierd.bench.wire_rank import WireRank, WireRankError, connect
from tierd.wire.limits import KEY_BYTES

STEPS_A_SECOND = 20
WINDOW_PAGES = 1 << 16
"""Offered and not acked, where as much is offered as is taken."""
LOOKUP_PAGES = 512
LOOKUP_PAUSE_S = 0.002
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Status = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Load:
    """One measurement's work.

    `rate`: pages a second that each rank offers; 0: nothing is offered, None: as many as are taken.
    `item_pages`: of a backup. `full`: before it, the tier is filled. `lookups`: chains are looked
    up meanwhile.
    """

    name: str
    world_size: int
    rate: int | None
    item_pages: int
    full: bool = True
    lookups: bool = True


LOADS = [
    Load("idle", 1, 0, 1, full=False, lookups=False),
    Load("lookups alone", 1, 0, 1, full=False),
    Load("bursts", 1, 40_000, 8192),
    Load("turns", 1, 40_000, 64),
    Load("bursts", 1, None, 8192),
    Load("turns", 1, None, 64),
    Load("idle", 2, 0, 1, full=False, lookups=False),
    Load("bursts", 2, 40_000, 8192),
    Load("turns", 2, 40_000, 64),
    Load("bursts", 2, None, 8192),
]


@dataclass(frozen=True)
class Result:
    """What came of a load. `pages_s`: acked as kept, a rank. CPU in cores; of the copiers together.
    Lookups in microseconds, of a chain of LOOKUP_PAGES pages, asked by a process of its own."""

    load: Load
    pages_s: float
    evicted_s: float
    control_cores: float
    copier_cores: float
    wakeups_s: float
    lookups: int
    lookup_p50_us: float
    lookup_p99_us: float
    lookup_max_us: float


def measure(socket: Path, status: Status, load: Load, seconds: float) -> Result:
    """Put a load on a running daemon.

    Raises: WireRankError: the daemon refused or lost a rank.
    """
    ranks = connect(socket, f"load {time.monotonic_ns()}", load.world_size)
    try:
        if load.full:
            _offer(ranks, load.item_pages, None, lambda: _evictions(status()) > 0)
        if not load.lookups:
            before = _usage(status())
            time.sleep(seconds)
            return _result(load, before, _usage(status()), 0, [])
        with _asker(socket, load.world_size) as lookups:
            before = _usage(status())
            kept = ranks[0].kept
            until = time.monotonic() + seconds
            if load.rate == 0:
                time.sleep(seconds)
            else:
                _offer(ranks, load.item_pages, load.rate, lambda: time.monotonic() >= until)
            after = _usage(status())
            kept = ranks[0].kept - kept
        return _result(load, before, after, kept, lookups)
    finally:
        for rank in ranks:
            rank.close()


def as_table(results: Sequence[Result]) -> Table:
    """A table that is Markdown as it stands."""
    table = Table(box=box.MARKDOWN)
    table.add_column("load", no_wrap=True)
    for name in (
        "ranks",
        "pages a backup",
        "offered/s",
        "kept/s",
        "evicted/s",
        "control",
        "copiers",
        "wake-ups/s",
        "lookup p50",
        "p99",
        "max",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        load = result.load
        table.add_row(
            load.name,
            str(load.world_size),
            "" if load.rate == 0 else f"{load.item_pages:,}",
            "all it takes" if load.rate is None else f"{load.rate:,}",
            f"{result.pages_s:,.0f}",
            f"{result.evicted_s:,.0f}",
            f"{result.control_cores:.1%}",
            f"{result.copier_cores:.1%}",
            f"{result.wakeups_s:,.0f}",
            *(f"{us:,.0f} us" if load.lookups else "" for us in _latencies(result)),
        )
    return table


@dataclass(frozen=True)
class _Usage:
    """A daemon's counts at one moment. CPU in seconds."""

    at: float
    evictions: int
    control_s: float
    copiers_s: float
    wakeups: int


def _usage(status: Mapping[str, Any]) -> _Usage:
    copiers = [copier["pid"] for copier in status["copiers"]]
    return _Usage(
        at=time.monotonic(),
        evictions=_evictions(status),
        control_s=_cpu_s(status["pid"]),
        copiers_s=sum(map(_cpu_s, copiers)),
        wakeups=sum(map(_wakeups, [status["pid"], *copiers])),
    )


def _result(
    load: Load, before: _Usage, after: _Usage, kept: int, lookups: Sequence[float]
) -> Result:
    seconds = after.at - before.at
    us = np.array(lookups or [0.0]) * 1e6
    return Result(
        load=load,
        pages_s=kept / seconds,
        evicted_s=(after.evictions - before.evictions) / seconds,
        control_cores=(after.control_s - before.control_s) / seconds,
        copier_cores=(after.copiers_s - before.copiers_s) / seconds,
        wakeups_s=(after.wakeups - before.wakeups) / seconds,
        lookups=len(lookups),
        lookup_p50_us=float(np.percentile(us, 50)),
        lookup_p99_us=float(np.percentile(us, 99)),
        lookup_max_us=float(us.max()),
    )


def _latencies(result: Result) -> tuple[float, float, float]:
    return result.lookup_p50_us, result.lookup_p99_us, result.lookup_max_us


def _offer(
    ranks: Sequence[WireRank], item_pages: int, rate: int | None, done: Callable[[], bool]
) -> None:
    """Offer new chains on all ranks, step by step, until `done`; then wait for the acks."""
    step_pages = max(
        item_pages, (rate or WINDOW_PAGES) // STEPS_A_SECOND // item_pages * item_pages
    )
    started, offered = time.monotonic(), 0
    while not done():
        due_s = offered / rate - (time.monotonic() - started) if rate else 0.0
        full = max(rank.in_flight for rank in ranks) > WINDOW_PAGES
        if due_s > 0 or full:
            ranks[0].read(max(due_s, 0.001))
            for rank in ranks[1:]:
                rank.read(0.0)
            continue
        keys = os.urandom(step_pages * KEY_BYTES)
        for rank in ranks:
            rank.back_up(keys, item_pages)
        offered += step_pages
    for rank in ranks:
        while rank.in_flight:
            before = rank.in_flight
            rank.read(30.0)
            if rank.in_flight == before:
                raise WireRankError("the daemon does not ack any more")


@contextmanager
def _asker(socket: Path, world_size: int) -> Iterator[list[float]]:
    """Lookups from another process; their seconds are there once it has ended."""
    command = [sys.executable, "-m", "tierd.bench.wire_rank", str(socket), str(world_size)]
    command += [str(LOOKUP_PAGES), str(LOOKUP_PAUSE_S)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        took: list[float] = []
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise WireRankError("the process that looks up did not get ready")
            yield took
            said, _ = process.communicate("\n", 30.0)
            took += [float(line.split()[0]) for line in said.splitlines() if line.split()[1] != "0"]
        finally:
            process.kill()


def _evictions(status: Mapping[str, Any]) -> int:
    return int(status["counters"]["pages_evicted"])


def _cpu_s(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def _wakeups(pid: int) -> int:
    """How often the threads of a process have waited for something so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))
