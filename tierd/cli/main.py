"""The `tierd` command: its subcommands, and what its exit status means."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperGroup

import tierd
from tierd.wire.errors import ConfigError, DaemonUnavailableError, TierdError

EXIT_FAILED, EXIT_USAGE, EXIT_NO_DAEMON = 1, 2, 3

EPILOG = """
Start here: `tierd demo` shows the whole system at work, then `tierd serve` runs the daemon and
`tierd status` looks at it.

Exit status: 0 done, 1 failed or refused, 2 bad usage or configuration, 3 no daemon answers; of
`tierd serve` also 4: told to stop, it could not finish everything that it had accepted.
"""

COMMANDS = {
    "demo": ("tierd.cli.demo", "demo", "EPILOG"),
    "serve": ("tierd.cli.serve", "serve", "EPILOG"),
    "status": ("tierd.cli.status", "status", "EPILOG"),
    "clear": ("tierd.cli.admin", "clear", None),
    "pause": ("tierd.cli.admin", "pause", "PAUSE_EPILOG"),
    "resume": ("tierd.cli.admin", "resume", "PAUSE_EPILOG"),
    "bench": ("tierd.cli.bench", "app", None),
}
"""In the order of the help: module, function or group of commands, and the end of its help."""


class Commands(TyperGroup):
    """Imports a command's module once it is asked for: none waits for what another one needs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # Of a name that is none, those there are may be suggested instead.
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                self.commands[name] = _load(name)
        return super().get_command(ctx, cmd_name)


def _group(**options: Any) -> typer.Typer:
    return typer.Typer(
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def _load(name: str) -> Any:
    place, what, epilog = COMMANDS[name]
    module = import_module(place)
    group = _group(callback=_global_options)
    if name == "bench":
        group.add_typer(getattr(module, what), name=name)
    else:
        group.command(name, epilog=epilog and getattr(module, epilog))(getattr(module, what))
    loaded: Any = typer.main.get_command(group)
    return loaded.commands[name]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierd {tierd.__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the subcommand."""


app = _group(
    name="tierd",
    cls=Commands,
    callback=_global_options,
    help="The host-memory tier of an LLM engine's KV cache, as a daemon of its own.",
    epilog=EPILOG,
    no_args_is_help=True,
)


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
