"""`tierd bench plot`: a picture of what another measurement printed as JSON."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from tierd.bench.plots import documents
from tierd.bench.plots.picture import FORMS, Form
from tierd.wire.errors import ConfigError

EPILOG = """
Copies are measured on a machine with a GPU, and looked at elsewhere: this command needs nothing but
the JSON that `tierd bench copy`, `interference`, `startup` or `control` printed with `--json`, and
matplotlib (`pip install 'tierd[plot]'`). It finds out which of them it was, and draws also what one
that was cut off had measured by then.

- `copy`: rates by kind of pages, as fractions of the contiguous copy of the same run, and when the
  layers of a restore can be used, beside the ideal
- `interference`: how much slower the loop is, over what is copied
- `startup`: memory pinned over time, and how long it takes to be free after a kill
- `control`: pages taken in, what lookups wait meanwhile, and CPU

Where tierd promises something, that is in the picture too.

Examples:

- `tierd bench copy --json > copy.json`, then `tierd bench plot copy.json`: writes copy.svg
- `tierd bench plot interference.json -o slower.pdf`
- `tierd bench startup --json | tierd bench plot - -o startup.png`
"""


def plot(
    result: Annotated[
        str, typer.Argument(metavar="RESULT.json", help="What was printed; `-` reads stdin.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to, as .svg, .png or .pdf; a file there is replaced. Default: the result's "
            "name with .svg; of stdin, the command's, such as copy.svg.",
        ),
    ] = None,
) -> None:
    """Draw what another measurement printed with --json."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("this needs matplotlib: `pip install 'tierd[plot]'`")
    picture = documents.picture(_read(result), "stdin" if result == "-" else result)
    if output is None:
        output = Path(picture.command if result == "-" else result).with_suffix(".svg")
    form = _form(output)
    if result != "-" and output.resolve() == Path(result).resolve():
        raise ConfigError(f"{output} would be drawn over the result; name another with --output")
    # Only now: no other command waits for matplotlib, or needs it.
    from tierd.bench.plots.drawing import draw

    try:
        output.write_bytes(draw(picture, form))
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}") from None
    for note in picture.notes:
        print(note, file=sys.stderr)
    print(f"wrote {output}: {picture.title}")


def _read(result: str) -> bytes:
    if result == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(result).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {result}: {error.strerror}") from None


def _form(output: Path) -> Form:
    for form in FORMS:
        if output.suffix.lower() == f".{form}":
            return form
    raise ConfigError(f"--output {output}: give a name that ends in .svg, .png or .pdf")
