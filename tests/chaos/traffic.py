"""One rank of an engine under random load, in a process of its own: it checks every byte that it
gets back, and that nobody writes to its pages but who was asked to. The pages lie in host memory
or on a GPU.

All ranks of an engine draw from one seed and agree on counts through pipes, as the ranks of a
tensor-parallel group do. Device pages get another owner at once when a backup is acked or a
restore has ended, whatever the outcome: a late copy in either direction then shows as wrong bytes,
in the tier or here.
"""

from __future__ import annotations

import enum
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from tier_harness import Rank, Shape, keys
from tierd_client import Ack

T = TypeVar("T")

SHAPE = Shape(page_tokens=4, pages=48, layers=2, row_bytes=8192)
GPU_POOL_BYTES = 1 << 30
"""On a GPU the pool is larger, of which the load uses no more: a leak of it is seen in what the
whole GPU has left."""
GPU_SHAPE = replace(
    SHAPE, pages=GPU_POOL_BYTES // (2 * SHAPE.layers * SHAPE.page_tokens * SHAPE.row_bytes)
)
SOURCES, TARGETS = range(24), range(24, 48)
"""Device pages that backups are made from, and that restores go to."""
CHAINS, CHAIN_PAGES = 40, 24
LOOKUP_TIMEOUT_S, VERDICT_TIMEOUT_S, ACK_TIMEOUT_S, RETRY_S = 0.5, 2.0, 8.0, 0.2
PAUSE_S = 0.002


class Word(enum.IntEnum):
    """What a rank shows to whoever watches it, one integer each."""

    PHASE = 0
    STOPS = enum.auto()
    """Counted by the watcher: how often it has stopped this rank."""
    STEPS = enum.auto()
    KEPT = enum.auto()
    SHED = enum.auto()
    HITS = enum.auto()
    LANDED = enum.auto()
    FAILED = enum.auto()
    PAGES_CHECKED = enum.auto()
    CONNECTIONS = enum.auto()
    CONNECTED_US = enum.auto()
    """When the last connection came about, by the monotonic clock."""
    FLUSH_US = enum.auto()
    LOOKUP_US = enum.auto()
    FINISH_US = enum.auto()
    """The longest that a call has taken while nobody had stopped this rank."""


class Phase(enum.IntEnum):
    """What a rank does right now."""

    REGISTERING = 1
    BACKUP = 2
    LEASE = 3
    RESTORE = 4
    QUIET = 5


class Mode(enum.IntEnum):
    """What the watcher wants of an engine."""

    TRAFFIC = 0
    QUIET = 1
    LEAVE = 2


@dataclass(frozen=True)
class Place:
    """Where a rank belongs."""

    socket: Path
    instance: str
    rank: int
    world_size: int
    seed: int
    device: str = "cpu"


class WrongBytesError(Exception):
    """The worst fault."""


class Traffic:
    """The scheduler of one rank.

    Args:
        words: Shared with the watcher, one element for each `Word`.
        orders: The watcher's end of a pipe: modes in, and ("quiet" or "wrong", text) out.
        others: Rank 0's pipes to the other ranks; their pipe to rank 0.
    """

    def __init__(
        self, place: Place, words: Any, orders: Connection, others: Sequence[Connection]
    ) -> None:
        self._place = place
        self._words = words
        self._orders = orders
        self._others = others
        self._rng = random.Random(place.seed)
        self._mode = Mode.TRAFFIC
        self._acked: deque[Ack] = deque()
        self._pending: dict[int, list[int]] = {}
        self._free = list(SOURCES)
        self._owner: dict[int, bytes] = {}
        self._owners = 0
        self._requests = 0
        self._told_quiet = False
        words[Word.PHASE] = Phase.REGISTERING
        self._rank = Rank(
            place.socket,
            [SHAPE if place.device == "cpu" else GPU_SHAPE],
            device=place.device,
            rank=place.rank,
            world_size=place.world_size,
            instance=place.instance,
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
            verdict_timeout_s=VERDICT_TIMEOUT_S,
            ack_timeout_s=ACK_TIMEOUT_S,
            retry_s=RETRY_S,
        )
        self._client = self._rank.client
        self._pages = self._rank.pages["kv"]

    def run(self) -> None:
        """Until told to leave, or until another rank is gone."""
        with suppress(EOFError, ConnectionError):
            self._client.connect(0.0)
            while self._next_mode() is not Mode.LEAVE:
                self._step()
        self._client.close()

    # --- agreement ----------------------------------------------------------------------------

    def _next_mode(self) -> Mode:
        mode = self._mode
        if self._place.rank == 0:
            while self._orders.poll():
                mode = self._orders.recv()
            for other in self._others:
                other.send(mode)
        else:
            mode = self._others[0].recv()
        if mode is not self._mode:
            self._mode, self._told_quiet = mode, False
        return mode

    def _agree(self, mine: int) -> int:
        """The least of all ranks' values."""
        if self._place.rank:
            self._others[0].send(mine)
            return int(self._others[0].recv())
        least = min([mine, *(other.recv() for other in self._others)])
        for other in self._others:
            other.send(least)
        return least

    # --- a step -------------------------------------------------------------------------------

    def _step(self) -> None:
        was_connected = self._client.connected
        self._timed(Word.FLUSH_US, self._client.flush)
        if self._client.connected and not was_connected:
            self._words[Word.CONNECTIONS] += 1
            self._words[Word.CONNECTED_US] = time.monotonic_ns() // 1000
        self._take_acks()
        if self._mode is Mode.TRAFFIC:
            self._words[Word.PHASE] = Phase.BACKUP
            if self._rng.random() < 0.7:
                self._offer()
            if self._rng.random() < 0.5:
                self._load()
            self._check(self._rng.sample(sorted(self._owner), min(2, len(self._owner))))
        elif not self._told_quiet and self._agree(-len(self._pending)) == 0:
            self._check(sorted(self._owner))
            self._words[Word.PHASE] = Phase.QUIET
            self._told_quiet = True
            self._orders.send(("quiet", ""))
        self._words[Word.STEPS] += 1
        time.sleep(PAUSE_S)

    def _take_acks(self) -> None:
        self._acked += self._client.acks()
        for _ in range(self._agree(len(self._acked))):
            ack = self._acked.popleft()
            pages = self._pending.pop(ack.seq)
            self._words[Word.KEPT if ack.kept else Word.SHED] += 1
            self._hand_over(pages)
            self._free += pages

    def _offer(self) -> None:
        count = self._rng.randint(1, 6)
        first = 0 if self._rng.random() < 0.6 else self._rng.randrange(CHAIN_PAGES - count)
        chain = f"chain {self._rng.randrange(CHAINS)}"
        if len(self._free) < count:
            return
        places = [self._free.pop(0) for _ in range(count)]
        names = keys(chain, first + count, first)
        self._pages.compute(names, places)
        for name, place in zip(names, places, strict=True):
            self._owner[place] = name
        parent = keys(chain, first, first - 1)[0] if first else b""
        seq = self._client.backup([self._pages.named(names, places)], parent=parent)
        self._pending[seq] = places

    def _load(self) -> None:
        chain = f"chain {self._rng.randrange(CHAINS)}"
        names = keys(chain, CHAIN_PAGES)
        cancel = self._rng.random() < 0.2
        places = self._rng.sample(TARGETS, len(TARGETS))
        self._requests += 1
        rid = f"{self._place.instance} {self._requests}"
        lengths = self._timed(
            Word.LOOKUP_US, lambda: self._client.lookup(rid, b"".join(names[: len(places)]))
        )
        count = self._agree(max(lengths, default=0))
        if not count:
            self._client.cancel(rid)
            return
        self._words[Word.PHASE] = Phase.LEASE
        self._words[Word.HITS] += 1
        if cancel:
            self._client.cancel(rid)
            return
        names, places = names[:count], places[:count]
        self._pages.wipe(places)
        for place in places:
            self._owner.pop(place, None)
        restore = self._client.restore({rid: [self._pages.named(names, places)]})
        self._words[Word.PHASE] = Phase.RESTORE

        def finish() -> bool:
            for layer in range(SHAPE.layers):
                restore.wait_layer(layer)
            return restore.finish()

        landed = self._timed(Word.FINISH_US, finish)
        if landed:
            for place, name in zip(places, names, strict=True):
                self._owner[place] = name
            self._check(places)
        self._words[Word.LANDED if landed else Word.FAILED] += 1
        self._agree(landed)
        self._hand_over(places)

    # --- pages --------------------------------------------------------------------------------

    def _hand_over(self, places: Sequence[int]) -> None:
        """These pages belong to somebody else from now on, who writes to them at once."""
        for place in places:
            self._owners += 1
            name = f"owner {self._place.instance} {self._owners}".encode()
            self._owner[place] = name
            self._pages.compute([name], [place])

    def _check(self, places: Sequence[int]) -> None:
        self._words[Word.PAGES_CHECKED] += len(places)
        for place in places:
            wrong = self._pages.wrong([self._owner[place]], [place])
            if wrong:
                raise WrongBytesError(
                    f"{wrong} bytes of page {place}, which is {self._owner[place]!r}"
                )

    def _timed(self, word: Word, call: Callable[[], T]) -> T:
        stops, started = self._words[Word.STOPS], time.monotonic_ns()
        result = call()
        took_us = (time.monotonic_ns() - started) // 1000
        if self._words[Word.STOPS] == stops:
            self._words[word] = max(self._words[word], took_us)
        return result


def serve(place: Place, words: Any, orders: Connection, others: Sequence[Connection]) -> None:
    """The process."""
    if place.device != "cpu":
        torch.cuda.set_device(place.device)
    try:
        Traffic(place, words, orders, others).run()
    except Exception as error:
        with suppress(BrokenPipeError):
            orders.send(("wrong", f"rank {place.rank} of {place.instance}: {error!r}"))
        raise
