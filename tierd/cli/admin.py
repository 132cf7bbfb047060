"""`tierd clear`, `tierd pause` and `tierd resume`: orders to a running daemon."""

from __future__ import annotations

import json

import typer

from tierd.cli.daemon import CLEAR_TIMEOUT_S, REPLY_TIMEOUT_S, ask
from tierd.cli.options import JsonOption, SocketOption, socket_or_default
from tierd.cli.status import fetch
from tierd.wire.limits import PROTOCOL_VERSION
from tierd.wire.messages import ClearRequest, Done, FromLifeline, PauseRequest

PAUSE_EPILOG = """
Examples:

- `tierd pause`: no engine needs a restart, each goes on without a host tier
- `tierd status`: says PAUSED
- `tierd resume`: the cached pages are still there
"""


def clear(socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Drop every cached page that no engine is loading right now. Engines serve on and miss."""
    # A daemon that does not answer at all is found out at once; one at work is given time.
    fetch(socket_or_default(socket))
    request = ClearRequest(protocol=PROTOCOL_VERSION)
    _order(request, socket, as_json, "cleared {pages:,} pages", CLEAR_TIMEOUT_S)


def pause(socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """The kill switch: lookups miss and backups are shed until `tierd resume`. Engines serve on
    as if there were no host tier; cached pages stay."""
    request = PauseRequest(protocol=PROTOCOL_VERSION, paused=True)
    _order(request, socket, as_json, "paused: lookups miss and backups are shed")


def resume(socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Take lookups and backups again, after `tierd pause`."""
    request = PauseRequest(protocol=PROTOCOL_VERSION, paused=False)
    _order(request, socket, as_json, "resumed")


def _order(
    request: FromLifeline,
    socket: SocketOption,
    as_json: bool,
    done: str,
    timeout_s: float = REPLY_TIMEOUT_S,
) -> None:
    """Args: `done`: what to say then, with the reply's counts by name."""
    detail = ask(socket_or_default(socket), request, Done, timeout_s).detail
    typer.echo(json.dumps(detail) if as_json else done.format(**detail))
