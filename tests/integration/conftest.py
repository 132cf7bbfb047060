"""Fixtures of the tests that talk to real daemons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tier_harness import Daemon, Engine, running


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
