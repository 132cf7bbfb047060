"""What the tier costs SGLang's scheduler thread, counted: messages, torch operations, threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from sglang_harness import DEADLINE_S, Daemon, prompt, until
from sglang_users import ENGINES, LARGE
from tierd_client.bench.scheduler_tree import SchedulerTree, TierName
from tierd_client.device import FEW_TENSORS
from tierd_client.sglang.tree_engine import TreeEngine
from tierd_client.sglang.tree_pools import EngineShape
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.sglang

PAGE = 4
Open = Callable[..., AbstractContextManager[SchedulerTree]]


class CountTorch(TorchDispatchMode):  # type: ignore[misc]
    """Counts the torch operations that run while it is open."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=["python", "rust"])
def open_tree(daemon: Daemon, request: pytest.FixtureRequest) -> Open:
    """Opens a tree with some tier, on either of SGLang's tree cores."""

    @contextmanager
    def open_one(tier: TierName = "tierd", **shape: Any) -> Iterator[SchedulerTree]:
        sizes = {"page_tokens": PAGE, "pool_tokens": 1024, "requests": 64, "core": request.param}
        shape = {**sizes, **shape}
        opened = SchedulerTree(tier, EngineShape(**shape), str(daemon.socket), DEADLINE_S)
        with opened as tree, tree.settings():
            if tier == "tierd":
                assert tree.linker.client.connect(DEADLINE_S)
            tree.tree.check_hicache_events()  # the linker meets the tree
            yield tree

    return open_one


def running(tree: SchedulerTree, seeds: range, tokens: int = 4 * PAGE) -> list[Any]:
    """Requests with prompts of their own, admitted and computed."""
    requests = []
    for seed in seeds:
        request = tree.new_request(f"r{seed}", prompt(seed, tokens))
        assert tree.match(request) == 0
        tree.admit(request)
        requests.append(request)
    return requests


def keep(tree: SchedulerTree, seed: int, tokens: int) -> None:
    """Have a prompt in the tier, and nowhere else."""
    (request,) = running(tree, range(seed, seed + 1), tokens)
    tree.finish(request)
    tree.submit()
    tree.drain()
    tree.evict_all()


class Messages:
    """Counts the messages that the daemon has had from an engine."""

    def __init__(self, daemon: Daemon, tree: SchedulerTree) -> None:
        self._daemon = daemon
        self._tree = tree
        self._asked = 0
        keep(tree, 9999, PAGE)

    def count(self) -> int:
        """All that were sent before this call, without those of calls like this one."""
        self._asked += 1
        # Its answer comes after everything before it has been received.
        asking = self._tree.new_request(f"count{self._asked}", [*prompt(9999, PAGE), 0])
        assert self._tree.match(asking) == PAGE
        return int(self._daemon.status()["counters"]["messages"]) - self._asked


@pytest.mark.parametrize("nodes", [1, 8, 48])
def test_a_step_is_one_message_however_many_requests_finish(
    daemon: Daemon, open_tree: Open, nodes: int
) -> None:
    with open_tree() as tree:
        messages = Messages(daemon, tree)
        requests = running(tree, range(nodes))
        before = messages.count()
        for request in requests:
            tree.finish(request)
        assert messages.count() == before
        tree.submit()
        assert messages.count() == before + 1
        tree.drain()
        assert tree.linker.stats.kept == 1 + 4 * nodes
        assert messages.count() == before + 1


def test_an_idle_step_sends_nothing(daemon: Daemon, open_tree: Open) -> None:
    with open_tree() as tree:
        messages = Messages(daemon, tree)
        before = messages.count()
        for _ in range(100):
            tree.tree.check_hicache_events()
        assert messages.count() == before


def test_a_miss_sends_nothing_a_first_hit_asks_once_and_a_leased_hit_not_again(
    daemon: Daemon, open_tree: Open
) -> None:
    with open_tree() as tree:
        messages = Messages(daemon, tree)
        keep(tree, 1, 16 * PAGE)
        before = messages.count()
        for seed in range(100, 150):
            assert tree.match(tree.new_request(f"miss{seed}", prompt(seed, 16 * PAGE))) == 0
        assert messages.count() == before

        waiting = tree.new_request("waits", [*prompt(1, 16 * PAGE), 0])
        assert tree.match(waiting) == 16 * PAGE
        assert messages.count() == before + 1
        for _ in range(50):
            assert tree.match(waiting) == 16 * PAGE
        assert messages.count() == before + 1

        another = tree.new_request("another", [*prompt(1, 16 * PAGE), 0])
        assert tree.match(another) == 16 * PAGE
        assert messages.count() == before + 2


@pytest.mark.parametrize("shape", [{}, {"window": 2 * PAGE}], ids=["full", "full+swa"])
def test_torch_operations_of_a_flush_do_not_grow_with_its_nodes(
    open_tree: Open, shape: dict[str, int]
) -> None:
    with open_tree(**shape) as tree:
        counted = []
        for nodes in (1, 8, 24, 48):
            for request in running(tree, range(100 * nodes, 101 * nodes)):
                tree.finish(request)
            with CountTorch() as torch_operations:
                tree.linker.num_completed_offloads()
            counted.append(torch_operations.count)
            tree.drain()
        assert 0 < max(counted) <= FEW_TENSORS
        assert counted[2] == counted[3]


def test_finishing_a_request_runs_no_torch_operation_of_ours(open_tree: Open) -> None:
    counted = {}
    tiers: tuple[TierName, ...] = ("noop", "tierd")
    for tier in tiers:
        with open_tree(tier) as tree:
            requests = running(tree, range(8))
            with CountTorch() as torch_operations:
                for request in requests:
                    tree.finish(request)
            counted[tier] = torch_operations.count
            tree.submit()
            tree.drain()
    assert counted["tierd"] == counted["noop"] > 0


def test_no_thread_of_ours_runs_in_the_engine(open_tree: Open) -> None:
    with open_tree("noop"):
        before = set(threading.enumerate())
    with open_tree() as tree:
        keep(tree, 1, 4 * PAGE)
        assert tree.match(tree.new_request("hit", [*prompt(1, 4 * PAGE), 0])) == 4 * PAGE
        assert set(threading.enumerate()) <= before


# --- on a GPU ---------------------------------------------------------------------------------

on_a_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("tier", [{"devices": "0", "memory": "512MiB"}]),
    pytest.mark.timeout(120),
]
EVERYTHING = 1 << 30


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in on_a_gpu:
        test = mark(test)
    return test


class SchedulerCalls:
    """What a linker is called for, and what that asks of the driver, counted. A call that waits
    for the GPU raises; the verdict (`finish_layer_wise_loading`) alone may wait."""

    LINKER = (
        "offload",
        "num_completed_offloads",
        "pop_completed_offload",
        "lookup",
        "load",
        "start_layer_wise_loading",
    )

    def __init__(self, linker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from tierd_client import cuda_device

        self.made: Counter[str] = Counter()
        self.driver: Counter[str] = Counter()
        for name in self.LINKER:
            monkeypatch.setattr(linker, name, self._guarded(getattr(linker, name)))
        counter = linker.layer_done_counter
        monkeypatch.setattr(counter, "wait_until", self._guarded(counter.wait_until))
        call = cuda_device._call

        def counted(function: Any, *args: Any) -> Any:
            self.driver[function.__name__] += 1
            return call(function, *args)

        monkeypatch.setattr(cuda_device, "_call", counted)

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.made[call.__name__] += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return guarded


@gpu
@pytest.mark.parametrize("name", ["full", "window", "window-state"])
def test_no_call_of_the_scheduler_waits_for_the_gpu(
    open_engine: Callable[..., TreeEngine], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    engine = open_engine(device="cuda", **{**LARGE, **ENGINES[name]})
    calls = SchedulerCalls(engine.linker, monkeypatch)
    for seed in range(4):
        engine.serve(f"first{seed}", prompt(seed, 192))
    engine.drain()
    engine.evict(window_tokens=EVERYTHING, states=EVERYTHING)
    # Lookups miss until a watchdog could release whoever waits for a layer.
    until(engine.linker.client._restores.may_start, "the watchdog is armed")
    for seed in range(4):
        again = engine.serve(f"again{seed}", [*prompt(seed, 192), 1])
        assert again.loaded
        assert again.checked
        assert not again.wrong
    assert set(calls.made) == {*SchedulerCalls.LINKER, "wait_until"}
    # The asynchronous ones, and no other.
    assert set(calls.driver) == {
        "cuMemcpyDtoHAsync",
        "cuStreamWriteValue32",
        "cuStreamWaitValue32",
    }


@gpu
@pytest.mark.parametrize("shape", [{}, {"window": 2 * PAGE}], ids=["full", "full+swa"])
def test_a_step_asks_the_driver_for_few_copies_and_two_words(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, shape: dict[str, int]
) -> None:
    sizes = EngineShape(
        page_tokens=PAGE, pool_tokens=1024, requests=64, device="cuda", **LARGE, **shape
    )
    with SchedulerTree("tierd", sizes, str(daemon.socket)) as tree, tree.settings():
        tree.tree.check_hicache_events()
        calls = SchedulerCalls(tree.linker, monkeypatch)
        counted = []
        for nodes in (1, 8, 24, 48):
            for request in running(tree, range(100 * nodes, 101 * nodes)):
                tree.finish(request)
            calls.driver.clear()
            with CountTorch() as torch_operations:
                tree.linker.num_completed_offloads()
            assert calls.driver["cuStreamWriteValue32"] == 2
            assert 1 <= calls.driver["cuMemcpyDtoHAsync"] <= (FEW_TENSORS if nodes <= 8 else 1)
            assert calls.driver.total() <= FEW_TENSORS + 2
            counted.append(torch_operations.count)
            tree.drain()
        assert counted[0] == 0
        assert counted[2] == counted[3] <= 2
