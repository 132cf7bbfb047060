"""Fixtures of the tests that claim chunks of a machine (`machines.Machine`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from descriptors import open_descriptors, opened_since
from machines import CHUNK_FILE, Machine


@pytest.fixture
def no_chunk_stays_open() -> Iterator[None]:
    """Whoever uses this has closed every chunk in the end."""
    before = open_descriptors(CHUNK_FILE)
    yield
    assert opened_since(before, CHUNK_FILE) == []


@pytest.fixture
def machines(no_chunk_stays_open: None) -> Iterator[list[Machine]]:
    """Those that a test makes, to be closed behind it."""
    opened: list[Machine] = []
    yield opened
    for machine in opened:
        machine.close()
