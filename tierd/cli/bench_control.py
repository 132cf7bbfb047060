"""`tierd bench control`: its flags, and what it prints."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tierd.bench import control as bench
from tierd.cli.demo_processes import running_daemon
from tierd.cli.options import JsonOption
from tierd.cli.status import fetch
from tierd.cli.tables import finished_rows, note_row, print_whole, progress_bar

EPILOG = """
A real daemon on the host backend, without a GPU: pages of one token and 1 KiB, so that the
bookkeeping is what counts. Ranks offer new chains on a full tier, so that every page that comes
makes another one go, in backups as a prefill makes them ("bursts") or as the turns of
conversations do ("turns"). Meanwhile another process looks a chain of 512 pages up, 500 times a
second at most.

Columns: pages that each rank offers, and that are kept of them; pages that go; CPU of control and
of all copiers, in cores; how often their threads wake up; and what a lookup takes, the whole way
there and back.

Examples:

- `tierd bench control`: one rank and two, about a minute
- `tierd bench control --ranks 1 --seconds 2 --json | jq '.[].lookup_p99_us'`
"""


def control(
    seconds: Annotated[
        float, typer.Option(min=0.2, max=600, help="How long each load lasts, in seconds.")
    ] = 5.0,
    ranks: Annotated[
        int, typer.Option(min=0, max=2, help="Only engines of so many ranks; 0: one, then two.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure how many pages control takes in, what it costs, and what a lookup waits."""
    loads = [load for load in bench.LOADS if ranks in (0, load.world_size)]
    found: list[bench.Result] = []
    with (
        finished_rows(lambda: _print(found, seconds, as_json)),
        tempfile.TemporaryDirectory(prefix="tierd-bench-") as name,
        progress_bar() as progress,
    ):
        socket = Path(name) / "tierd.sock"
        task = progress.add_task("", total=len(loads))
        for world_size, group in itertools.groupby(loads, lambda load: load.world_size):
            flags = ["--devices", f"host:{world_size}", "--memory", f"{world_size * 64}MiB"]
            flags += ["--no-memory-check"]
            with running_daemon(socket, flags, Path(name) / "daemon.log"):
                for load in group:
                    progress.update(task, description=f"{load.name}, {world_size} ranks")
                    found.append(bench.measure(socket, lambda: fetch(socket), load, seconds))
                    progress.advance(task)
                    if as_json:
                        note_row(dataclasses.asdict(found[-1]))


def _print(found: list[bench.Result], seconds: float, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(result) for result in found], indent=2))
        return
    print(f"{os.cpu_count()} cores; {seconds:g} s each")
    print_whole(bench.as_table(found))
