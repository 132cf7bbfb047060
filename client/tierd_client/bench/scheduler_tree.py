"""SGLang's tree over pools of its own, with one of four tiers behind it, driven as a scheduler
drives it when requests come and finish. Nothing is computed: what a page holds costs no
scheduler any time."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch

from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_pools import EngineShape, TreePools

TierName = Literal["none", "noop", "hicache", "tierd"]
TIERS: tuple[TierName, ...] = get_args(TierName)

HOST_POOL_RATIO = 2.0
"""HiCache's host pool, in sizes of the device's."""
FIRST_PAUSE_S = 0.005
"""Before the first look for acks."""
DRAIN_TIMEOUT_S = 60.0

WITHOUT_GPU = (
    "HiCache without a GPU: its copies are left out, and its host memory is not pinned, because "
    "SGLang does both with CUDA alone. Its bookkeeping runs: host slots, eviction, locks, merged "
    "transfer lists, acks."
)


class SchedulerTree:
    """One rank's cache. A context manager.

    Args:
        tier: What is behind the tree: nothing, a linker that keeps nothing, HiCache with
            write-through, or the daemon on `socket`.
        lookup_timeout_s: What tierd's linker waits for the answer to a lookup.

    Raises: RefusedError: the daemon refuses this engine.
    """

    def __init__(
        self, tier: TierName, shape: EngineShape, socket: str, lookup_timeout_s: float = 0.2
    ) -> None:
        self.tier = tier
        self._lookup_timeout_s = lookup_timeout_s
        self.shape = shape
        self._sg = load_sglang()
        self._acks_seen = 0
        self._stack = ExitStack()
        try:
            with self.settings():
                self.pools = TreePools(self._sg, shape)
                self.tree = self._new_tree(socket)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> SchedulerTree:
        return self

    def __exit__(self, *_: object) -> None:
        with self.settings():
            self._stack.close()

    @property
    def linker(self) -> Any:
        """The `UnifiedCacheLinker`; None where there is none."""
        return None if self.tree.linker is None else self.tree.linker.cache_linker

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """SGLang's process-wide settings are this engine's while it is open. Use the tree only
        then."""
        fields: dict[str, Any] = {
            "page_size": self.shape.page_tokens,
            "_mamba_cache_chunk_size": 64,
        }
        if self.tier == "hicache":
            fields |= {
                "enable_hierarchical_cache": True,
                "hicache_write_policy": "write_through",
                "hicache_io_backend": "kernel",
                # SGLang's default, which the states' host pool needs, has copies for CUDA alone.
                "hicache_mem_layout": (
                    "layer_first"
                    if self.shape.device == "cpu" and not self.shape.states
                    else "page_first"
                ),
                "hicache_ratio": HOST_POOL_RATIO,
                "hicache_size": 0,
            }
        elif self.tier != "none":
            fields["enable_unified_cache_external_linker"] = True
        with self._sg.get_context().override_server_args(**fields):
            yield

    @contextlib.contextmanager
    def noop_instead(self) -> Iterator[None]:
        """A linker that keeps nothing is in the place of this tree's own while it is open: what
        the same tree, with all that it holds, costs without the tier. No node may wait for an ack.
        """
        wrapper = self.tree.linker
        own, wrapper.cache_linker = wrapper.cache_linker, self._new_noop()
        try:
            yield
        finally:
            wrapper.cache_linker = own

    # --- a request's life -------------------------------------------------------------------

    def new_request(self, rid: str, tokens: Sequence[int]) -> Any:
        """SGLang's `Req` for a prompt."""
        sampling = self._sg.SamplingParams(max_new_tokens=1)
        sampling.normalize(None)
        return self._sg.Req(rid, "", array("q", tokens), sampling)

    def match(self, request: Any) -> int:
        """What the scheduler does with a request that waits. Returns: the tokens found in any
        tier."""
        request.init_next_round_input(self.tree)
        return int(request.prefix_len + request.host_hit_length)

    def forget(self, request: Any) -> None:
        """A matched request leaves without having run."""
        if self.tree.linker is not None:
            self.tree.linker.release_request(request.rid)
        if self.tier == "tierd":
            self.linker.client.cancel(request.rid)

    def admit(self, request: Any) -> None:
        """Give a matched request its slots, as if all its prompt had been computed. Evicts what it
        must.

        Raises: ValueError: a part of its prompt is on the device already.
        """
        tokens = len(request.origin_input_ids)
        fresh = tokens - request.prefix_len
        if fresh != tokens:
            raise ValueError(f"request {request.rid} has a cached prefix; it should have none")
        request.lock = self.tree.lock(request.last_node)
        slots = self._allocate(tokens)
        if self.shape.states and not self.pools.free()["state"]:
            self._evict(0, states=1)
        self.pools.requests.alloc([request])
        row = self.pools.requests.req_to_token[request.kv.req_pool_idx]
        row[:tokens] = slots.to(row.dtype)
        request.extend_end = tokens
        request.kv.kv_committed_len = request.kv.kv_allocated_len = tokens
        request.finished_reason = self._sg.FINISH_LENGTH(length=0)

    def finish(self, request: Any) -> None:
        """The finish path: the request's KV goes to the tree, which offers it to the tier."""
        self._sg.release_kv_cache(request, self.tree, checkpoint=True)

    def submit(self) -> None:
        """What hands a step's new nodes to the tier: for a linker the next iteration's look at the
        acks, for HiCache the end of the step's processing."""
        if self.tree.linker is None:
            self.tree.flush_pending_backups()
        else:
            self.tree.check_hicache_events()

    def pending(self) -> int:
        """Nodes that wait for an ack, and are locked until then."""
        if self.tier == "hicache":
            return sum(len(ack.node_ids) for ack in self.tree.cache_controller.ack_write_queue)
        return 0 if self.tree.linker is None else len(self.tree.linker.pending_offloads)

    def drain(self) -> int:
        """Wait until every ack is here, then take them all in one iteration, as an engine does
        whose step is longer than the tier needs. Returns: nanoseconds spent reading acks and in
        that iteration.

        Raises: TimeoutError: some acks did not come.
        """
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        pause_s = FIRST_PAUSE_S
        spent = 0
        while self.pending():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.pending()} nodes wait for an ack for too long")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)  # few looks, so that most acks come in one
            took, all_here = self._look_for_acks()
            spent += took
            if all_here:
                start = time.perf_counter_ns()
                self.tree.check_hicache_events()
                spent += time.perf_counter_ns() - start
        return spent

    def _look_for_acks(self) -> tuple[int, bool]:
        """Nanoseconds spent if there were new ones, and whether all are here."""
        if self.tier == "hicache":
            queue = self.tree.cache_controller.ack_write_queue
            return 0, all(ack.finish_event.query() for ack in queue)
        start = time.perf_counter_ns()
        found = self.linker.num_completed_offloads()
        took = time.perf_counter_ns() - start
        new, self._acks_seen = found > self._acks_seen, found
        all_here = found >= self.pending()
        if all_here:
            self._acks_seen = 0
        return took if new else 0, all_here

    def evict_all(self) -> None:
        """Empty the device's part of the tree."""
        total = 1 << 40
        self._evict(total, windows=total if self.shape.window else 0, states=self.shape.states)

    def settle(self) -> None:
        """Let the GPU come to rest, so that what follows pays for itself alone."""
        if self.shape.device != "cpu":
            torch.cuda.synchronize()

    # --- inside -----------------------------------------------------------------------------

    def _new_tree(self, socket: str) -> Any:
        sg = self._sg
        params = sg.CacheInitParams(
            disable=False,
            req_to_token_pool=self.pools.requests,
            token_to_kv_pool_allocator=self.pools.allocator,
            page_size=self.shape.page_tokens,
            sliding_window_size=self.shape.window or None,
            tree_components=self.pools.components,
            tree_core_backend=self.shape.core,
        )
        tree = sg.UnifiedRadixCache(params)
        if self.tier == "hicache":
            self._attach_hicache(tree, params)
        elif self.tier != "none":
            tree.init_cache_linker(self._new_linker(params, socket))
            self._stack.callback(tree.linker.close)
        return tree

    def _new_linker(self, params: Any, socket: str) -> Any:
        components = set(self.pools.components)
        if self.tier == "tierd":
            from tierd_client.sglang.linker import TierdLinker

            config = {"socket": socket, "lookup_timeout_s": self._lookup_timeout_s}
            return TierdLinker(None, params, components=components, extra_config=config)
        from sglang.srt.mem_cache.hicache_storage import PoolName

        from tierd_client.sglang.pools import engine_pools

        pools = engine_pools(params, components).pools
        return self._new_noop({PoolName(pool.name): pool for pool in pools})

    def _new_noop(self, pools: dict[Any, object] | None = None) -> Any:
        """Args: `pools`: those that it would carry; None is this tree's linker's."""
        from tierd_client.bench.noop_linker import NoopLinker

        return NoopLinker(self.linker.pools if pools is None else pools)

    def _attach_hicache(self, tree: Any, params: Any) -> None:
        """Attach HiCache; where there is no GPU, without what `WITHOUT_GPU` says."""
        from sglang.srt.mem_cache.pool_host import common
        from sglang.srt.runtime_context import get_server_args

        if self.shape.device != "cpu":
            tree.init_hicache(get_server_args(), params)
        else:
            pin, common._cuda_host_register = common._cuda_host_register, lambda *_: None
            try:
                tree.init_hicache(get_server_args(), params)
            finally:
                common._cuda_host_register = pin
            for entry in tree.host_pool_group.entries:
                entry.host_pool.backup_from_device_all_layer_physical = lambda *_: None
        self._stack.callback(tree.release_host_resources)

    def _allocate(self, tokens: int) -> torch.Tensor:
        free = self.pools.free()
        short = max(0, tokens - free["full"])
        short_windows = max(0, tokens - free.get("swa", tokens))
        if short or short_windows:
            self._evict(short, windows=short_windows)
        slots = self.pools.allocate(tokens)
        if slots is None:
            raise MemoryError(f"{tokens} tokens do not fit; {self.pools.free()} are free")
        return slots

    def _evict(self, tokens: int, *, windows: int = 0, states: int = 0) -> None:
        self.tree.evict(
            self._sg.EvictParams(num_tokens=tokens, swa_num_tokens=windows, mamba_num=states)
        )
