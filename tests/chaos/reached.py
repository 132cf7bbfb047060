"""Which lines of tierd an input has reached."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tierd

PACKAGE = str(Path(tierd.__file__).parent)


class Coverage:
    """Which lines of tierd have run: an input that reaches a new one is worth keeping."""

    def __init__(self) -> None:
        self.lines: set[tuple[CodeType, int]] = set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[bool]]:
        """Yields a list that has an element once a new line has run."""
        news: list[bool] = []

        def line(frame: FrameType, event: str, _: Any) -> Any:
            here = (frame.f_code, frame.f_lineno)
            if here not in self.lines:
                self.lines.add(here)
                news.append(True)
            return line

        def call(frame: FrameType, event: str, _: Any) -> Any:
            return line if frame.f_code.co_filename.startswith(PACKAGE) else None

        before = sys.gettrace()
        sys.settrace(call)
        try:
            yield news
        finally:
            sys.settrace(before)
