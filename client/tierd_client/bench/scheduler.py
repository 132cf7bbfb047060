"""What a tier costs SGLang's scheduler thread: the same requests, one tier after the other.

Started by `tierd bench scheduler`. Prints JSON lines: progress, then `result`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from tierd_client.bench.load import load
from tierd_client.bench.machine import machine
from tierd_client.bench.scheduler_cases import CORES, MATCH_PAGES, STEPS, Case, cases
from tierd_client.bench.scheduler_tree import TIERS, WITHOUT_GPU, SchedulerTree, TierName
from tierd_client.sglang.tree_pools import EngineShape

FLUSH = "num_completed_offloads"
"""The call of a linker that sends a step's nodes."""
FINISH = "finish, a request"
FINISH_WITHOUT = "finish, a request, no-op linker on tierd's tree"
"""In turns with the steps that tierd serves. Two trees differ by more than a linker costs: by where
in memory all that they hold happens to lie."""
WARM_UP_STEPS = 8
"""Two fill the device, which then evicts; four fill HiCache's host pool; after eight a flush finds
the process with all the memory that it takes."""
IDLE_CALLS = 200
MATCHES = 20
LOADED_MATCHES = 1000
LOAD_PAGES_PER_S = 40_000
_VOCABULARY = 50_000


class Row(NamedTuple):
    """A distribution.

    Attributes:
        keys, pools: Pages of a step in which most requests finish, and the pools that have each.
        batch: Requests that finish in the step, or pages of the lookup; 0 where there is neither.
    """

    case: str
    keys: int
    pools: int
    tier: str
    metric: str
    batch: int
    p50_us: float
    p99_us: float
    samples: int


Samples = dict[tuple[str, int], list[int]]
"""Nanoseconds, by metric and batch."""


class Bench:
    """All tiers of one case, and what has been measured of them."""

    def __init__(self, case: Case, device: str, socket: str) -> None:
        self.case = case
        self.left_out: list[str] = []
        """What could not run, in words."""
        self.load_pages_per_s = 0.0
        """What the tier took of another engine while it was measured under load."""
        self._socket = socket
        self._stack = contextlib.ExitStack()
        self._samples: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
        self._shape = case.shape(device)
        self._trees: dict[TierName, SchedulerTree] = {}
        self._numbers = count()
        with contextlib.ExitStack() as stack:
            for tier in TIERS:
                with self._if_it_runs(tier):
                    tree = SchedulerTree(tier, self._shape, socket)
                    self._trees[tier] = stack.enter_context(tree)
            self._stack = stack.pop_all()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, rounds: int, progress: Callable[[], None]) -> None:
        """Warm up until every tier evicts, then measure; a round starts with another tier than the
        one before."""
        for tier in TIERS:
            for _ in range(WARM_UP_STEPS):
                self._turn(tier, lambda tree: self._step(tree, max(STEPS), defaultdict(list)))
            progress()
        gc.collect()
        gc.freeze()  # as an engine does when it is warm
        for number in range(rounds):
            for turn in range(len(TIERS)):
                tier = TIERS[(number + turn) % len(TIERS)]
                self._turn(tier, self._measure)
                progress()
        if self.case.matches and self.case.page_tokens > 1:
            self._turn("tierd", self._match_under_load)
        gc.unfreeze()

    def rows(self) -> list[Row]:
        """What has been measured so far, in microseconds."""
        found = []
        for tier, samples in self._samples.items():
            for (metric, batch), values in samples.items():
                p50, p99 = np.percentile(np.array(values) / 1000, (50, 99))
                found.append(
                    Row(
                        self.case.name,
                        max(STEPS) * self.case.pages,
                        2 if self.case.window else 1,
                        tier,
                        metric,
                        batch,
                        round(float(p50), 2),
                        round(float(p99), 2),
                        len(values),
                    )
                )
        return found

    # --- inside -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _if_it_runs(self, tier: TierName) -> Iterator[None]:
        """What others need to run is not ours to have: where HiCache fails, the result says so and
        the rest is measured without it."""
        try:
            yield
        except Exception as error:
            if tier != "hicache":
                raise
            self._trees.pop(tier, None)
            self._samples.pop(tier, None)
            reason = str(error).strip().splitlines() or [""]
            self.left_out.append(
                f"{self.case.name}: HiCache failed, {type(error).__name__}: {reason[0][:300]}"
            )

    def _turn(self, tier: TierName, act: Callable[[SchedulerTree], None]) -> None:
        """Let a tier act, if it is there."""
        tree = self._trees.get(tier)
        if tree is not None:
            with self._if_it_runs(tier), tree.settings():
                act(tree)

    def _measure(self, tree: SchedulerTree) -> None:
        samples = self._samples[tree.tier]
        ways = [self._step, self._step_without] if tree.tier == "tierd" else [self._step]
        for batch, steps in STEPS.items():
            for number in range(steps):
                # Once the one first and once the other: what a step finds in memory is what the
                # step two before it has left there.
                for step in ways[:: -1 if number % 2 else 1]:
                    step(tree, batch, samples)
        if tree.linker is not None:
            with _timed(tree, "offload", samples):
                self._step(tree, max(STEPS), defaultdict(list))
            for _ in range(IDLE_CALLS):
                with _clock(samples["no acks waiting", 0]):
                    tree.linker.num_completed_offloads()
        for _ in range(IDLE_CALLS):
            with _clock(samples["check_hicache_events, idle", 0]):
                tree.tree.check_hicache_events()
        if self.case.matches:
            for pages in MATCH_PAGES:
                self._match(tree, pages, samples)

    def _step(self, tree: SchedulerTree, batch: int, samples: Samples) -> None:
        requests = []
        for _ in range(batch):
            request = tree.new_request(self._rid(), self._prompt(self.case.pages))
            tree.match(request)
            tree.admit(request)
            requests.append(request)
        tree.settle()
        spent: list[int] = []
        for request in requests:
            with _clock(spent):
                tree.finish(request)
        samples[FINISH, batch] += spent
        own: Samples = defaultdict(list)
        part = contextlib.nullcontext() if tree.linker is None else _timed(tree, FLUSH, own)
        busy = time.thread_time_ns()
        with part, _clock(spent):
            tree.submit()
        samples["flush, a step", batch].append(spent[-1])
        # On few cores the processes that a message wakes take the scheduler's; this is without.
        samples["flush, a step, CPU time", batch].append(time.thread_time_ns() - busy)
        if own:
            samples["flush, the linker's part", batch] += own[FLUSH, 0]
        drained = tree.drain()
        if tree.tier != "none":
            samples["acks, a step", batch].append(drained)
        samples["all of it, a request", batch].append((sum(spent) + drained) // batch)

    def _step_without(self, tree: SchedulerTree, batch: int, samples: Samples) -> None:
        """A step of a tree with tierd, with a linker that keeps nothing in the place of its own."""
        own: Samples = defaultdict(list)
        with tree.noop_instead():
            self._step(tree, batch, own)
        samples[FINISH_WITHOUT, batch] += own[FINISH, batch]

    def _match(self, tree: SchedulerTree, pages: int, samples: Samples) -> None:
        """Lookups of prompts that no tier has, and of one that is in the tier alone."""
        for _ in range(MATCHES):
            request = tree.new_request(self._rid(), self._prompt(pages))
            self._lookup(tree, request, "match, miss", pages, 0, samples)
            tree.forget(request)
        if tree.tier in ("none", "noop"):
            return
        prompt = self._prompt(pages)
        self._keep(tree, prompt)
        # SGLang leaves a prompt's last token to be computed, and with it its page.
        prompt.append(0)
        for _ in range(MATCHES):
            request = tree.new_request(self._rid(), prompt)
            hit = pages * self.case.page_tokens
            self._lookup(tree, request, "match, first hit", pages, hit, samples)
            self._lookup(tree, request, "match, hit again", pages, hit, samples)
            tree.forget(request)

    def _match_under_load(self, tree: SchedulerTree) -> None:
        """First hits while another engine keeps the daemon busy."""
        pages = MATCH_PAGES[0]
        prompt = self._prompt(pages)
        self._keep(tree, prompt)
        prompt.append(0)
        with load(self._socket, tree.shape.device, LOAD_PAGES_PER_S) as other:
            for _ in range(LOADED_MATCHES):
                request = tree.new_request(self._rid(), prompt)
                hit = pages * self.case.page_tokens
                samples = self._samples[tree.tier]
                self._lookup(tree, request, "match, first hit under load", pages, hit, samples)
                tree.forget(request)
            self.load_pages_per_s = other.stop()

    def _keep(self, tree: SchedulerTree, prompt: list[int]) -> None:
        """Have a prompt in the tier, and nowhere else."""
        tree.evict_all()
        request = tree.new_request(self._rid(), prompt)
        tree.match(request)
        tree.admit(request)
        tree.finish(request)
        tree.submit()
        tree.drain()
        tree.evict_all()

    def _lookup(
        self,
        tree: SchedulerTree,
        request: Any,
        metric: str,
        pages: int,
        hit: int,
        samples: Samples,
    ) -> None:
        """Match once, and time the linker's part of it, too."""
        tree.settle()
        if tree.linker is None:
            with _clock(samples[metric, pages]):
                found = tree.match(request)
        else:
            own: Samples = defaultdict(list)
            with _timed(tree, "lookup", own), _clock(samples[metric, pages]):
                found = tree.match(request)
            samples[metric.replace("match", "lookup"), pages] += own["lookup", 0]
        if found != hit:
            raise RuntimeError(
                f"{self.case.name}, {tree.tier}: {metric} of {pages} pages found {found} tokens, "
                f"not {hit}"
            )

    def _rid(self) -> str:
        return f"r{next(self._numbers)}"

    def _prompt(self, pages: int) -> list[int]:
        """A prompt that shares no prefix with any other."""
        number = next(self._numbers)
        rest = pages * self.case.page_tokens - 1
        return [number, *random.Random(number).choices(range(_VOCABULARY), k=rest)]


@contextlib.contextmanager
def _clock(into: list[int]) -> Iterator[None]:
    start = time.perf_counter_ns()
    yield
    into.append(time.perf_counter_ns() - start)


class _Timed:
    """A linker of which one method is timed."""

    def __init__(self, linker: Any, method: str, samples: list[int]) -> None:
        self._linker = linker
        call = getattr(linker, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            result = call(*args, **kwargs)
            samples.append(time.perf_counter_ns() - start)
            return result

        setattr(self, method, timed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linker, name)


@contextlib.contextmanager
def _timed(tree: SchedulerTree, method: str, samples: Samples) -> Iterator[None]:
    """Time one method of a tree's linker while this is open."""
    wrapper = tree.tree.linker
    linker = wrapper.cache_linker
    wrapper.cache_linker = _Timed(linker, method, samples[method, 0])
    try:
        yield
    finally:
        wrapper.cache_linker = linker


def client_memory(device: str, socket: str) -> dict[str, int]:
    """What a process that has served a request without a tier, and evicted it, grows by when it
    gets a linker of tierd's, in bytes.

    Call before anything of the client is in use. Returns: `private_bytes`, the growth of its own
    memory that it has written to; `code_bytes`, that of files that it has mapped and nobody else
    has, such as the CUDA bindings, which the kernel can drop; `segment_bytes` that it shares with
    the daemon, of which the rings for token slots are `ring_bytes`.
    """
    from tierd.wire.layout import SegmentSpec

    shape = EngineShape(device=device)
    with SchedulerTree("noop", shape, socket) as tree, tree.settings():
        request = tree.new_request("first", range(8 * shape.page_tokens))
        tree.match(request)
        tree.admit(request)
        tree.finish(request)
        tree.submit()
        tree.drain()
        tree.evict_all()
        tree.settle()
    before = _memory()
    with SchedulerTree("tierd", shape, socket):
        after = _memory()
    spec = SegmentSpec()
    return {
        "private_bytes": after["Private_Dirty"] - before["Private_Dirty"],
        "code_bytes": after["Private_Clean"] - before["Private_Clean"],
        "segment_bytes": spec.nbytes,
        "ring_bytes": 8 * (spec.backup_ring + spec.restore_ring),
    }


def _memory() -> dict[str, int]:
    """This process's own memory, in bytes: what it has written to, and what it has not."""
    with open("/proc/self/smaps_rollup") as rollup:
        fields = dict(line.split(":", 1) for line in rollup if ":" in line and "kB" in line)
    return {
        name: int(fields[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty")
    }


def run(
    socket: str,
    device: str,
    todo: Sequence[Case],
    rounds: int,
    progress: Callable[..., None],
) -> dict[str, Any]:
    """Measure these cases.

    Args:
        progress: Called with the share that is done, the case, and once a case with its `rows`.

    Returns: `rows`, `left_out` (what could not run, in words), `client_memory`, `load`, `machine`.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    memory = client_memory(device, socket)
    total = len(todo) * ((rounds + 1) * len(TIERS) + 1)
    done = count(1)
    rows: list[Row] = []
    loads: list[float] = []
    left_out = [WITHOUT_GPU] if device == "cpu" else []
    for case in todo:
        with Bench(case, device, socket) as bench:
            bench.run(rounds, lambda name=case.name: progress(next(done) / total, name))  # type: ignore[misc]
            left_out += bench.left_out
            loads.append(bench.load_pages_per_s)
            rows += (found := bench.rows())
        progress(next(done) / total, case.name, rows=[row._asdict() for row in found])
    return {
        "machine": machine(torch.device(device)) | {"sglang": version("sglang")},
        "left_out": left_out,
        "client_memory": memory,
        "load": {"wanted_pages_per_s": LOAD_PAGES_PER_S, "kept_pages_per_s": max(loads)},
        "rows": [row._asdict() for row in rows],
    }


def main() -> None:
    """The process of `tierd bench scheduler`."""
    parser = argparse.ArgumentParser(
        prog="python -m tierd_client.bench.scheduler", description=__doc__
    )
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--core", choices=CORES, action="append")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    todo = cases(arguments.quick, arguments.core or CORES)

    def progress(done: float, text: str, **more: Any) -> None:
        print(json.dumps({"done": done, "text": text, **more}), flush=True)

    result = run(arguments.socket, arguments.device, todo, arguments.rounds, progress)
    print(json.dumps({"result": result}), flush=True)


if __name__ == "__main__":
    main()
