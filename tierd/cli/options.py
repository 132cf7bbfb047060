"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierd.meeting import check_socket, default_socket

SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="The daemon's socket. Default: tierd/tierd.sock in the user's runtime directory.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def socket_or_default(path: Path | None) -> Path:
    """Raises: ConfigError: a path that no socket can have."""
    return check_socket(path if path is not None else default_socket())
