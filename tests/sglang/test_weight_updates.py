"""KV of old weights is never served, whichever way the new ones come."""

from __future__ import annotations

import ast
import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_harness import Daemon, prompt
from tierd_client.sglang import weights
from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_engine import TreeEngine

from tierd.wire.errors import RefusedError

pytestmark = pytest.mark.sglang
Open = Callable[..., TreeEngine]


class Scheduler:
    """The part of SGLang's scheduler that its weight updater calls."""

    def __init__(self, engine: TreeEngine) -> None:
        self.engine = engine

    def record_weight_version_change(self, new_version: str | None) -> None:
        """SGLang's own does nothing but bookkeeping here."""

    def flush_cache(self, **_: Any) -> bool:
        self.engine.flush_cache()
        return True


def updater_of(engine: TreeEngine) -> Any:
    """SGLang's real weight updater, over a runner whose weights are the engine's version."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

    def load(*_: Any, **__: Any) -> tuple[bool, str]:
        engine.weights_version += 1
        return True, "loaded"

    runner = types.SimpleNamespace(
        weight_updater=types.SimpleNamespace(
            update_weights_from_disk=load, begin_weight_update=lambda: None
        )
    )
    scheduler = Scheduler(engine)
    updater = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    updater.tp_worker = types.SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
    updater.draft_worker = None
    updater.metrics_collector = None
    updater.scheduler = scheduler
    updater.flush_cache = scheduler.flush_cache
    updater._session = None
    return updater


def update_from_disk(engine: TreeEngine, *, flush_cache: bool) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path="/new", flush_cache=flush_cache)
    result = updater_of(engine).update_weights_from_disk(request)
    assert result.success, result.message


def test_an_update_without_a_flush_closes_the_tier_until_one(
    daemon: Daemon, open_engine: Open
) -> None:
    engine = open_engine(core="rust")
    tokens, other = prompt(1, 64), prompt(2, 64)
    engine.serve("old", tokens)
    engine.drain()
    running = engine.prefill("across", other)  # computed with the old weights
    engine.finish(engine.prefill("pending", prompt(3, 64)))

    update_from_disk(engine, flush_cache=False)
    engine.drain()
    assert engine.locked_tokens == 0  # what was pending has been reported as failed
    engine.finish(running)
    engine.drain()
    assert engine.locked_tokens == 0
    assert engine.linker.stats.kept == 16

    engine.evict()
    for rid, old in (("a", tokens), ("b", other), ("c", prompt(3, 64))):
        assert engine.serve(rid, [*old, 1]).loaded == 0
    engine.drain()
    engine.evict()
    assert engine.serve("still closed", [*tokens, 1]).loaded == 0
    engine.drain()

    engine.flush_cache()
    assert engine.serve("new", tokens).loaded == 0
    engine.drain()
    engine.evict()
    again = engine.serve("again", [*tokens, 1])
    assert (again.loaded, again.wrong) == (64, 0)
    engine.drain()


def test_an_update_with_a_flush_leaves_the_tier_open(daemon: Daemon, open_engine: Open) -> None:
    engine = open_engine()
    tokens = prompt(1, 64)
    engine.serve("old", tokens)
    engine.drain()

    update_from_disk(engine, flush_cache=True)
    assert engine.serve("new", tokens).loaded == 0
    engine.drain()
    engine.evict()
    again = engine.serve("again", [*tokens, 1])
    assert (again.loaded, again.wrong) == (64, 0)
    engine.drain()


def test_an_engine_that_updates_leaves_the_others_alone(daemon: Daemon, open_engine: Open) -> None:
    engine = open_engine()
    tokens = prompt(1, 64)
    engine.serve("old", tokens)
    engine.drain()
    update_from_disk(engine, flush_cache=True)
    engine.serve("new", tokens)
    engine.drain()
    engine.close()

    other = open_engine()  # the same model's files, so the old weights
    served = other.serve("other", [*tokens, 1])
    assert (served.loaded, served.wrong) == (64, 0)
    other.drain()


def test_weights_that_are_written_between_begin_and_end_are_noticed(
    daemon: Daemon, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

    engine = open_engine()
    tokens = prompt(1, 64)
    engine.serve("old", tokens)
    engine.drain()
    engine.evict()
    updater = updater_of(engine)
    updater.tp_cpu_group = None
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    assert updater.begin_weight_update(BeginWeightUpdateReqInput()).success
    engine.weights_version += 1
    assert engine.serve("new", [*tokens, 1]).loaded == 0
    engine.drain()


def test_an_engine_whose_weight_updates_cannot_be_watched_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_sglang()
    module = "sglang.srt.managers.scheduler_components.weight_updater"
    monkeypatch.setattr(
        weights, "DOORS", [(module, "SchedulerWeightUpdaterManager", "update_weights_by_post")]
    )
    with pytest.raises(RefusedError, match="weights_by_post, so tierd would not notice"):
        weights.watch(types.SimpleNamespace(weights_change=lambda: None))


def test_every_door_is_where_sglang_has_it() -> None:
    """The scheduler's module needs more packages than these tests have, so its source is read."""
    for module_name, class_name, method in weights.DOORS:
        spec = importlib.util.find_spec(module_name)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text())
        methods = {
            item.name
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name == class_name
            for item in node.body
            if isinstance(item, ast.FunctionDef)
        }
        assert method in methods, f"{class_name}.{method}"
