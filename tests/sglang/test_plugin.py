"""The plugin of one rank, in SGLang's own tree, registry and plugin loader."""

from __future__ import annotations

import inspect
import logging
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang_plugin
from sglang_harness import Daemon, prompt, until
from sglang_users import ENGINES, Users
from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.plugin import arena as plugin_arena
from tierd_client.sglang.plugin import install
from tierd_client.sglang.plugin import tree as plugin_tree
from tierd_client.sglang.tree_engine import TreeEngine

pytestmark = pytest.mark.sglang

Open = Callable[..., TreeEngine]
CORES = pytest.mark.parametrize("core", ["python", "rust"])
ALL = {plugin_tree.FLUSH, plugin_tree.REDUCTIONS, plugin_tree.RELEASE}
METHODS = [hook.target for hooks in plugin_tree.HOOKS.values() for hook in hooks]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all: every test has a model of its own."""
    daemon = Daemon(tmp_path_factory.mktemp("daemon"))
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process of SGLang's with tierd installed, before it has loaded its plugins."""
    load_sglang()
    from sglang.srt import plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target in [*METHODS, *(hook.target for hook in plugin_arena.HOOKS)]:
        monkeypatch.setattr(target, pkgutil.resolve_name(target))  # as it was, afterwards
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(plugin_tree, "_loaded", False)
    monkeypatch.syspath_prepend(sglang_plugin.install_metadata(tmp_path / "site-packages"))
    HookRegistry.reset()
    yield
    HookRegistry.reset()


@pytest.fixture
def plugin(process: None) -> None:
    """SGLang has loaded its plugins, tierd's among them."""
    sglang_plugin.load()


def active(engine: TreeEngine) -> set[str]:
    return set(engine.linker.plugin.features)


def keep(engine: TreeEngine, rid: str, tokens: list[int]) -> None:
    """Have a prompt in the tier, and nowhere else."""
    engine.serve(rid, tokens)
    engine.drain()
    engine.evict()


def leased(daemon: Daemon) -> int:
    return sum(pool["leased"] for pool in daemon.status()["pools"])


def test_importing_and_running_it_costs_a_process_nothing() -> None:
    check = (
        "import sys, tierd_client.sglang.plugin as plugin; plugin.install(); "
        "print({'torch', 'sglang', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_sglang_finds_it_and_an_engine_without_a_linker_stays_as_it_was(plugin: None) -> None:
    from sglang.srt.plugins import load_plugins_by_group

    assert load_plugins_by_group(sglang_plugin.GROUP)["tierd"] == (install, "tierd")
    for target in METHODS:
        method = pkgutil.resolve_name(target)
        assert inspect.unwrap(method) is method, target


@CORES
def test_a_linker_activates_it_and_says_so(
    plugin: None, open_engine: Open, core: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert active(open_engine(core=core)) == ALL
    assert "tierd plugin active: flush, reductions, release" in caplog.messages
    assert active(open_engine(core=core)) == ALL  # another engine in the same process


def test_one_that_is_filtered_out_leaves_the_linker_as_it_was(
    process: None, open_engine: Open, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another,and_another")
    sglang_plugin.load()
    with caplog.at_level(logging.INFO):
        engine = open_engine()
    assert active(engine) == set()
    assert "tierd plugin not active" in caplog.messages
    keep(engine, "a", prompt(1, 64))
    assert engine.serve("b", [*prompt(1, 64), 1]).loaded == 64


def test_a_rank_whose_plugin_the_others_lack_says_what_is_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        plugin_tree.ActivePlugin(("flush", "release"), frozenset({"flush"}), world_size=2)
        plugin_tree.ActivePlugin(("flush", "release"), frozenset(), world_size=2)
    assert caplog.messages == [
        "tierd plugin active: flush; another rank lacks release",
        "tierd plugin not active; another rank lacks flush, release",
    ]


@CORES
def test_what_a_step_has_offered_is_sent_when_it_ends(
    plugin: None, open_engine: Open, daemon: Daemon, core: str
) -> None:
    engine = open_engine(core=core)
    engine.serve("a", prompt(1, 64))
    before, _ = daemon.pages_copied
    engine.tree.flush_pending_backups()
    until(lambda: daemon.pages_copied[0] == before + 16, "copied, though no iteration has followed")
    engine.drain()
    assert engine.linker.stats.kept == 16
    assert engine.locked_tokens == 0


@CORES
def test_a_request_that_leaves_without_loading_lets_go_of_what_it_had_found(
    plugin: None, open_engine: Open, daemon: Daemon, core: str
) -> None:
    engine = open_engine(core=core)
    tokens = prompt(1, 64)
    keep(engine, "a", tokens)

    waiting = engine.match("waits", [*tokens, 1])
    assert waiting.host_hit_length == 64
    until(lambda: leased(daemon) == 16, "its lease is all there is")
    engine.tree.release_aborted_request(waiting.cache_request_handle)
    until(lambda: leased(daemon) == 0, "its lease has ended")


@CORES
def test_a_request_that_the_device_serves_by_now_lets_go_of_what_it_had_found(
    plugin: None, open_engine: Open, daemon: Daemon, core: str
) -> None:
    engine = open_engine(core=core)
    tokens = prompt(1, 64)
    keep(engine, "a", tokens)

    waiting = engine.match("waits", [*tokens, 1])
    assert engine.tree.linker.has_hit("waits")
    assert engine.serve("overtakes", [*tokens, 1, 2, 3, 4]).loaded == 64
    engine.drain()
    waiting.init_next_round_input(engine.tree)
    assert (waiting.prefix_len, waiting.host_hit_length) == (64, 0)
    assert not engine.tree.linker.has_hit("waits")
    until(lambda: leased(daemon) == 0, "both leases have ended")


def test_a_request_without_room_for_its_load_lets_go_of_what_it_had_found(
    plugin: None, open_engine: Open, daemon: Daemon
) -> None:
    engine = open_engine(pool_tokens=128)
    tokens = prompt(1, 64)
    keep(engine, "a", tokens)
    running = engine.prefill("runs", prompt(2, 100))  # 28 tokens are left, and locked the rest
    assert engine.admit("too long", [*tokens, 1]).loaded == 0
    until(lambda: leased(daemon) == 0, "its lease has ended")
    engine.finish(running)


@CORES
def test_users_do_anything_in_any_order(plugin: None, open_engine: Open, core: str) -> None:
    engine = open_engine(core=core, **ENGINES["narrow-window"])
    assert active(engine) == ALL
    users = Users(engine, seed=3)
    users.act(40)
    again = engine.serve("again", [*users.conversations[-1], 1])
    assert again.loaded > 0
    assert again.wrong == 0
    assert engine.linker.stats.restores_failed == 0
    assert not engine.tree.linker.hit_markers


@pytest.mark.parametrize(
    ("method", "feature"),
    [
        ("UnifiedRadixCache.flush_pending_backups", plugin_tree.FLUSH),
        ("UnifiedCacheLinkerWrapper.release_request", plugin_tree.RELEASE),
    ],
)
def test_a_method_that_has_changed_is_left_alone_and_said_once(
    process: None,
    open_engine: Open,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    feature: str,
) -> None:
    (target,) = (target for target in METHODS if target.endswith(method))
    original = pkgutil.resolve_name(target)

    def changed(self: Any, *arguments: Any, reason: str = "") -> None:
        original(self, *arguments)

    monkeypatch.setattr(target, changed)
    sglang_plugin.load()
    for _ in range(2):
        engine = open_engine()
        assert active(engine) == ALL - {feature}
        assert pkgutil.resolve_name(target) is changed
    assert sum(target in message for message in caplog.messages) == 1

    keep(engine, "a", prompt(1, 64))
    assert engine.serve("b", [*prompt(1, 64), 1]).loaded == 64


def test_a_method_that_is_gone_costs_its_feature_and_nothing_else(
    process: None, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target,) = (target for target in METHODS if target.endswith("release_request"))
    monkeypatch.delattr(target)
    sglang_plugin.load()
    assert active(open_engine()) == ALL - {plugin_tree.RELEASE}


def test_a_method_that_another_plugin_has_patched_already_is_left_to_it(
    process: None, open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    (target,) = (target for target in METHODS if target.endswith("check_hicache_events"))
    calls = []
    HookRegistry.register(target, lambda *_: calls.append(1), HookType.AFTER)
    sglang_plugin.load()
    engine = open_engine()
    assert active(engine) == ALL - {plugin_tree.REDUCTIONS}
    assert any("another plugin" in message and target in message for message in caplog.messages)
    engine.step()
    assert calls == [1]
