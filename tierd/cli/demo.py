"""`tierd demo`: a daemon and a group of ranks as real processes, every restored byte checked."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tierd.cli.demo_processes import Line, running_daemon, running_group
from tierd.cli.demo_report import as_table, daemon_figures, failures, summarise
from tierd.cli.gpus import visible_gpus
from tierd.cli.options import JsonOption
from tierd.cli.status import fetch
from tierd.wire.errors import ConfigError

EPILOG = """
Examples:

- `tierd demo`: two ranks, on the GPUs if there are any, else on the CPU; under a minute
- `tierd demo --device host --ranks 1 --turns 200`
- `tierd demo --json | jq .bytes_wrong`
- `tierd demo --sglang`: SGLang's own radix tree drives the daemon, on the CPU

Exit status 1 if a byte is wrong, or if nothing was backed up, evicted or restored.
"""

MEMORY_PER_RANK = {"host": 128 << 20, "cuda": 12 << 30}
"""Less than the working sets of the ranks' presets."""


def demo(
    ranks: Annotated[
        int, typer.Option(min=1, max=8, help="How many rank processes the engine has.")
    ] = 2,
    turns: Annotated[
        int, typer.Option(min=8, help="How many turns of conversations to serve.")
    ] = 400,
    device: Annotated[
        Literal["auto", "host", "cuda"], typer.Option(help="Where the ranks' KV pages live.")
    ] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="The daemon's host memory. Default: 128MiB a rank, on CUDA 12GiB a rank.",
        ),
    ] = None,
    memory_check: Annotated[
        bool,
        typer.Option(help="Refuse --memory if it is more than what is free.", show_default=False),
    ] = True,
    arena: Annotated[
        bool, typer.Option("--arena", help="One allocation for all layers instead of one a layer.")
    ] = False,
    sglang: Annotated[
        bool, typer.Option("--sglang", help="Drive SGLang's real radix tree instead.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """See the whole system at work: a daemon, N rank processes, and conversations whose pages fit
    neither on the device nor in host memory.

    Pages are backed up, evicted at both levels, found again and restored; every restored byte is
    checked.
    """
    _require("torch", "`pip install 'tierd[client]'`")
    if sglang:
        _require(
            "sglang",
            "`pip install sglang==0.5.23` (on a CPU with --no-deps, after the packages in "
            "tests/sglang/requirements.txt)",
        )
        device, ranks = "host", 1
    kind, devices = _choose_devices(device, ranks)
    serve = ["--memory", memory or str(MEMORY_PER_RANK[kind] * ranks), "--devices", devices]
    serve += [] if memory_check else ["--no-memory-check"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierd-demo-") as name, _progress() as progress:
        directory = Path(name)
        socket = directory / "tierd.sock"
        with running_daemon(socket, serve, directory / "daemon.log"):
            if sglang:
                report = _run_sglang(socket, progress)
            else:
                report = _run_ranks(socket, kind, ranks, turns, arena, progress)
    report["device"] = kind
    report["seconds"] = round(time.monotonic() - started, 1)
    report["failures"] = failures(report)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        Console().print(as_table(report))
    raise typer.Exit(1 if report["failures"] else 0)


def _run_ranks(
    socket: Path, kind: str, ranks: int, turns: int, arena: bool, progress: Progress
) -> dict[str, Any]:
    task = progress.add_task("starting", total=turns)
    common = ["--socket", str(socket), "--instance", uuid.uuid4().hex, "--device", kind]
    common += ["--world-size", str(ranks), "--turns", str(turns)]
    common += ["--rendezvous", str(socket.parent / "rendezvous"), *(["--arena"] if arena else [])]
    rank = [sys.executable, "-m", "tierd_client.demo", *common, "--rank"]

    def on_progress(line: Line) -> None:
        text = f"{line['restored']:,} pages restored, {line['evicted']:,} evicted on the device"
        progress.update(task, completed=line["turns"], description=text)

    commands = [[*rank, str(number)] for number in range(ranks)]
    logs = [socket.parent / f"rank{number}.log" for number in range(ranks)]
    with running_group(commands, logs, on_progress) as results:
        return summarise(results, fetch(socket))


def _run_sglang(socket: Path, progress: Progress) -> dict[str, Any]:
    task = progress.add_task("starting", total=1.0)
    command = [sys.executable, "-m", "tierd_client.demo.sglang_tree", "--socket", str(socket)]

    def on_progress(line: Line) -> None:
        progress.update(task, completed=line["done"], description=line["text"])

    with running_group([command], [socket.parent / "sglang.log"], on_progress) as (result,):
        return {**daemon_figures(fetch(socket), 1), **result}


def _choose_devices(device: str, ranks: int) -> tuple[str, str]:
    """Where the ranks' pages live, and what the daemon's `--devices` must be for that."""
    gpus = visible_gpus() if device != "host" else []
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda: CUDA sees no GPU here; choose `--device host`")
    return ("cuda", "all") if gpus else ("host", f"host:{ranks}")


def _require(package: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"this demo needs {package}: {install}")


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress
