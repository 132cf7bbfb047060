"""What others write is a message that makes sense or an error that says what does not."""

from __future__ import annotations

import pytest
from fuzz import fuzz
from fuzz_targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_messages_that_almost_make_sense(name: str, seed: int) -> None:
    _, few, _ = TARGETS[name]
    fuzz(name, few, seed, report=False)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", TARGETS)
def test_many_messages_that_almost_make_sense(name: str, seed: int, messages: int) -> None:
    fuzz(name, messages, seed, report=True)
