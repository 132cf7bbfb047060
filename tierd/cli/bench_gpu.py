"""`tierd bench copy` and `tierd bench interference`: a real daemon's copies on a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import Progress

from tierd.bench import copy as copy_report
from tierd.bench import interference as interference_report
from tierd.bench import interference_plan
from tierd.bench.interference_plan import FULL, QUICK, Windows
from tierd.cli.demo_processes import RANKS_TIMEOUT_S, Line, running_daemon, running_group
from tierd.cli.gpus import visible_gpus
from tierd.cli.options import JsonOption
from tierd.cli.tables import finished_rows, note_row, print_whole, progress_bar
from tierd.wire.errors import ConfigError

COPY_EPILOG = """
A process with the KV of real models (no model behind it) backs up and restores pages through a
daemon of this command's own. First table: rates while the copier was at work, as fractions of one
contiguous copy between the device and pinned memory in the same run; to the host (D2H), to the
device (H2D), and both at once against both contiguous copies at once. "arena" has all layers of a
pool in one allocation, as tierd's plugin makes SGLang allocate them; "stock" has one a layer.
Second: what the engine's side sees, from offer to ack and from load to verdict. Third: when the
layers of a restore can be used; "ideal" is their bytes over the contiguous rate.

Needs about 70 GiB of free GPU memory (`--tokens` for less) and 40 GiB of host memory.

Examples:

- `tierd bench copy`: everything, in a few minutes
- `tierd bench copy --quick`: Qwen3-8B in pages of 64 tokens and of one
- `tierd bench copy --json | jq '.rates[] | select(.placement == "arena")'`
"""

INTERFERENCE_EPILOG = """
A loop of Qwen3-8B's matrix products (a CUDA graph, 36 layers, batch 64) runs back to back, in a
process that also holds KV and offers backups and starts restores between the steps, as an engine
does. "loop slower by" compares the mean step of a window with traffic with those of the windows
just before and after it: the median, then the least and the most. Rates are what the copiers moved.
The last columns are CPU time of the daemon's processes over the time.

Needs about 85 GiB of free GPU memory. Run it without MPS to see what time slices would cost.

Examples:

- `tierd bench interference`: 1.5 GB/s, 10 GB/s and flat out, in about four minutes
- `tierd bench interference --quick`: two kinds of pages at two rates, well within a minute
- `tierd bench interference --quick --json | jq '.rows[] | [.backup_gbps, .slowdown]'`
"""

LATE = 3
"""Times what it was expected to take: then it is given up."""

Device = Annotated[str, typer.Option(metavar="N", help="The GPU's number, as CUDA counts.")]


def copy(
    device: Annotated[
        str,
        typer.Option(
            metavar="N|host",
            help="The GPU's number, as CUDA counts; `host` runs a miniature of it in memory, "
            "whose rates say nothing about a link.",
        ),
    ] = "0",
    quick: Annotated[
        bool, typer.Option("--quick", help="One model, three kinds of pages.")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(min=2048, help="Token slots of each pool. Default: 448,000.")
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, max=100, help="Repeat each measurement so often; the best one counts."),
    ] = 2,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast pages are copied, against one contiguous copy of the same run."""
    options = ["--rounds", str(rounds), *(["--quick"] if quick else [])]
    options += ["--tokens", str(tokens)] if tokens else []
    result: dict[str, Any] = {"link": None, "rates": [], "layers": [], "left_out": []}
    with finished_rows(lambda: _print_copy(result, as_json)):
        memory = "3GiB" if device == "host" else "40GiB"
        _measure("copy", device, memory, options, RANKS_TIMEOUT_S, result, as_json)


def _print_copy(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    link = result["link"]
    if link is None:
        return
    print(copy_report.link_line(link, result["machine"]), *result["left_out"], "", sep="\n")
    print_whole(copy_report.rate_table(result["rates"], link))
    print()
    print_whole(copy_report.time_table(result["rates"]))
    print()
    print_whole(copy_report.layer_table(result["layers"], link))


def interference(
    device: Device = "0",
    quick: Annotated[bool, typer.Option("--quick", help="Two kinds of pages, two rates.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=60.0,
            help=f"Length of a window, in seconds. Default: {FULL.seconds}, with --quick "
            f"{QUICK.seconds}.",
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=100,
            help=f"Windows for each kind of traffic. Default: {FULL.count}, with --quick "
            f"{QUICK.count}.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what copies cost a decode-like loop on the same GPU."""
    usual = QUICK if quick else FULL
    plan = Windows(seconds or usual.seconds, windows or usual.count)
    expected_s = interference_plan.expected_s(interference_plan.traffics(quick), plan)
    print(f"takes about {expected_s:.0f} s", file=sys.stderr)
    options = ["--seconds", str(plan.seconds), "--windows", str(plan.count)]
    options += ["--quick"] if quick else []
    result: dict[str, Any] = {"rows": []}
    with finished_rows(lambda: _print_interference(result, as_json)):
        _measure("interference", device, "16GiB", options, LATE * expected_s, result, as_json)


def _print_interference(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    elif result["rows"]:
        print(interference_report.loop_line(result["rows"], result["machine"]), "", sep="\n")
        print_whole(interference_report.as_table(result["rows"]))


def _measure(
    what: Literal["copy", "interference"],
    device: str,
    memory: str,
    options: Sequence[str],
    timeout_s: float,
    result: dict[str, Any],
    as_json: bool,
) -> None:
    """Run a measurement of `tierd_client.bench` beside a daemon of its own.

    Args: `result`: gets what it says, as soon as it does. A list in it gets what comes one by one;
        `complete` is whether it came to its end.

    Raises: ConfigError: no torch here, or no such GPU.
    """
    result["complete"] = False
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("this needs torch: `pip install 'tierd[client,cuda]'`")
    serve = ["--memory", memory, "--no-memory-check", "--log-level", "warning"]
    if device == "host":
        serve += ["--devices", "host"]
    else:
        serve += ["--devices", _gpu(device)]
    with tempfile.TemporaryDirectory(prefix="tierd-bench-") as name, progress_bar() as progress:
        directory = Path(name)
        socket = directory / "tierd.sock"
        command = [sys.executable, "-m", f"tierd_client.bench.{what}", "--socket", str(socket)]
        command += ["--device", "cpu" if device == "host" else f"cuda:{device}", *options]
        take = _taker(progress, result, as_json)
        with (
            running_daemon(socket, serve, directory / "daemon.log"),
            running_group([command], [directory / f"{what}.log"], take, timeout_s),
        ):
            result["complete"] = True


def _gpu(number: str) -> str:
    """The UUID of a GPU that CUDA sees."""
    gpus = visible_gpus()
    if not gpus:
        raise ConfigError("this measures copies to and from a GPU, and CUDA sees none here")
    if not number.isdigit() or int(number) >= len(gpus):
        raise ConfigError(f"--device {number}: CUDA sees the GPUs 0 to {len(gpus) - 1}")
    return gpus[int(number)]


def _taker(progress: Progress, result: dict[str, Any], as_json: bool) -> Callable[[Line], None]:
    """Shows how far it is, and puts what has been measured where it belongs."""
    task = progress.add_task("starting", total=1.0)

    def take(line: Line) -> None:
        if "text" in line:
            progress.update(task, completed=line["done"], description=line["text"])
            return
        for name, value in line.items():
            if isinstance(result.get(name), list):
                result[name].append(value)
                if as_json:
                    note_row({name: value})
            else:
                result[name] = value

    return take
