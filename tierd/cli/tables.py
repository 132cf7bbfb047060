"""What the commands that measure share: tables printed whole, a bar while it takes, and a report
whatever ends it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tierd.cli.demo_processes import DemoFailedError


def print_whole(table: Table) -> None:
    """Print a table whole, however narrow the terminal is: it is there to be copied."""
    width = Console(width=1000).measure(table).maximum
    console = Console(width=width)
    with console.capture() as printed:
        console.print(table)
    print(*(line for line in printed.get().splitlines() if line.strip()), sep="\n")


def progress_bar() -> Progress:
    """On stderr, and gone afterwards."""
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextlib.contextmanager
def finished_rows(report: Callable[[], None]) -> Iterator[None]:
    """A measurement that takes a while: what has been measured is reported at its end, also when
    Ctrl-C, SIGTERM or a process that fails brings that about early. That then has its way."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except (KeyboardInterrupt, SystemExit, DemoFailedError):
        report()
        raise
    report()


def note_row(row: Mapping[str, Any]) -> None:
    """A row is finished: on stderr at once, for a program that waits for all of them."""
    print(json.dumps(row), file=sys.stderr, flush=True)
