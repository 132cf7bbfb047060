"""`tierd bench`: measurements. `eviction` replays traces, `scheduler` drives SGLang's own tree,
`startup` starts daemons and kills them, `control` loads one, `soak` works for minutes on end,
those of copies are in `bench_gpu`, and `plot` draws what they found."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.table import Table

from tierd.bench import scheduler as scheduler_report
from tierd.bench import scheduler_targets
from tierd.bench.replay import TIERS, Row, Size, rows
from tierd.bench.traces import read_trace
from tierd.bench.workloads import KINDS
from tierd.cli import bench_gpu
from tierd.cli.bench_control import EPILOG as CONTROL_EPILOG
from tierd.cli.bench_control import control
from tierd.cli.bench_plot import EPILOG as PLOT_EPILOG
from tierd.cli.bench_plot import plot
from tierd.cli.bench_soak import EPILOG as SOAK_EPILOG
from tierd.cli.bench_soak import soak
from tierd.cli.bench_startup import EPILOG as STARTUP_EPILOG
from tierd.cli.bench_startup import startup
from tierd.cli.demo_processes import Line, running_daemon, running_group
from tierd.cli.gpus import visible_gpus
from tierd.cli.options import JsonOption
from tierd.cli.tables import print_whole, progress_bar
from tierd.wire.errors import ConfigError

EPILOG = """
Examples:

- `tierd bench eviction`: three generated workloads, four sizes, behind no GPU cache and a small one
- `tierd bench eviction --trace conversation_trace.jsonl --page-tokens 512`: a trace of your own
- `tierd bench scheduler --quick`: what each tier costs SGLang's scheduler thread
- `tierd bench startup`: how fast memory is pinned, and free again after a kill
- `tierd bench control`: pages a second, and what a lookup waits meanwhile
- `tierd bench copy`, `tierd bench interference`: what the copies reach, and what they cost a GPU
- `tierd bench soak --minutes 60`: whether anything grows while it works
- `tierd bench plot copy.json`: a picture of what one of them printed with `--json`
"""

EVICTION_EPILOG = """
Columns: the GPU cache in front of the tier (in pages, and the share of all tokens that it hits);
the tier's pages; then which part of the tokens that missed the GPU each policy restores.
`chain-reuse` and `chain-lru` are tierd's, in the index that the daemon uses; `page-lru` is least
recently used without chains; `sglang` keeps what HiCache of SGLang 0.5.23 would; `bound` is
Belady's: with the future known, no policy restores more.

Examples:

- `tierd bench eviction`: all generated workloads, in less than a minute
- `tierd bench eviction --kind scan --sizes 5%,20000 --device-pages 0,10%`
- `tierd bench eviction --trace trace.jsonl.gz --json | jq '.[].hit_rates'`

A trace has one JSON object a line: {"hash_ids": [7, 8, 9]}, the blocks of a request's prompt in
order; a "timestamp" orders the requests. The public Mooncake traces are in this format.
"""

SCHEDULER_EPILOG = """
SGLang's own radix tree (0.5.23) serves the same requests with no host tier, with a linker that
keeps nothing, with HiCache writing through, and with a daemon, in turns in one process. All times
are of the scheduler's thread, in microseconds, p50 and p99.

Rows: "each", one request's way into the tree when its step ends; "flush", what hands the step's
nodes to the tier, and how long the thread itself ran meanwhile; "acks", reading and releasing all
of them; then what all of that comes to for each request, idle iterations, and matches of prompts
that are in the tier or nowhere ("lookup" is the linker's part of the match, "again" one that is
leased already, "under load" one while another engine backs up).

Examples:

- `tierd bench scheduler`: on a GPU if there is one, else on the CPU
- `tierd bench scheduler --quick --json | jq '.rows[] | select(.tier == "tierd")'`
"""

SCHEDULER_SERVE = {
    "host": ["--devices", "host:1", "--pool", "kv=0.2%", "--pool", "swa=0.2%"],
    "cuda": ["--pool", "kv=25%", "--pool", "swa=25%"],
}
"""Flags of the daemon. The pages get a small part of its memory, so that it evicts, as the others
do."""

app = typer.Typer(
    help="Measure what a tier costs, and what it keeps.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.command(epilog=bench_gpu.COPY_EPILOG)(bench_gpu.copy)
app.command(epilog=bench_gpu.INTERFERENCE_EPILOG)(bench_gpu.interference)
app.command(epilog=STARTUP_EPILOG)(startup)
app.command(epilog=SOAK_EPILOG)(soak)
app.command(epilog=CONTROL_EPILOG)(control)
app.command(epilog=PLOT_EPILOG)(plot)


@app.command(epilog=EVICTION_EPILOG)
def eviction(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replay this JSONL file (.gz too), not a workload."),
    ] = None,
    kind: Annotated[
        Literal["chat", "agents", "scan", "all"], typer.Option(help="Which generated workload.")
    ] = "all",
    sizes: Annotated[
        str, typer.Option(help="Sizes of the tier: pages, or shares of a trace's different pages.")
    ] = "5%,10%,20%,50%",
    device_pages: Annotated[
        str, typer.Option(help="Sizes of the GPU's prefix cache in front of it, likewise.")
    ] = "0,2%",
    requests: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="How many requests a generated workload has.")
    ] = 1500,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated workload.")] = 1,
    page_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a block in the trace file.")
    ] = 512,
    as_json: JsonOption = False,
) -> None:
    """Replay access traces against eviction policies at several sizes; prints token hit rates."""
    tier_sizes = parse_sizes("--sizes", sizes, least=1)
    gpu_sizes = parse_sizes("--device-pages", device_pages, least=0)
    if trace is not None:
        traces = [read_trace(trace, page_tokens)]
    else:
        kinds = list(KINDS) if kind == "all" else [kind]
        traces = [KINDS[name](requests, seed) for name in kinds]
    replays = len(traces) * len(gpu_sizes) * len(tier_sizes) * (len(TIERS) + 1)
    found: list[Row] = []
    with progress_bar() as progress:
        task = progress.add_task("", total=replays)
        for one in traces:
            progress.update(task, description=f"{one.name}: {len(one.requests):,} requests")
            found += rows(one, gpu_sizes, tier_sizes, lambda: progress.advance(task))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in found], indent=2))
    else:
        print_whole(as_table(found))


@app.command(epilog=SCHEDULER_EPILOG)
def scheduler(
    device: Annotated[
        Literal["auto", "host", "cuda"], typer.Option(help="Where SGLang's KV pools lie.")
    ] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Full attention only, and one size of requests.")
    ] = False,
    core: Annotated[
        Literal["rust", "python", "both"],
        typer.Option(help="SGLang's tree core; by itself it takes the Rust one."),
    ] = "both",
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="How often every tier has its turn in each case.")
    ] = 2,
    as_json: JsonOption = False,
) -> None:
    """Measure what a host tier costs SGLang's scheduler thread: tierd, HiCache, none."""
    for package in ("torch", "sglang"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"this needs {package}: `pip install sglang==0.5.23` (on a CPU with --no-deps, "
                "after the packages in tests/sglang/requirements.txt)"
            )
    gpus = visible_gpus() if device != "host" else []
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda: CUDA sees no GPU here; choose `--device host`")
    kind = "cuda" if gpus else "host"
    serve = ["--memory", "64GiB", "--no-memory-check", *SCHEDULER_SERVE[kind]]
    serve += ["--devices", gpus[0]] if gpus else []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as name, progress_bar() as progress:
        directory = Path(name)
        socket = directory / "tierd.sock"
        command = [sys.executable, "-m", "tierd_client.bench.scheduler", "--socket", str(socket)]
        command += ["--device", "cuda" if gpus else "cpu", *(["--quick"] if quick else [])]
        command += ["--rounds", str(rounds), *(["--core", core] if core != "both" else [])]
        task = progress.add_task("starting", total=1.0)

        def on_progress(line: Line) -> None:
            progress.update(task, completed=line["done"], description=line["text"])

        with (
            running_daemon(socket, serve, directory / "daemon.log"),
            running_group([command], [directory / "sglang.log"], on_progress) as (result,),
        ):
            pass
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    print(scheduler_report.machine_line(result["machine"]))
    for line in result["left_out"]:
        print(line)
    print_whole(scheduler_report.as_table(result["rows"]))
    print_whole(scheduler_targets.as_targets_table(result["rows"]))
    print(scheduler_report.load_line(result["load"]))
    print(scheduler_report.memory_line(result["client_memory"]))


def parse_sizes(flag: str, text: str, least: int) -> list[Size]:
    """Read "5%,10%,20000".

    Raises: ConfigError: an item is neither a number of pages nor a share up to 100%.
    """
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", item)
        share = float(match[1]) / 100 if match and match[2] else 0.0
        whole = match is not None and (bool(match[2]) or match[1].isdigit())
        if match is None or not whole or share > 1 or (float(match[1]) < least and not share):
            raise ConfigError(
                f"{flag}: `{item}` is no size; give pages or a share of a trace's pages, "
                "separated by commas, such as 5%,20000"
            )
        found.append(Size(share=share) if share else Size(pages=int(float(match[1]))))
    return found


def as_table(found: Sequence[Row]) -> Table:
    """A table that is Markdown as it stands."""
    table = Table(box=box.MARKDOWN)
    table.add_column("trace", no_wrap=True)
    for name in ("GPU pages", "GPU hits", "tier pages", *TIERS, "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found:
        best = max(row.hit_rates.values())
        table.add_row(
            row.trace,
            f"{row.gpu_pages:,}",
            f"{row.gpu_hit_rate:.1%}",
            f"{row.pages:,} ({row.pages / row.trace_pages:.0%})",
            *(_rate(rate, rate == best) for rate in row.hit_rates.values()),
            f"{row.bound:.2%}",
        )
    return table


def _rate(rate: float, best: bool) -> str:
    return f"[bold]{rate:.2%}[/bold]" if best else f"{rate:.2%}"
