"""The `tierd` command: its subcommands, and what its exit status means."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import tierd
from tierd.cli import admin, bench, demo, serve, status
from tierd.wire.errors import ConfigError, DaemonUnavailableError, TierdError

EXIT_FAILED, EXIT_USAGE, EXIT_NO_DAEMON = 1, 2, 3

EPILOG = """
Start here: `tierd demo` shows the whole system at work, then `tierd serve` runs the daemon and
`tierd status` looks at it.

Exit status: 0 done, 1 failed or refused, 2 bad usage or configuration, 3 no daemon answers.
"""

app = typer.Typer(
    name="tierd",
    help="The host-memory tier of an LLM engine's KV cache, as a daemon of its own.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=demo.EPILOG)(demo.demo)
app.command(epilog=serve.EPILOG)(serve.serve)
app.command(epilog=status.EPILOG)(status.status)
app.command()(admin.clear)
app.command(epilog=admin.PAUSE_EPILOG)(admin.pause)
app.command(epilog=admin.PAUSE_EPILOG)(admin.resume)
app.add_typer(bench.app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierd {tierd.__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Options before the subcommand."""


def main() -> None:
    """The console script. Errors that tierd raises on purpose become one line on stderr."""
    try:
        app()
    except ConfigError as error:
        sys.exit(_report(error, EXIT_USAGE))
    except DaemonUnavailableError as error:
        sys.exit(_report(error, EXIT_NO_DAEMON))
    except TierdError as error:
        sys.exit(_report(error, EXIT_FAILED))


def _report(error: TierdError, status: int) -> int:
    print(f"tierd: {error}", file=sys.stderr)
    return status
