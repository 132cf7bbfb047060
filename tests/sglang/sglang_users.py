"""Users of an engine who do anything in any order, and what must hold whatever they do."""

from __future__ import annotations

import random
from typing import Any

from tierd_client.sglang.tree_engine import Running, TreeEngine

LARGE = {"heads": 8, "head_dim": 128}
"""Tokens so large that a chunk of host memory holds some thousand."""

ENGINES: dict[str, dict[str, Any]] = {
    "full": {"page_tokens": 16, "pool_tokens": 1024, "layers": 2},
    "latent": {"kind": "mla", "page_tokens": 16, "pool_tokens": 1024, "heads": 24},
    "window": {"page_tokens": 8, "pool_tokens": 1024, "window": 24},
    "narrow-window": {
        "page_tokens": 4,
        "pool_tokens": 1024,
        "window": 6,
        "window_pool_tokens": 832,
    },
    "state": {"page_tokens": 1, "pool_tokens": 1024, "states": 64},
    "latent-state": {
        "kind": "mla",
        "page_tokens": 1,
        "pool_tokens": 1024,
        "heads": 24,
        "states": 64,
    },
    "window-state": {
        "page_tokens": 1,
        "pool_tokens": 1024,
        "layers": 6,
        "window": 10,
        "states": 64,
        "side_states": True,
    },
    "sparse": {"kind": "minimax", "page_tokens": 16, "pool_tokens": 1024, "layers": 3},
    "compressed": {
        "kind": "dsv4",
        "page_tokens": 256,
        "pool_tokens": 1 << 13,
        "layers": 6,
        "window": 128,
        "draft_layers": 1,
    },
    "compressed-low": {
        "kind": "dsv41",
        "page_tokens": 256,
        "pool_tokens": 1 << 13,
        "layers": 5,
        "window": 128,
    },
}


class Users:
    """Users of an engine: conversations that share beginnings, grow, and come back."""

    def __init__(self, engine: TreeEngine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.served = 0
        self.page = engine.shape.page_tokens
        self.longest = engine.shape.pool_tokens // 4
        self.systems = [self._tokens(self.rng.randrange(8, self.longest // 2)) for _ in range(4)]
        self.conversations: list[list[int]] = []

    def act(self, operations: int) -> None:
        """Do so many, drawn at random. After each of them every slot of every pool is free or the
        tree's; at the end nothing but the tree holds one."""
        nothing = dict.fromkeys(self.engine.pools.total(), 0)
        for number in range(operations):
            self.act_once()
            assert self.engine.unaccounted() == nothing, f"after operation {number}"
            if number % 50 == 49:
                self.engine.tree.sanity_check()
        self.engine.drain()
        self.engine.tree.sanity_check()
        self.engine.evict(window_tokens=1 << 30, states=1 << 10)
        assert self.engine.pools.free() == self.engine.pools.total()

    def act_once(self) -> None:
        action = self.rng.choices(
            [self.serve, self.serve_batch, self.serve_in_chunks, self.evict, self.wait, self.flush],
            weights=[50, 15, 10, 15, 9.7, 0.3],
        )[0]
        action()

    def serve(self) -> None:
        self.engine.step()
        running = self._admit()
        self.engine.forward(running)
        self._finish(running)

    def serve_batch(self) -> None:
        self.engine.step()
        batch = [self._admit() for _ in range(self.rng.randrange(2, 4))]
        self.engine.forward(*batch)
        for running in batch:
            self._finish(running)

    def serve_in_chunks(self) -> None:
        self.engine.step()
        running = self._admit()
        self.engine.forward_in_chunks(running, max(16, self.page) * self.rng.randrange(1, 6))
        self._finish(running)

    def evict(self) -> None:
        """Other requests need the device's memory."""
        everything = self.rng.random() < 0.3
        share = 1 << 30 if everything else self.rng.randrange(self.longest)
        self.engine.evict(share, window_tokens=share, states=1 << 10 if everything else 1)

    def wait(self) -> None:
        self.engine.drain()

    def flush(self) -> None:
        self.engine.drain()
        self.engine.flush_cache()

    def _admit(self) -> Running:
        self.served += 1
        return self.engine.admit(f"request {self.served}", self._prompt())

    def _finish(self, running: Running) -> None:
        assert not running.aborted
        if self.rng.random() < 0.3:
            self.engine.decode(running, self._tokens(self.rng.randrange(1, max(24, 2 * self.page))))
        assert running.wrong == 0
        self.engine.finish(running)
        self.conversations.append(list(running.tokens))
        del self.conversations[:-40]

    def _prompt(self) -> list[int]:
        """A conversation so far and a new turn, or a new one; sometimes only part of an old one."""
        draw = self.rng.random()
        if draw < 0.1:
            history = []
        elif draw < 0.7 and self.conversations:
            history = self.rng.choice(self.conversations)
            if draw < 0.25:
                history = history[: self.rng.randrange(1, len(history) + 1)]
        else:
            history = self.rng.choice(self.systems)
        turn = self._tokens(self.rng.randrange(1, max(80, 3 * self.page)))
        return [*history[: self.longest - len(turn)], *turn]

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(50_000) for _ in range(count)]
