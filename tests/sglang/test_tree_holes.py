"""A prefix that the tier evicted while the GPU held it: the tree never offers it again, and yet it
comes back once something is built on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from sglang_harness import Daemon, prompt
from tierd_client.sglang.tree_engine import TreeEngine

pytestmark = pytest.mark.sglang
Open = Callable[..., TreeEngine]


def evict_from_the_tier(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "tierd", "clear", "--socket", str(daemon.socket)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("core", ["python", "rust"])
def test_the_whole_prompt_comes_back(
    daemon: Daemon, open_engine: Open, core: str, page: int
) -> None:
    engine = open_engine(core=core, page_tokens=page)
    shared, longer = prompt(1, 64), [*prompt(1, 64), *prompt(2, 32)]
    engine.serve("first", shared)
    engine.drain()
    evict_from_the_tier(daemon)

    assert engine.serve("longer", longer).device_hit == 64
    engine.drain()
    assert daemon.status()["counters"]["pages_healed"] == 64 // page
    engine.evict()

    again = engine.serve("again", [*longer, 7])
    assert (again.device_hit, again.loaded, again.wrong) == (0, 96, 0)
    engine.drain()
    engine.tree.sanity_check()


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_prefix_of_several_nodes_comes_back(daemon: Daemon, open_engine: Open, core: str) -> None:
    engine = open_engine(core=core)
    turns = [prompt(seed, 32) for seed in range(4)]
    conversation: list[int] = []
    for turn, tokens in enumerate(turns[:3]):
        conversation = [*conversation, *tokens]
        engine.serve(f"turn {turn}", conversation)
        engine.serve(f"branch {turn}", [*conversation[:-12], *prompt(90 + turn, 12)])  # splits
        engine.drain()
    evict_from_the_tier(daemon)
    conversation = [*conversation, *turns[3]]
    engine.serve("last turn", conversation)
    engine.drain()
    engine.evict()

    again = engine.serve("again", [*conversation, 7])
    assert (again.loaded, again.wrong) == (128, 0)
    engine.drain()
    engine.tree.sanity_check()


def test_nothing_is_asked_or_sent_twice_while_nothing_is_missing(
    daemon: Daemon, open_engine: Open
) -> None:
    engine = open_engine(core="rust")
    conversation: list[int] = []
    for turn in range(4):
        conversation = [*conversation, *prompt(turn, 32)]
        engine.serve(f"turn {turn}", conversation)
        engine.drain()
    assert daemon.status()["counters"]["pages_healed"] == 0
    assert daemon.pages_copied[0] == 128 // 4
