"""Fixtures of the tests against SGLang's own radix tree; skipped where SGLang is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sglang_harness import Daemon, write_model
from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_engine import TreeEngine
from tierd_client.sglang.tree_pools import EngineShape

DEFAULT_OPERATIONS = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-sglang",
        action="store_true",
        help="fail, rather than skip, where SGLang cannot be imported",
    )
    parser.addoption(
        "--operations",
        type=int,
        default=DEFAULT_OPERATIONS,
        help="random operations on each kind of engine",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is not None:
        return
    if config.getoption("--require-sglang", default=False):
        raise pytest.UsageError("SGLang is not installed; see tests/sglang/requirements.txt")
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed"))


@pytest.fixture
def operations(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--operations", default=DEFAULT_OPERATIONS))


@pytest.fixture
def tier() -> dict[str, Any]:
    """What a test's daemon has, if not what it usually has."""
    return {}


@pytest.fixture
def daemon(tmp_path: Path, tier: dict[str, Any]) -> Iterator[Daemon]:
    """A daemon that serves."""
    daemon = Daemon(tmp_path, **tier)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def open_engine(daemon: Daemon, model: Path) -> Iterator[Callable[..., TreeEngine]]:
    """Opens engines of one model in this process; closes them at the end."""
    load_sglang()
    from sglang.srt.server_args import ServerArgs

    with ExitStack() as stack:

        def open_one(**shape: Any) -> TreeEngine:
            server_args = ServerArgs(model_path=str(model))
            engine = TreeEngine(str(daemon.socket), EngineShape(**shape), server_args=server_args)
            return stack.enter_context(engine)

        yield open_one
