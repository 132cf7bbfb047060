"""A miniature engine: prefix cache on the device, the daemon's tier behind it, every byte checked.

It does with `TierClient` what an inference engine does: match, look up, restore, compute, back up,
flush once a step, drain acks. All ranks of the group run the same steps; what could differ between
them is reduced to its minimum over the group first.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tierd_client import PoolPages, TierClient
from tierd_client.demo.cache import DeviceCache
from tierd_client.demo.pages import DevicePages
from tierd_client.demo.workload import Request

ACK_TIMEOUT_S = 60.0
"""A daemon that neither keeps nor sheds a backup for so long is broken."""
_IDLE_S = 0.0005

Minimum = Callable[[Sequence[int]], list[int]]
"""The least of each number over all ranks of the group; every rank calls it at the same places."""


@dataclass
class Counts:
    """What one rank saw. Pages are counted once for the group, bytes are this rank's."""

    device_hits: int = 0
    lost: int = 0
    """Pages that had been computed before and were gone from the device when asked for."""
    restored: int = 0
    restores_failed: int = 0
    kept: int = 0
    shed: int = 0
    bytes_checked: int = 0
    bytes_wrong: int = 0
    enqueue_s: list[float] = field(default_factory=list)
    """Time in `backup` and `flush` together, a step."""


@dataclass(frozen=True)
class _Planned:
    """One request of a step: its pages on the device are held, restored, then computed."""

    request: Request
    held: int
    restored: int

    @property
    def tail(self) -> Sequence[bytes]:
        return self.request.keys[self.held :]

    @property
    def to_restore(self) -> Sequence[bytes]:
        return self.tail[: self.restored]

    @property
    def to_compute(self) -> Sequence[bytes]:
        return self.tail[self.restored :]


class Engine:
    """One rank.

    Args:
        forward: The stream that computes, on CUDA; pages are written and read there.
    """

    def __init__(
        self,
        client: TierClient,
        pages: DevicePages,
        minimum: Minimum,
        forward: torch.cuda.Stream | None,
    ) -> None:
        self.client = client
        self.pages = pages
        self.cache = DeviceCache(pages.geometry.pages)
        self.counts = Counts()
        self._minimum = minimum
        self._forward = forward
        self._acks: deque[bool] = deque()
        self._pending: deque[Sequence[bytes]] = deque()
        self._wrong = torch.zeros((), dtype=torch.int64, device=pages.device)

    def step(self, batch: Sequence[Request]) -> None:
        """Serve one turn of each of these conversations."""
        planned = [self._plan(request) for request in batch]
        self._restore([plan for plan in planned if plan.restored])
        with self._computing():
            for plan in planned:
                if plan.to_compute:
                    self.pages.compute(self.cache.pages(plan.to_compute), plan.to_compute)
        self._backup(planned)
        for plan in planned:
            self.cache.touch(plan.request.keys)
            self.cache.unlock(plan.request.keys)
        self._drain()

    def finish(self) -> None:
        """Wait until every backup is acked, then check every page on the device.

        Raises: TimeoutError: a backup is never acked.
        """
        self._drain_until(lambda: not self._pending)
        keys, pages = self.cache.items()
        with self._computing():
            for layer in range(self.pages.geometry.layers):
                self._wrong += self.pages.wrong_bytes(pages, keys, layer)
            self.counts.bytes_wrong = int(self._wrong.item())
        self.counts.bytes_checked += len(keys) * self.pages.geometry.page_bytes

    def _plan(self, request: Request) -> _Planned:
        """Decide what is restored and what computed, and give it device pages.

        Keys are on the device from here on as far as later requests of the step are concerned:
        all restores land before anything is computed.
        """
        keys, counts = request.keys, self.counts
        held = self.cache.held_prefix(keys)
        self.cache.lock(keys[:held])
        tail = keys[held:]
        restored = 0
        if tail:
            lengths = self.client.lookup(request.rid, b"".join(tail))
            (restored,) = self._minimum([max(lengths, default=0)])
            if lengths and not restored:
                self.client.cancel(request.rid)
        counts.device_hits += held
        counts.lost += max(0, len(tail) - request.new)
        self._drain_until(lambda: self.cache.can_take(len(tail)))
        self.cache.take(tail)
        self.cache.lock(tail)
        return _Planned(request, held, restored)

    def _restore(self, planned: Sequence[_Planned]) -> None:
        """Load what was found, layer by layer, and check every byte of it."""
        if not planned:
            return
        keys = [key for plan in planned for key in plan.to_restore]
        pages = self.cache.pages(keys)
        with self._computing():
            self.pages.poison(pages)
        restore = self.client.restore(
            {plan.request.rid: [self._pool_pages(plan.to_restore)] for plan in planned}
        )
        with self._computing():
            before = self._wrong.clone()
            for layer in range(self.pages.geometry.layers):
                restore.wait_layer(layer)
                self._wrong += self.pages.wrong_bytes(pages, keys, layer)
        (landed,) = self._minimum([restore.finish()])
        if landed:
            self.counts.restored += len(keys)
            self.counts.bytes_checked += len(keys) * self.pages.geometry.page_bytes
        else:
            self.counts.restores_failed += 1
            with self._computing():
                self._wrong.copy_(before)
                self.pages.compute(pages, keys)

    def _backup(self, planned: Sequence[_Planned]) -> None:
        """Offer each request's tail as one node of the prefix tree, restored pages included: an
        engine's tree does not know which of them the tier holds already."""
        nodes = [(plan, self._pool_pages(plan.tail)) for plan in planned if plan.tail]
        started = time.perf_counter()
        for plan, pool_pages in nodes:
            parent = plan.request.keys[plan.held - 1] if plan.held else b""
            self.client.backup([pool_pages], parent=parent)
        self.client.flush()
        self.counts.enqueue_s.append(time.perf_counter() - started)
        for plan, _ in nodes:
            self.cache.lock(plan.tail)
            self._pending.append(plan.tail)

    def _drain(self) -> None:
        """Take the acks that every rank has, in order, and unlock their pages."""
        self._acks.extend(ack.kept for ack in self.client.acks())
        (ready,) = self._minimum([len(self._acks)])
        if not ready:
            return
        for kept in self._minimum([self._acks.popleft() for _ in range(ready)]):
            keys = self._pending.popleft()
            self.cache.unlock(keys)
            if kept:
                self.counts.kept += len(keys)
            else:
                self.counts.shed += len(keys)

    def _drain_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ACK_TIMEOUT_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(self._pending)} backups without an ack for {ACK_TIMEOUT_S:.0f} s"
                )
            self.client.flush()
            self._drain()
            time.sleep(_IDLE_S)

    def _pool_pages(self, keys: Sequence[bytes]) -> PoolPages:
        return PoolPages("kv", b"".join(keys), self.pages.slots(self.cache.pages(keys)))

    def _computing(self) -> contextlib.AbstractContextManager[object]:
        """The forward stream, after what the current one has been given, on CUDA."""
        if self._forward is None:
            return contextlib.nullcontext()
        self._forward.wait_stream(torch.cuda.current_stream())
        on_forward: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._forward)
        return on_forward
