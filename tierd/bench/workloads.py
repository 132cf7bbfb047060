"""Generated traces: multi-turn chat, agent loops, and chat between one-shot scans. Seeded."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from tierd.bench.traces import Trace, TraceBuilder

PAGE_TOKENS = 64

Turn = tuple[float, list[int]]
"""When a request arrives, in seconds, and its blocks."""


def chat(requests: int, seed: int) -> Trace:
    """Conversations that share system prompts (Zipf over 24), end after a geometric number of
    turns (mean 6) and pause between turns: a lognormal time, its median 40 s, a few for long."""
    rng = np.random.default_rng(seed)
    return _merge("chat", requests, _conversations(rng, rate_hz=0.5))


def agents(requests: int, seed: int) -> Trace:
    """Tasks of 12 kinds (Zipf), each kind with a long prefix of tools and instructions. A task
    takes a geometric number of steps (mean 15) seconds apart, each after its tool's output, and
    one in four starts two to four subtasks from where it is."""
    rng = np.random.default_rng(seed)
    return _merge("agents", requests, _tasks(rng, rate_hz=0.25))


def scan(requests: int, seed: int) -> Trace:
    """The chat of `chat`, and between its requests, one in five, long documents that are read
    once: some 90 % of the pages that are written are never asked for again."""
    rng = np.random.default_rng(seed)
    talk = _conversations(rng, rate_hz=0.5)
    return _merge("scan", requests, talk, _documents(rng, rate_hz=0.5 * 6 / 4))


KINDS: dict[str, Callable[[int, int], Trace]] = {"chat": chat, "agents": agents, "scan": scan}


def _merge(name: str, requests: int, *sources: Iterator[Iterator[Turn]]) -> Trace:
    """The first `requests` turns of all sources by time.

    A source yields sessions by their start, a session its turns by their time.
    """
    builder = TraceBuilder(name, PAGE_TOKENS)
    order = count()
    due: list[tuple[float, int, list[int], Iterator[Turn], Iterator[Iterator[Turn]] | None]] = []

    def schedule(turns: Iterator[Turn], starts: Iterator[Iterator[Turn]] | None) -> None:
        turn = next(turns, None)
        if turn is not None:
            heapq.heappush(due, (turn[0], next(order), turn[1], turns, starts))

    for source in sources:
        schedule(next(source), source)
    for _ in range(requests):
        _, _, blocks, turns, starts = heapq.heappop(due)
        builder.add(blocks)
        schedule(turns, None)
        if starts is not None:
            schedule(next(starts), starts)
    return builder.build()


def _conversations(rng: np.random.Generator, rate_hz: float) -> Iterator[Iterator[Turn]]:
    blocks = _Blocks(0)
    systems = [blocks.take(n) for n in rng.integers(8, 48, 24).tolist()]
    start = 0.0
    while True:
        start += rng.exponential(1 / rate_hz)
        yield _conversation(rng, blocks, start, systems[_zipf(rng, len(systems))])


def _conversation(
    rng: np.random.Generator, blocks: _Blocks, start: float, system: list[int]
) -> Iterator[Turn]:
    now, history = start, list(system)
    for _ in range(int(rng.geometric(1 / 6))):
        history += blocks.take(_length(rng, median=4, most=64))
        yield now, list(history)
        history += blocks.take(_length(rng, median=6, most=32))  # the answer
        now += float(rng.lognormal(np.log(40), 1.2))


def _tasks(rng: np.random.Generator, rate_hz: float) -> Iterator[Iterator[Turn]]:
    blocks = _Blocks(0)
    kinds = [blocks.take(n) for n in rng.integers(60, 200, 12).tolist()]
    start = 0.0
    while True:
        start += rng.exponential(1 / rate_hz)
        kind = kinds[_zipf(rng, len(kinds))]
        yield _task(rng, blocks, start, kind, int(rng.geometric(1 / 15)), 0.25)


def _task(
    rng: np.random.Generator,
    blocks: _Blocks,
    start: float,
    history: list[int],
    steps: int,
    forks: float,
) -> Iterator[Turn]:
    now, history = start, list(history)
    fork_at = int(rng.integers(steps)) if rng.random() < forks else -1
    for step in range(steps):
        history += blocks.take(_length(rng, median=3, most=80))
        yield now, list(history)
        history += blocks.take(_length(rng, median=2, most=16))
        if step == fork_at:
            subtasks = [
                _task(rng, blocks, now, history, int(rng.geometric(1 / 5)), 0.0)
                for _ in range(int(rng.integers(2, 5)))
            ]
            for turn in heapq.merge(*subtasks, key=lambda turn: turn[0]):
                now = turn[0]
                yield turn
        now += float(rng.lognormal(np.log(8), 1.0))


def _documents(rng: np.random.Generator, rate_hz: float) -> Iterator[Iterator[Turn]]:
    blocks = _Blocks(1)
    start = 0.0
    while True:
        start += rng.exponential(1 / rate_hz)
        yield iter([(start, blocks.take(int(rng.integers(60, 240))))])


class _Blocks:
    """Block hashes that no other source takes."""

    def __init__(self, source: int) -> None:
        self._next = source << 48

    def take(self, count: int) -> list[int]:
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))


def _zipf(rng: np.random.Generator, n: int) -> int:
    weights = 1 / np.arange(1, n + 1)
    return int(rng.choice(n, p=weights / weights.sum()))


def _length(rng: np.random.Generator, median: int, most: int) -> int:
    """Pages of a message: lognormal."""
    return int(np.clip(rng.lognormal(np.log(median), 0.8), 1, most))
