"""One rank with a model's KV and no model: backs up and restores batches of pages through a real
daemon, and reads what the daemon's copier took for them."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tierd.cli.daemon import ask
from tierd.wire.errors import TierdError
from tierd.wire.limits import KEY_BYTES, PROTOCOL_VERSION
from tierd.wire.messages import ClearRequest, Done, Status, StatusRequest
from tierd_client.bench.models import DeviceMemory
from tierd_client.client import TierClient
from tierd_client.pools import DevicePool, PoolPages
from tierd_client.restore import Restore

PATIENCE_S = 60.0
WATCHDOG_S = 10.0
SETTLED_S = 0.15
"""Memory that no pool has claimed for so long is no longer being pinned for one."""
STALLED_S = 3.0


class BenchFailedError(TierdError):
    """The tier did not do what was to be measured; the text says what."""


class Totals(NamedTuple):
    """What the daemon's copiers have moved so far, and how long their jobs took."""

    backup_bytes: int
    backup_s: float
    restore_bytes: int
    restore_s: float

    def since(self, earlier: Totals) -> Totals:
        """What has been moved since an earlier look."""
        return Totals(
            self.backup_bytes - earlier.backup_bytes,
            self.backup_s - earlier.backup_s,
            self.restore_bytes - earlier.restore_bytes,
            self.restore_s - earlier.restore_s,
        )


@dataclass(frozen=True)
class Chain:
    """A prompt: its pages' keys, and where the pages of each pool lie on the device.

    `parts`: what a backup of it carries. `places`: slots elsewhere, of what a restore brings back.
    """

    rid: str
    keys: bytes
    parts: list[PoolPages]
    places: list[PoolPages]


class BenchRank:
    """A rank of an engine of its own, connected.

    Args:
        socket: Of the daemon.
        memory: Its pools.
        page_tokens: Of its pages.
        namespace: Ranks of one name share pages, and what is pinned for them.
        forward_stream: As `TierClient`.
        seed: For the places of pages.

    Raises: BenchFailedError: the daemon does not take it. RefusedError: as `TierClient`.
    """

    def __init__(
        self,
        socket: str,
        memory: DeviceMemory,
        page_tokens: int,
        namespace: str,
        forward_stream: torch.cuda.Stream | None = None,
        seed: int = 0,
    ) -> None:
        self.page_tokens = page_tokens
        self.pools = memory.pools(page_tokens)
        self._socket = Path(socket)
        self._device = memory.device
        self._rng = np.random.default_rng(seed)
        self._numbers = 0
        self._name = uuid.uuid4().hex
        self.client = TierClient(
            socket,
            self.pools,
            namespace={"bench": namespace},
            instance=self._name,
            forward_stream=forward_stream,
        )
        if not self.client.connect(PATIENCE_S):
            raise BenchFailedError("the daemon does not take the benchmark's rank")

    def __enter__(self) -> BenchRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def page_bytes(self) -> dict[str, int]:
        """By pool, bytes of a page."""
        return {
            pool.name: sum(b.tensor.shape[1] * pool.page_tokens for b in pool.buffers)
            for pool in self.pools
        }

    # --- what is copied -----------------------------------------------------------------------

    def chains(self, count: int, pages: int, run: int) -> list[Chain]:
        """Prompts that nobody has seen.

        Args:
            count: Prompts.
            pages: Of each prompt's KV.
            run: Pages that lie side by side on the device; the runs are shuffled.
        """
        found = []
        slots = {p.name: self._places(p, count * self._kept(p, pages), run) for p in self.pools}
        elsewhere = {p.name: self._places(p, count * self._kept(p, pages), run) for p in self.pools}
        for number in range(count):
            self._numbers += 1
            keys = os.urandom(KEY_BYTES * pages)
            parts, places = [], []
            for pool in self.pools:
                kept = self._kept(pool, pages)
                length = kept * pool.page_tokens
                tail = keys[-kept * KEY_BYTES :]
                mine = slice(number * length, (number + 1) * length)
                parts.append(PoolPages(pool.name, tail, slots[pool.name][mine]))
                places.append(PoolPages(pool.name, tail, elsewhere[pool.name][mine]))
            found.append(Chain(f"bench-{self._numbers}", keys, parts, places))
        return found

    def renamed(self, chain: Chain) -> Chain:
        """The same places of the device under keys that nobody has seen. Costs next to nothing."""
        self._numbers += 1
        keys = os.urandom(len(chain.keys))
        parts = [part._replace(keys=keys[-len(part.keys) :]) for part in chain.parts]
        places = [part._replace(keys=keys[-len(part.keys) :]) for part in chain.places]
        return Chain(f"bench-{self._numbers}", keys, parts, places)

    def _kept(self, pool: DevicePool, pages: int) -> int:
        """Of a prompt, the pages in a pool: all of the KV, one window, one state."""
        return min(pool.window, pages) if pool.window else pages

    def _places(self, pool: DevicePool, count: int, run: int) -> torch.Tensor:
        """Token slots of `count` pages in shuffled runs. Shape: (count * page_tokens,)."""
        run = 1 if pool.window else run
        have = len(pool.buffers[0].tensor) // pool.page_tokens
        starts = self._rng.permutation(have // run)[: -(-count // run)] * run
        pages = (starts[:, None] + np.arange(run)).reshape(-1)[:count]
        if len(pages) < count:
            raise BenchFailedError(f"{count} pages do not fit in a pool of {have}")
        slots = (pages[:, None] * pool.page_tokens + np.arange(pool.page_tokens)).reshape(-1)
        return torch.from_numpy(slots.astype(np.int64)).to(self._device)

    # --- copies -------------------------------------------------------------------------------

    def offer(self, chains: Sequence[Chain]) -> None:
        """Back these prompts up, as one step."""
        for chain in chains:
            self.client.backup(chain.parts, parent=b"")
        self.client.flush()

    def await_acks(self, count: int) -> None:
        """Raises: BenchFailedError: one was not kept, or they do not come."""
        deadline = time.monotonic() + PATIENCE_S
        while count:
            for ack in self.client.acks():
                if not ack.kept:
                    raise BenchFailedError("the tier has not kept a backup")
                count -= 1
            if time.monotonic() > deadline:
                raise BenchFailedError("the tier does not answer a backup")
            self.client.flush()

    def lookup(self, chains: Sequence[Chain]) -> None:
        """Lease them all. A new client finds nothing until its watchdog is up.

        Raises: BenchFailedError: one is not there.
        """
        deadline = time.monotonic() + WATCHDOG_S
        for chain in chains:
            lengths = self.client.lookup(chain.rid, chain.keys)
            while not lengths and time.monotonic() < deadline:
                lengths = self.client.lookup(chain.rid, chain.keys)
            if not lengths or lengths[-1] * KEY_BYTES != len(chain.keys):
                raise BenchFailedError(
                    f"of {len(chain.keys) // KEY_BYTES} pages the tier can restore {lengths}"
                )

    def restore(self, chains: Sequence[Chain]) -> Restore:
        """Load these prompts to the other places, as one step."""
        return self.client.restore({chain.rid: chain.places for chain in chains})

    # --- the daemon ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The daemon's status, as `tierd.control.status` documents it."""
        return ask(self._socket, StatusRequest(protocol=PROTOCOL_VERSION), Status).data

    def totals(self) -> Totals:
        """What the daemon's copiers have moved so far."""
        copiers = self.status()["copiers"]
        return Totals(
            sum(copier["backup_bytes"] for copier in copiers),
            sum(copier["backup_seconds"] for copier in copiers),
            sum(copier["restore_bytes"] for copier in copiers),
            sum(copier["restore_seconds"] for copier in copiers),
        )

    def paths(self) -> dict[str, str]:
        """The copy path of each pool of this rank."""
        status = self.status()
        (mine,) = (s for s in status["sessions"] if s["instance"] == self._name)
        return {
            pool["pool"]: pool["copy_path"]
            for pool in status["pools"]
            if pool["namespace"] == mine["namespace"]
        }

    def clear(self) -> None:
        """Drop all pages; what is pinned for them stays."""
        ask(self._socket, ClearRequest(protocol=PROTOCOL_VERSION), Done)

    def await_pinned(self) -> None:
        """Wait until the tier has pinned what it pins ahead of use, or gets no further.

        Raises: BenchFailedError: it does not come to an end.
        """
        deadline = time.monotonic() + PATIENCE_S
        since, before = time.monotonic(), -1
        while True:
            memory, now = self.status()["memory"], time.monotonic()
            if memory["pinned_bytes"] >= memory["pin_ahead_bytes"]:
                return
            if memory["pinned_bytes"] != before:
                since, before = now, memory["pinned_bytes"]
            elif now - since > STALLED_S:
                return
            if now > deadline:
                raise BenchFailedError("the tier does not get its memory pinned")
            time.sleep(SETTLED_S)

    def settle(self, prompts: int, pages: int) -> None:
        """Have the tier's pool hold prompts like these, twice over (it leases no more than half of
        a pool), and wait until nothing is pinned for it any more.

        Raises: BenchFailedError: it does not come to an end.
        """
        deadline = time.monotonic() + PATIENCE_S
        before: tuple[int, int] | None = None
        for _ in range(2):
            self.offer(self.chains(prompts, pages, 1))
            self.await_acks(prompts)
        while True:
            memory = self.status()["memory"]
            now = memory["claimed_bytes"], memory["pinned_bytes"]
            if now == before:
                return
            if time.monotonic() > deadline:
                raise BenchFailedError("the tier does not come to rest")
            before = now
            time.sleep(SETTLED_S)
