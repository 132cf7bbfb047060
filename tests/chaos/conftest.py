"""Options and paths of the tests that break things on purpose."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

# The daemons and small engines of the integration tests, here and in every process started.
HARNESS = str(Path(__file__).parents[1] / "integration")
for folder in (HARNESS, str(Path(__file__).parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), HARNESS, os.environ.get("PYTHONPATH", "")]
)

# A runner in the background of a shell ignores Ctrl-C, and so would every process that a test
# starts: those are meant to be ended by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--cycles", type=int, default=100, help="faults of a long run, each world size")
    group.addoption("--messages", type=int, default=1_000_000, help="messages of a long fuzz run")
    group.addoption("--chaos-seed", type=int, default=1, help="another seed, other moments")
    group.addoption("--chaos-device", default="host", help="where pages lie: host, or cuda:0")


@pytest.fixture
def cycles(request: pytest.FixtureRequest) -> int:
    return _option(request, "--cycles", 100)


@pytest.fixture
def messages(request: pytest.FixtureRequest) -> int:
    return _option(request, "--messages", 1_000_000)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return _option(request, "--chaos-seed", 1)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return _option(request, "--chaos-device", "host")


def _option(request: pytest.FixtureRequest, name: str, default: T) -> T:
    """An option of ours, also where this file was loaded too late to declare it."""
    value: T = request.config.getoption(name, default=default)
    return value
