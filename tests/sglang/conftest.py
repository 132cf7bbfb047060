"""Fixtures of the tests against SGLang's own radix tree; skipped where SGLang is not installed."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-sglang",
        action="store_true",
        help="fail, rather than skip, where SGLang cannot be imported",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is not None:
        return
    if config.getoption("--require-sglang", default=False):
        raise pytest.UsageError("SGLang is not installed; see tests/sglang/requirements.txt")
    for item in items:
        if item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed"))
