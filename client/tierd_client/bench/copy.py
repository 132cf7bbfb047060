"""How fast a real daemon copies scattered pages, as a fraction of one contiguous copy of this run,
and how soon a restore's layers can be used.

Started by `tierd bench copy`. Prints JSON lines: progress, `machine`, `link`, each row of `rates`
and `layers` as soon as it is finished, what is `left_out`, then `result`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch

from tierd_client.bench.link import measure
from tierd_client.bench.machine import machine
from tierd_client.bench.models import (
    DEEPSEEK_V3,
    GPT_OSS_20B,
    QWEN3_8B,
    QWEN3_NEXT,
    DeviceMemory,
    Model,
    Placement,
)
from tierd_client.bench.rank import PATIENCE_S, BenchFailedError, BenchRank, Chain, Totals
from tierd_client.restore import Restore

PLACEMENTS: tuple[Placement, ...] = ("arena", "stock")
SAME_GROUP_S = 50e-6
"""Layers that land within this of each other have come in one group."""


@dataclass(frozen=True)
class Case:
    """One batch.

    Attributes:
        run: Pages that lie side by side on the device.
        prompts, pages: So many prompts of so many pages of KV each, copied at once.
    """

    model: Model
    page_tokens: int
    run: int
    prompts: int
    pages: int


@dataclass(frozen=True)
class Scale:
    """What fits on a device.

    Attributes:
        tokens: Token slots of a model's pools, a multiple of 64.
        states: Slots of its recurrent states.
        batch_bytes: About what a large batch moves.
        restores: Tokens of the restores whose layers are timed.
    """

    tokens: int
    states: int
    batch_bytes: int
    restores: Sequence[int]


GPU = Scale(448_000, 48, 768 << 20, (8192, 65536))
HOST = Scale(4096, 8, 16 << 20, (128,))
"""So little that it runs anywhere; its rates are those of a memory, not of a link."""


def cases(scale: Scale, quick: bool) -> list[Case]:
    """What is measured, in that order; with `quick`, three kinds of pages of one model."""

    def large(model: Model, page_tokens: int, run: int) -> Case:
        pages = scale.batch_bytes // (model.token_bytes * page_tokens)
        pages = max(1, min(pages, scale.tokens // page_tokens // 2))
        return Case(model, page_tokens, run, 1, -(-pages // run) * run)

    found = [large(QWEN3_8B, 64, 1), large(QWEN3_8B, 1, 64), large(QWEN3_8B, 1, 1)]
    if quick:
        return found
    windows = max(1, scale.batch_bytes // (10 * 64 * GPT_OSS_20B.token_bytes // 2))
    states = max(1, min(scale.states // 4, scale.batch_bytes // QWEN3_NEXT.pools[1].unit_bytes))
    return [
        found[0],
        Case(QWEN3_8B, 64, 1, 1, 1),
        Case(QWEN3_8B, 64, 1, 1, 8),
        large(QWEN3_8B, 64, 4),
        large(QWEN3_8B, 16, 1),
        large(QWEN3_8B, 16, 4),
        *found[1:],
        large(QWEN3_8B, 1, 4),
        large(QWEN3_8B, 1, 16),
        Case(QWEN3_8B, 1, 64, 1, 64),
        Case(GPT_OSS_20B, 64, 1, min(windows, scale.tokens // 1024), 8),
        large(DEEPSEEK_V3, 64, 1),
        large(DEEPSEEK_V3, 1, 64),
        Case(QWEN3_NEXT, 1, 64, states, 64),
    ]


@dataclass(frozen=True)
class RateRow:
    """A case at its best. Rates in GB/s, over the time that the copier took for its job; seconds
    from the offer to the ack, and from the load to the verdict."""

    model: str
    placement: str
    path: str
    page_tokens: int
    run: int
    pages: int
    nbytes: int
    to_host: float
    to_device: float
    both: float
    backup_s: float
    restore_s: float


@dataclass(frozen=True)
class LayerRow:
    """A restore at its median, layer by layer. Seconds from the load on the engine's stream.

    Attributes:
        landed_s: When each layer could be used.
        first_group: Layers that came first, together.
        verdict_s: When the scheduler knew, from the load on.
    """

    model: str
    placement: str
    page_tokens: int
    tokens: int
    nbytes: int
    landed_s: list[float]
    first_group: int
    verdict_s: float


class Stopwatch:
    """Times on the device's current stream, without waiting for it; on a CPU, the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Take the time at which the current stream gets here."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each mark but the first, since the first."""
        first, *others = self._marks
        if not self._cuda:
            return [mark - first for mark in others]
        torch.cuda.synchronize()
        return [first.elapsed_time(mark) / 1e3 for mark in others]


def rates(rank: BenchRank, case: Case, placement: Placement, rounds: int) -> RateRow:
    """Back up, restore, and do both at once, some rounds."""

    def prompts() -> list[Chain]:
        return rank.chains(case.prompts, case.pages, case.run)

    rank.settle(case.prompts, case.pages)
    best = dict.fromkeys(("to_host", "to_device", "both"), 0.0)
    least = dict.fromkeys(("backup_s", "restore_s"), float("inf"))
    moved = Totals(0, 0.0, 0, 0.0)
    for _ in range(rounds):
        rank.clear()
        ours, others = prompts(), prompts()
        before, start = rank.totals(), time.perf_counter()
        rank.offer(ours)
        rank.await_acks(len(ours))
        least["backup_s"] = min(least["backup_s"], time.perf_counter() - start)
        moved = rank.totals().since(before)
        best["to_host"] = max(best["to_host"], moved.backup_bytes / moved.backup_s / 1e9)

        rank.lookup(ours)
        before, start = rank.totals(), time.perf_counter()
        _land(rank.restore(ours))
        least["restore_s"] = min(least["restore_s"], time.perf_counter() - start)
        back = _restored(rank, before)
        best["to_device"] = max(best["to_device"], back.restore_bytes / back.restore_s / 1e9)

        rank.lookup(ours)
        before = rank.totals()
        restore = rank.restore(ours)
        rank.offer(others)
        rank.await_acks(len(others))
        _land(restore)
        two = _restored(rank, before)
        both = (two.backup_bytes + two.restore_bytes) / max(two.backup_s, two.restore_s) / 1e9
        best["both"] = max(best["both"], both)
    return RateRow(
        model=case.model.name,
        placement=placement,
        path=", ".join(dict.fromkeys(p.split(":")[0] for p in rank.paths().values())),
        page_tokens=case.page_tokens,
        run=case.run,
        pages=case.prompts * case.pages,
        nbytes=moved.backup_bytes,
        **best,
        **least,
    )


def _land(restore: Restore) -> None:
    if not restore.finish():
        raise BenchFailedError("a restore has failed")


def _restored(rank: BenchRank, before: Totals) -> Totals:
    """What has been moved, with the restore in it: its verdict is there before control knows."""
    deadline = time.monotonic() + PATIENCE_S
    while (moved := rank.totals().since(before)).restore_bytes == 0:
        if time.monotonic() > deadline:
            raise BenchFailedError("the daemon does not count a restore")
    return moved


def layers(
    rank: BenchRank, model: Model, placement: Placement, tokens: int, rounds: int
) -> LayerRow:
    """When each layer of a restore of so many tokens can be used."""
    rank.clear()
    pages = tokens // rank.page_tokens
    rank.settle(1, pages)
    rank.clear()
    chains = rank.chains(1, pages, 1)
    rank.offer(chains)
    rank.await_acks(1)
    found = []
    for _ in range(rounds):
        rank.lookup(chains)
        watch, start = Stopwatch(chains[0].places[0].slots.device), time.perf_counter()
        watch.mark()
        restore = rank.restore(chains)
        for layer in model.pools[0].layers:
            restore.wait_layer(layer)
            watch.mark()
        _land(restore)
        verdict = time.perf_counter() - start
        found.append((verdict, watch.seconds()))
    verdict, landed = sorted(found)[rounds // 2]
    return LayerRow(
        model=model.name,
        placement=placement,
        page_tokens=rank.page_tokens,
        tokens=tokens,
        nbytes=tokens * model.token_bytes,
        landed_s=landed,
        first_group=sum(at - landed[0] < SAME_GROUP_S for at in landed),
        verdict_s=verdict,
    )


def run(
    socket: str,
    device: torch.device,
    tokens: int | None,
    quick: bool,
    rounds: int,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Measure everything. Says `done` and `text` as it goes, `machine`, `link` (the contiguous
    copies), and at once each row of `rates` and `layers`, and of `left_out` what does not fit."""

    def progress(done: float, text: str) -> None:
        say({"done": done, "text": text})

    scale = GPU if device.type == "cuda" else HOST
    if tokens is not None:
        scale = Scale(tokens - tokens % 64, scale.states, scale.batch_bytes, scale.restores)
    todo = cases(scale, quick)
    total = 2 * (len(todo) + len(scale.restores))
    done = count()
    say({"machine": machine(device)})
    progress(0.0, "one contiguous copy")
    say({"link": asdict(measure(device))})
    for name, mine in _grouped(todo, lambda case: case.model.name):
        for placement in PLACEMENTS:
            try:
                memory = DeviceMemory(mine[0].model, placement, scale.tokens, scale.states, device)
            except torch.OutOfMemoryError:
                say({"left_out": f"{name}, {placement}: {scale.tokens:,} tokens do not fit"})
                continue
            for size, cases_of_size in _grouped(mine, lambda case: case.page_tokens):
                text = f"{name}, pages of {size}, {placement}"
                with BenchRank(socket, memory, size, name) as rank:
                    rank.await_pinned()
                    if mine[0].model is QWEN3_8B and size == 64:
                        for restored in scale.restores:
                            progress(next(done) / total, f"{text}, layers of {restored:,} tokens")
                            row = layers(rank, QWEN3_8B, placement, restored, rounds + 1)
                            say({"layers": asdict(row)})
                    for case in cases_of_size:
                        progress(next(done) / total, f"{text}, {case.prompts * case.pages} of them")
                        try:
                            say({"rates": asdict(rates(rank, case, placement, rounds))})
                        except BenchFailedError as error:
                            say({"left_out": f"{text}, runs of {case.run}: {error}"})
            del memory
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _grouped(todo: Sequence[Case], key: Callable[[Case], Any]) -> list[tuple[Any, list[Case]]]:
    """By key, in the order in which each comes first."""
    return [(k, [c for c in todo if key(c) == k]) for k in dict.fromkeys(map(key, todo))]


def main() -> None:
    """The process of `tierd bench copy`."""
    parser = argparse.ArgumentParser(prog="python -m tierd_client.bench.copy", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", required=True, help="in torch's words")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    device = torch.device(arguments.device)
    # Not the default stream, which waits for others and has them wait: an engine has its own.
    own = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
    with own:
        run(arguments.socket, device, arguments.tokens, arguments.quick, arguments.rounds, say)
    say({"result": {}})


if __name__ == "__main__":
    main()
