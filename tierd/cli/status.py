"""`tierd status`: what a running daemon holds and does."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from tierd.cli.daemon import ask
from tierd.cli.options import JsonOption, SocketOption, socket_or_default
from tierd.cli.render import render_status
from tierd.wire.limits import PROTOCOL_VERSION
from tierd.wire.messages import Status, StatusRequest

EPILOG = """
Examples:

- `tierd status`
- `tierd status --watch`: again every second, Ctrl-C ends it
- `tierd status --json | jq '.pools[].slots_used'`
- `tierd status --json --watch`: one JSON object a line
"""


def status(
    socket: SocketOption = None,
    as_json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Pause between two looks of --watch.")
    ] = 1.0,
) -> None:
    """Show pools, engines, copiers and the queue of a running daemon."""
    path = socket_or_default(socket)
    if not watch:
        data = fetch(path)
        if as_json:
            typer.echo(json.dumps(data, indent=2))
        else:
            _print(render_status(data))
        return
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            while True:
                typer.echo(json.dumps(fetch(path)))
                time.sleep(interval)
        with Live(render_status(fetch(path)), auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(render_status(fetch(path)), refresh=True)


def _print(shown: RenderableType) -> None:
    """Print tables as wide as the terminal; whole, where it is none."""
    console = Console()
    if not console.is_terminal:
        width = Console(width=1000).measure(shown).maximum
        console = Console(width=max(width, console.width))
    console.print(shown)


def fetch(path: Path) -> dict[str, Any]:
    """The daemon's status; its shape is documented in `tierd.control.status`.

    Raises: as `tierd.cli.daemon.ask`.
    """
    return ask(path, StatusRequest(protocol=PROTOCOL_VERSION), Status).data
