"""`tierd bench soak`: its flags, and what it prints."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tierd.bench import soak as bench
from tierd.cli.demo_processes import Line, running_daemon, running_group
from tierd.cli.gpus import visible_gpus
from tierd.cli.options import JsonOption
from tierd.cli.status import fetch
from tierd.cli.tables import finished_rows, print_whole, progress_bar
from tierd.wire.errors import ConfigError

EPILOG = """
One engine backs up, looks up and restores as fast as it is served, in a tier that is too small for
it, and checks the pages that come back. Meanwhile the memory, descriptors and threads of every
process are looked at; the first third of the run, in which memory is claimed, is left out. What
grows has a slope that stays when the run gets longer; what only fills up has none in the last
third.

Examples:

- `tierd bench soak`: ten minutes, on a GPU if there is one
- `tierd bench soak --minutes 60 --json | jq '.trends[] | select(.per_hour > 1)'`
"""

MEMORY = "128MiB"
END_S = 120.0


def soak(
    minutes: Annotated[
        float, typer.Option(min=0.05, max=10_000, help="How long the engine is at work.")
    ] = 10.0,
    device: Annotated[
        Literal["auto", "host", "cuda"], typer.Option(help="Where the engine's pages lie.")
    ] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Work for minutes on end, and see whether anything grows."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("this needs torch: `pip install torch`")
    gpus = visible_gpus() if device != "host" else []
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda: CUDA sees no GPU here; choose `--device host`")
    serve = ["--memory", MEMORY, "--no-memory-check", "--devices", gpus[0] if gpus else "host"]
    serve += ["--log-level", "warning"]
    samples: list[bench.Sample] = []
    engine: dict[str, int] = {}
    where = gpus[0] if gpus else "host backend"
    started = time.monotonic()
    with (
        finished_rows(lambda: _print(samples, engine, where, as_json)),
        tempfile.TemporaryDirectory(prefix="tierd-bench-") as name,
        progress_bar() as progress,
    ):
        directory = Path(name)
        socket = directory / "tierd.sock"
        command = [sys.executable, "-m", "tierd_client.bench.soak", "--socket", str(socket)]
        command += ["--device", "cuda" if gpus else "cpu", "--minutes", str(minutes)]
        task = progress.add_task("starting", total=1.0)

        def on_progress(line: Line) -> None:
            said = f"{line['backups']:,} backups, {line['lookups']:,} lookups"
            progress.update(task, completed=line["done"], description=said)
            values = _look(fetch(socket), line["pid"], line["gpu_bytes"])
            at_s = time.monotonic() - started
            samples.append(bench.Sample(at_s, line["backups"], line["lookups"], values))

        with (
            running_daemon(socket, serve, directory / "daemon.log"),
            running_group(
                [command], [directory / "engine.log"], on_progress, minutes * 60 + END_S
            ) as (result,),
        ):
            engine |= result


def _print(samples: list[bench.Sample], engine: dict[str, int], where: str, as_json: bool) -> None:
    """Args: `engine`: what it says at its end; empty if it was cut off."""
    found: list[bench.Trend] = []
    try:
        found = bench.trends(samples)
    except ValueError as error:
        print(error, file=sys.stderr)
    if as_json:
        rows = [dataclasses.asdict(trend) for trend in found]
        typer.echo(json.dumps({"engine": engine, "trends": rows}, indent=2))
        return
    minutes = samples[-1].at_s / 60 if samples else 0.0
    counts = [f"{value:,} {what}" for what, value in engine.items()] or ["cut off"]
    print(f"{os.cpu_count()} cores; {where}; {minutes:.1f} minutes: {', '.join(counts)}")
    print_whole(bench.as_table(found))


def _look(status: dict[str, Any], engine: int, gpu_bytes: int) -> dict[tuple[str, str], float]:
    """Every process of the daemon, the engine, and what they share."""
    pids = {"control": status["pid"], "engine": engine}
    pids |= {f"copier {c['device']}": c["pid"] for c in status["copiers"] if c["pid"]}
    values = {(who, what): v for who, pid in pids.items() for what, v in bench.look(pid).items()}
    values["together", "host memory"] = status["memory"]["claimed_bytes"]
    values["together", "files in /dev/shm"] = len(os.listdir("/dev/shm"))
    if gpu_bytes:
        values["together", "GPU memory"] = gpu_bytes
    return values
