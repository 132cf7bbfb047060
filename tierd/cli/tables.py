"""What the commands that measure share: tables printed whole, and a bar while it takes."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


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
