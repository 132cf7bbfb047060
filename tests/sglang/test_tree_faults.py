"""SGLang's tree goes on when the daemon is late, dies, or breaks a restore."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang_harness import Daemon, prompt, until, write_model
from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_engine import TreeEngine
from tierd_client.sglang.tree_pools import EngineShape

pytestmark = pytest.mark.sglang
Open = Callable[..., TreeEngine]


def connected(engine: TreeEngine) -> Callable[[], bool]:
    def look() -> bool:
        engine.step()
        return engine.linker.client.connected

    return look


def test_an_engine_starts_without_a_daemon_and_uses_one_that_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_sglang()
    from sglang.srt.server_args import ServerArgs

    daemon = Daemon(tmp_path)
    server_args = ServerArgs(model_path=str(write_model(tmp_path / "model")))
    tokens = prompt(1, 64)
    with (
        caplog.at_level(logging.WARNING),
        TreeEngine(str(daemon.socket), EngineShape(core="rust"), server_args=server_args) as engine,
    ):
        for turn in range(20):
            assert engine.serve(f"early {turn}", tokens).loaded == 0
        engine.drain()
        assert engine.locked_tokens == 0
        assert engine.linker.stats.kept == 0
        assert sum("no tierd daemon" in record.message for record in caplog.records) == 1

        daemon.start()
        try:
            until(connected(engine), "connected to the daemon that came late")
            engine.evict()
            engine.serve("kept", tokens)
            engine.drain()
            assert engine.linker.stats.kept == 16
            engine.evict()
            again = engine.serve("again", [*tokens, 1])
            assert (again.loaded, again.wrong) == (64, 0)
        finally:
            daemon.stop()


def test_a_daemon_that_dies_locks_nothing_and_may_come_back(
    daemon: Daemon, open_engine: Open
) -> None:
    engine = open_engine()
    tokens = prompt(1, 128)
    engine.serve("before", tokens)
    engine.drain()

    engine.finish(engine.prefill("pending", prompt(2, 64)))
    daemon.kill()
    engine.drain()
    assert engine.locked_tokens == 0
    kept = engine.linker.stats.kept

    engine.evict()
    assert engine.serve("without", [*tokens, 1]).loaded == 0
    engine.drain()
    assert engine.linker.stats.kept == kept

    daemon.start()
    until(connected(engine), "connected to the new daemon")
    engine.evict()
    engine.serve("after", tokens)
    engine.drain()
    engine.evict()
    again = engine.serve("again", [*tokens, 1])
    assert (again.loaded, again.wrong) == (128, 0)
    engine.drain()


def test_a_restore_that_fails_aborts_its_request_and_leaks_nothing(
    daemon: Daemon, open_engine: Open
) -> None:
    engine = open_engine(core="rust")
    all_free = engine.free_tokens
    tokens = prompt(1, 128)
    engine.serve("first", tokens)
    engine.drain()
    engine.evict()

    engine.step()
    running = engine.admit("doomed", [*tokens, 1])
    assert running.loaded == 128
    daemon.kill()
    engine.forward(running)
    assert running.aborted
    engine.finish(running)
    engine.drain()
    engine.evict()
    assert engine.free_tokens == all_free
    assert engine.serve("recomputed", [*tokens, 1]).loaded == 0
    engine.drain()
    engine.tree.sanity_check()


def test_a_request_that_goes_away_before_its_load_starts_costs_nothing(
    daemon: Daemon, open_engine: Open
) -> None:
    engine = open_engine()
    tokens = prompt(1, 128)
    engine.serve("first", tokens)
    engine.drain()
    engine.evict()

    running = engine.admit("gone", [*tokens, 1])
    slots = engine.tree.prefix_device_indices(running.req)
    assert len(slots) == 128
    engine.tree.linker.release_request("gone")
    assert engine.tree.ready_to_load_host_cache() == -1
    engine.pools.allocator.free(slots)
    engine.tree.unlock(running.req.lock)
    assert engine.serve("stays", [*tokens, 1]).loaded == 128
    until(lambda: daemon.pages_copied[1] == 128 // 4, "they are loaded once")
    engine.drain()
