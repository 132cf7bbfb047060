"""Fixtures of the tests that talk to real daemons."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tier_harness import Daemon, Engine, running

# A runner in the background of a shell ignores Ctrl-C, and so would every process that a test
# starts: those are meant to be ended by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with one device."""
    with running(tmp_path / "one") as daemon:
        yield daemon


@pytest.fixture
def daemon2(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with two devices."""
    with running(tmp_path / "two", devices="host:2") as daemon:
        yield daemon


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    """Makes engines that are closed with the test."""
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> Engine:
            engine = Engine(*args, **options)
            stack.callback(engine.close)
            return engine

        yield make
