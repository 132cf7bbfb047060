"""`tierd bench startup`: its flags, and what it prints."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tierd.bench import startup as bench
from tierd.cli.gpus import visible_gpus
from tierd.cli.options import JsonOption
from tierd.cli.status import fetch
from tierd.cli.tables import finished_rows, note_row, print_whole, progress_bar
from tierd.config import MAX_PIN_THREADS, resolve_devices
from tierd.memory.hugepages import CHOICES, GIB_1, MIB_2, reserved_pages
from tierd.memory.limits import parse_size
from tierd.wire.errors import ConfigError

EPILOG = """
Starts one daemon for each kind of pages and number of threads, waits until it is ready and until
all its memory is pinned, then kills it (SIGKILL) and waits until its processes and its memory are
gone. On the `host` backend memory is touched, not pinned.

Columns: seconds from the start until the ready line, until 1, 8, 64 GiB and until all is pinned;
the rate from the ready line on; then, from the kill on, the seconds until no process is left, and
until the kernel counts the memory as free (empty where it does not count shared memory, or others
took as much meanwhile).

Examples:

- `tierd bench startup`: every GPU together, or the host backend
- `tierd bench startup --memory 64GiB --threads 1,4 --hugepages off`
- `tierd bench startup --memory 32GiB --no-memory-check --json | jq '.[].rate_gibps'`
"""


def startup(
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Host memory of each daemon. Default: 16GiB; 1GiB on `host`."
        ),
    ] = None,
    threads: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Numbers of pinning threads to try, separated by commas."
        ),
    ] = "1,2,4,8",
    hugepages: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Kinds of pages to try, as in `tierd serve`. Default: off, and 2MiB and 1GiB "
            "where enough of them are reserved for all of the memory.",
        ),
    ] = None,
    devices: Annotated[str, typer.Option(metavar="LIST", help="As in `tierd serve`.")] = "all",
    memory_check: Annotated[
        bool,
        typer.Option(
            "--memory-check/--no-memory-check",
            help="As in `tierd serve`.",
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a daemon is ready and its memory pinned, and gone after a kill."""
    names = resolve_devices(devices, visible_gpus)
    on_host = names[0].startswith("host:")
    nbytes = parse_size(memory or ("1GiB" if on_host else "16GiB"))
    counts = [_threads(item) for item in threads.split(",")]
    kinds = _kinds(hugepages, nbytes)
    flags = ["--devices", f"host:{len(names)}" if on_host else ",".join(names)]
    flags += [] if memory_check else ["--no-memory-check"]
    found: list[bench.Start] = []
    with (
        finished_rows(lambda: _print(found, len(names), on_host, as_json)),
        tempfile.TemporaryDirectory(prefix="tierd-bench-") as name,
        progress_bar() as progress,
    ):
        socket = Path(name) / "tierd.sock"
        task = progress.add_task("", total=len(kinds) * len(counts))
        for kind in kinds:
            for count in counts:
                progress.update(task, description=f"hugepages {kind}, {count} threads")
                found.append(
                    bench.measure(
                        socket,
                        Path(name) / "daemon.log",
                        lambda: fetch(socket),
                        memory_bytes=nbytes,
                        hugepages=kind,
                        threads=count,
                        flags=flags,
                    )
                )
                progress.advance(task)
                if as_json:
                    note_row(dataclasses.asdict(found[-1]))


def _print(found: list[bench.Start], devices: int, on_host: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(start) for start in found], indent=2))
        return
    what = "host backend" if on_host else "GPU"
    print(f"{os.cpu_count()} cores; devices: {devices} ({what})")
    print_whole(bench.as_table(found))


def _threads(text: str) -> int:
    number = int(text) if text.strip().isdigit() else 0
    if not 1 <= number <= MAX_PIN_THREADS:
        raise ConfigError(f"--threads: `{text}`; give numbers from 1 to {MAX_PIN_THREADS}")
    return number


def _kinds(text: str | None, nbytes: int) -> list[str]:
    if text is None:
        reserved = reserved_pages()
        sizes = {"2MiB": MIB_2, "1GiB": GIB_1}
        fits = [k for k, n in sizes.items() if n in reserved and reserved[n].free * n >= nbytes]
        return ["off", *fits]
    kinds = [kind.strip() for kind in text.split(",")]
    for kind in kinds:
        if kind not in CHOICES:
            raise ConfigError(f"--hugepages: `{kind}`; choose of {', '.join(CHOICES)}")
    return kinds
