"""The linker: SGLang's radix tree on one side, a tierd client on the other.

Everything here runs on the scheduler thread. `offload()` appends to lists; what the step has
gathered goes out once an iteration, in `num_completed_offloads()`, which SGLang calls then.
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import msgspec
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from tierd.wire.errors import ConfigError, RefusedError
from tierd_client.client import TierClient
from tierd_client.outbox import Need
from tierd_client.pools import PoolPages
from tierd_client.sglang import weights
from tierd_client.sglang.counter import RestoreCounter
from tierd_client.sglang.group import Offer, agree, group_of, host_id
from tierd_client.sglang.namespace import namespace, process_start_s
from tierd_client.sglang.plugin.tree import ActivePlugin
from tierd_client.sglang.plugin.tree import features as plugin_features
from tierd_client.sglang.pools import MAMBA, EnginePools, engine_pools
from tierd_client.sglang.support import refusals
from tierd_client.sglang.tree import Prefix, Tree

log = logging.getLogger(__name__)

PACKED_NODES = 32
"""So many are made ready for the flush when the next one comes, so that what a flush does for each
node is bounded. To do it more often makes the step as a whole slower (tierd/bench/README.md)."""
_FAILED_HERE = -1
"""In place of its pages: an `offload()` that the client was not told of."""


class LinkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`linker_extra_config` of `--unified-cache-external-linker-config`.

    Attributes:
        socket: The daemon's lifeline socket; null for the user's default one.
        arena: Whether the plugin, if it is there, puts each KV pool into one allocation.
        lookup_timeout_s: What the scheduler waits for the answer to a lookup at most.
    """

    socket: str | None = None
    arena: bool = True
    lookup_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=600.0)] = 0.2


@dataclass
class LinkerStats:
    """What went through a linker since it was made, in pages."""

    offered: int = 0
    kept: int = 0
    looked_up: int = 0
    restored: int = 0
    restores_failed: int = 0


class TierdLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """A `UnifiedCacheLinker` (SGLang 0.5.23), for the pools that `engine_pools` knows.

    One a rank. Backs up every node that the tree offers, and restores prefixes that it has lost.
    Without a daemon it serves misses and connects when one comes.

    Once the engine's weights change, the tier stays closed to the engine (lookups miss, backups
    fail) until the engine flushes its cache: until then the tree holds, and offers, KV of the old
    weights.

    Args:
        server_args: SGLang's `ServerArgs`; None where there is no server (nothing is shared then).
        params: SGLang's `CacheInitParams`.
        components: The tree's components.
        extra_config: The fields of `LinkerConfig`.
        forward_stream: The stream on which the forward pass writes KV.

    Raises:
        RefusedError: an engine that tierd cannot serve, on every rank alike; or a daemon that
            refuses it. The text says what to change.
        ConfigError: `extra_config` has an unknown or ill-typed field.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any | None = None,
    ) -> None:
        config = _parse(extra_config or {})
        self.forward_stream = forward_stream
        found: EnginePools | None = None
        refusal = "; ".join(refusals(server_args, params))
        if not refusal:
            try:
                found = engine_pools(params, components)
            except RefusedError as error:
                refusal = str(error)
        instance = uuid.uuid4().hex
        features = plugin_features()
        group = agree(
            group_of(params),
            Offer(
                refusal=refusal,
                host=host_id(),
                geometry=found.describe() if found else "",
                instance=instance,
                namespace=namespace(
                    server_args,
                    formats=found.formats if found else {},
                    instance=instance,
                    started_s=process_start_s(),
                ),
                features=features,
            ),
        )
        assert found is not None  # agree() raises where there is none
        weights.watch(self)
        self.pools = {PoolName(pool.name): pool for pool in found.pools}
        self._page_tokens = self.pools[PoolName.KV].page_tokens
        self.stats = LinkerStats()
        self.layer_done_counter = RestoreCounter(found.num_layers)
        # The transfers of each `offload()` since the last time they were packed.
        self._queued: list[list[Any]] = []
        # The pages of each `offload()` whose result the tree waits for, in order.
        self._outstanding: deque[int] = deque()
        self._results: deque[bool] = deque()
        self._loads: dict[str, list[PoolPages]] = {}
        self._loading = 0
        self._tree = Tree()
        self.plugin = ActivePlugin(features, group.features, group.world_size)
        self._weights_are_stale = False
        if "private" in group.namespace:
            log.warning(
                "tierd: no other engine can hit these pages: %s", group.namespace["private"]
            )
        self.client = TierClient(
            config.socket,
            found.pools,
            namespace=group.namespace,
            instance=group.instance,
            rank=group.rank,
            world_size=group.world_size,
            forward_stream=forward_stream,
            supplies=True,
            lookup_timeout_s=config.lookup_timeout_s,
        )
        self.client.connect()
        if PoolName(MAMBA) in self.pools:
            # SGLang tells its KV pool of the counter, but not the pool of the states.
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    # --- device to host ---------------------------------------------------------------------

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue a node's pages. Always True: the ranks must agree, and what cannot be kept is
        reported as failed later."""
        if len(self._queued) >= PACKED_NODES:
            self._pack()
        self._queued.append(transfers)
        return True

    def num_completed_offloads(self) -> int:
        """Send what was queued since the last scheduler iteration, and collect results."""
        if not self._tree.is_known:
            # The contract does not introduce the tree's wrapper; this is its call.
            self._tree.meet(sys._getframe(1).f_locals.get("self"))
        self._tree.drop_stale_hit_markers()
        self._pack()
        self.client.flush()
        for need in self.client.needs():
            self._supply(need)
        self._collect()
        return len(self._results)

    def flush(self) -> None:
        """Send what was queued now: the step is over. Without the plugin nobody calls this."""
        if self._queued:
            self._pack()
            self.client.flush()

    def pop_completed_offload(self) -> bool:
        """The oldest result: whether the node's pages are kept."""
        return self._results.popleft()

    def _pack(self) -> None:
        """Hand what is queued to the client, for its next flush."""
        if not self._queued:
            return
        queued, self._queued = self._queued, []
        pages = [len(transfers[0].keys) for transfers in queued]
        self.stats.offered += sum(pages)
        if self._weights_are_stale:
            self._outstanding.extend([_FAILED_HERE] * len(pages))
            return
        origins = self._tree.origins(pages, self._page_tokens)
        named = [[transfer for transfer in transfers if transfer.keys] for transfers in queued]
        flat = list(chain.from_iterable(named))
        parts = self.client.parts(
            [transfer.name for transfer in flat],  # SGLang's names of pools are strings
            [transfer.keys for transfer in flat],
            [transfer.device_indices for transfer in flat],
        )
        self.client.backup_nodes(parts, list(map(len, named)), *origins)
        self._outstanding.extend(pages)

    def _supply(self, need: Need) -> None:
        """The tier has evicted what comes before a node, which the tree will not offer again."""
        prefix = self._tree.prefix(need.node_id, self._page_tokens)
        pages = [] if prefix is None else [_kv_pages(prefix)]
        self.client.supply(need.seq, pages)

    def _collect(self) -> None:
        acks = iter(self.client.acks())
        while self._outstanding:
            pages = self._outstanding[0]
            if pages == _FAILED_HERE:
                self._results.append(False)
            elif (ack := next(acks, None)) is not None:
                self.stats.kept += pages * ack.kept
                self._results.append(ack.kept)
            else:
                return
            self._outstanding.popleft()

    # --- host to device ---------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Prefix lengths of the tail, in pages, that every rank can restore; few of them."""
        hashes = transfers[0].keys
        self.stats.looked_up += len(hashes)
        if self._weights_are_stale:
            return []
        pools = [t.name for t in transfers]
        return self.client.lookup(rid, hashes, pools)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Queue a restore of what a lookup found. The answer depends on nothing that could
        differ between ranks: what fails after all is reported by `finish_layer_wise_loading`.

        Raises: RuntimeError: the request has a queued load already; SGLang makes one at a time.
        """
        if self._weights_are_stale:
            return False
        if rid in self._loads:
            raise RuntimeError(f"request {rid} has a queued load already")
        self._loads[rid] = [_pages(transfer) for transfer in transfers]
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """True if the load had not been started, and will not be."""
        if self._loads.pop(rid, None) is None:
            return False
        self.client.cancel(rid)
        return True

    def release(self, rid: str) -> None:
        """What a lookup has leased for this request will not be loaded, unless a load is queued
        already. Without the plugin nobody calls this, and the lease runs out."""
        if rid not in self._loads:
            self.client.cancel(rid)

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads as one restore. Returns: its index in the layer counter, or -1
        if there is none."""
        if not self._loads:
            return -1
        loads, self._loads = self._loads, {}
        self._loading = sum(len(parts[0].keys) for parts in loads.values())
        return self.layer_done_counter.start(self.client.restore(loads))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until nothing writes the restore's pages any more; True if all of them landed."""
        landed = self.layer_done_counter.finish(counter_index)
        if landed:
            self.stats.restored += self._loading
        else:
            self.stats.restores_failed += self._loading
        self._loading = 0
        return landed

    # --- never stale, and the end -----------------------------------------------------------

    def weights_change(self) -> None:
        """Close the tier to this engine until its cache is flushed.

        The tree keeps waiting for what it has offered, so that is reported as failed, in order.
        """
        if self._weights_are_stale:
            return
        self._weights_are_stale = True
        self._pack()
        self.client.reset(keep_pending=True)
        log.warning(
            "tierd: the engine's weights change, and its cache holds KV of the old ones; "
            "the tier is closed to it until the cache is flushed (POST /flush_cache)"
        )

    def reset(self) -> None:
        """Forget everything and start an epoch that no other engine can hit, and no later one.

        The tree has dropped its pending offloads, so none of them gets a result.
        """
        self._loads.clear()
        self.layer_done_counter.reset()
        self._queued.clear()
        self._outstanding.clear()
        self._results.clear()
        self.client.reset()
        self._weights_are_stale = False

    def close(self) -> None:
        """Leave the daemon. Pages stay there for the next engine."""
        weights.unwatch(self)
        self._loads.clear()
        self.layer_done_counter.reset()
        self._queued.clear()
        self.client.close()


def _parse(extra_config: Mapping[str, Any]) -> LinkerConfig:
    try:
        return msgspec.convert(dict(extra_config), LinkerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"linker_extra_config: {error}") from None


def _kv_pages(prefix: Prefix) -> PoolPages:
    return PoolPages(PoolName.KV, prefix.hashes, prefix.slots)


def _pages(transfer: Any) -> PoolPages:
    """A transfer's pages; SGLang's page hashes are 64 hexadecimal digits each."""
    return PoolPages(transfer.name, transfer.keys, transfer.device_indices)
