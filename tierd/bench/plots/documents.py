"""Finds out which measurement a JSON document is of, and what is to be drawn of it."""

from __future__ import annotations

from typing import Any

import msgspec

from tierd.bench.control import Result as ControlResult
from tierd.bench.plots import control, copy, interference, startup
from tierd.bench.plots.picture import Picture
from tierd.bench.plots.results import NothingMeasuredError
from tierd.wire.errors import ConfigError

COMMANDS = ("copy", "interference", "startup", "control")
_WANTED = f"give it what `tierd bench {'|'.join(COMMANDS)} --json` printed on stdout"


def picture(text: bytes, name: str) -> Picture:
    """What is to be drawn.

    Args:
        text: What a command printed.
        name: What errors call it.

    Raises:
        ConfigError: It is no JSON, or of no measurement that has a picture.
        NothingMeasuredError: A measurement that was cut off before its first row.
    """
    if not text.strip():
        raise ConfigError(f"{name} is empty; {_WANTED}")
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is not JSON ({error}); {_WANTED}") from None
    try:
        return _picture(document, name)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{name} is not as a measurement prints it ({error}); {_WANTED}"
        ) from None


def _picture(document: Any, name: str) -> Picture:
    match document:
        case {"rates": _, "layers": _}:
            return copy.picture(msgspec.convert(document, copy.Result))
        case {"rows": [] | [{"slowdown": _}, *_]}:
            return interference.picture(msgspec.convert(document, interference.Result))
        case [{"pinned_s": _}, *_]:
            return startup.picture(msgspec.convert(document, list[startup.Start], str_keys=True))
        case [{"load": _}, *_]:
            return control.picture(msgspec.convert(document, list[ControlResult]))
        case []:
            raise NothingMeasuredError("startup` or `tierd bench control")
    raise ConfigError(f"{name} is of no measurement that has a picture; {_WANTED}")
