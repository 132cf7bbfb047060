"""The plugin between the ranks of one engine: fewer collectives, and never other ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_harness import Daemon, EngineProcess, both, engine_processes, prompt
from sglang_plugin import install_metadata
from tierd_client.sglang.plugin.cadence import DRAIN_EVERY

pytestmark = pytest.mark.sglang

PAGES = 16


def group(tmp_path: Path, with_plugin: tuple[bool, bool]) -> list[list[str]]:
    installed = ["--plugin", str(install_metadata(tmp_path / "site-packages"))]
    return [
        [
            *("--core", "rust", "--shape", json.dumps({"pool_tokens": 1024})),
            *("--group", str(tmp_path / "rendezvous"), str(rank), "2", *extra),
        ]
        for rank, extra in enumerate(installed if has_it else [] for has_it in with_plugin)
    ]


def offer(ranks: list[EngineProcess], seeds: range) -> None:
    for seed in seeds:
        both(ranks, "serve", rid=f"request {seed}", tokens=prompt(seed, 4 * PAGES))


def restored(ranks: list[EngineProcess], seed: int) -> int:
    served = both(ranks, "serve", rid=f"again {seed}", tokens=[*prompt(seed, 4 * PAGES), 1])
    assert served["wrong"] == 0
    return int(served["loaded"])


def results(settled: dict[str, Any]) -> list[bool]:
    return [kept for look in settled["looks"] for kept in look]


def test_ranks_that_have_it_reduce_when_something_is_pending_and_then_seldom(
    daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    with engine_processes(daemon, model, group(tmp_path, (True, True))) as ranks:
        assert [rank.answer() for rank in ranks] == ["ready"] * 2
        assert both(ranks, "features") == ["flush", "reductions", "release"]
        assert both(ranks, "iterate", iterations=100) == 0

        daemon.freeze()  # no ack comes
        offer(ranks, range(3))
        assert both(ranks, "iterate", iterations=10 * DRAIN_EVERY) == 10
        daemon.thaw()
        settled = both(ranks, "settle")
        assert len(settled["nodes"]) == 3
        assert results(settled) == [True] * 3
        assert both(ranks, "state")["locked"] == 0
        both(ranks, "evict")
        assert restored(ranks, 0) == 4 * PAGES
        both(ranks, "drain")
        assert both(ranks, "iterate", iterations=100) == 0

        state = both(ranks, "act", seed=1, operations=40)
        assert (state["locked"], state["unaccounted"]) == (0, 0)

        # Each rank finds out by itself, and not at the same time, that the daemon is gone.
        daemon.freeze()
        offer(ranks, range(10, 14))
        daemon.kill()
        assert results(both(ranks, "settle")) == [False] * 4
        assert both(ranks, "state")["locked"] == 0
        assert both(ranks, "iterate", iterations=100) == 0


def test_one_rank_without_it_and_nobody_uses_it(
    daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    with engine_processes(daemon, model, group(tmp_path, (True, False))) as ranks:
        assert [rank.answer() for rank in ranks] == ["ready"] * 2
        assert both(ranks, "features") == []
        assert both(ranks, "iterate", iterations=20) == 20

        daemon.freeze()
        offer(ranks, range(3))
        assert both(ranks, "iterate", iterations=20) == 20
        daemon.thaw()
        assert results(both(ranks, "settle")) == [True] * 3
        both(ranks, "evict")
        assert restored(ranks, 0) == 4 * PAGES
        both(ranks, "drain")
        assert both(ranks, "state")["locked"] == 0
