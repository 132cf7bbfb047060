"""SGLang's own tree, wrapper, allocators and KV pools, driven as its scheduler does.

For the demo and the tests, on the CPU or a GPU. Only the model is missing: see `tree_pools` for
what takes its place.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from tierd_client.sglang.imports import load_sglang
from tierd_client.sglang.tree_pools import EngineShape, TreePools
from tierd_client.sglang.tree_rows import chain_states

_DEFAULT_SHAPE = EngineShape()
PATIENCE_S = 60.0
"""How long the daemon is waited for. An engine gives a late one up long before, for its users; here
nobody waits, and bytes are what counts."""


@dataclass(eq=False)
class Running:
    """A request between its prefill and its end.

    Attributes:
        device_hit: Tokens of the prompt found in the GPU's part of the tree.
        loaded: Tokens of the prompt restored through the linker.
        checked: Bytes of reused KV that the forward pass compared.
        wrong: Those among them that differed.
        aborted: Its restore failed; SGLang discards its output and answers 503.
    """

    req: Any
    tokens: Sequence[int]
    device_hit: int
    loaded: int
    checked: int = 0
    wrong: int = 0
    aborted: bool = False


class TreeEngine:
    """One rank of an engine. A context manager; while it is open, SGLang's process-wide settings
    are this engine's.

    Args:
        socket: The daemon's lifeline socket.
        server_args: What the linker shall see as SGLang's `ServerArgs`; None shares nothing.
        group: The gloo group of the ranks, or None.

    Raises: RefusedError, ConfigError: as `TierdLinker`.
    """

    def __init__(
        self,
        socket: str,
        shape: EngineShape = _DEFAULT_SHAPE,
        *,
        server_args: Any = None,
        group: Any | None = None,
    ) -> None:
        sg = load_sglang()
        from tierd_client.sglang.linker import TierdLinker

        self.shape = shape
        self.weights_version = 0
        self._stack = ExitStack()
        self._stack.enter_context(
            sg.get_context().override_server_args(
                enable_unified_cache_external_linker=True,
                page_size=shape.page_tokens,
                _mamba_cache_chunk_size=64,
            )
        )
        try:
            if shape.device == "cpu":
                # What is copied at a time is too small to be shared between threads.
                torch.set_num_threads(1)
            self.pools = TreePools(sg, shape)
            params = sg.CacheInitParams(
                disable=False,
                req_to_token_pool=self.pools.requests,
                token_to_kv_pool_allocator=self.pools.allocator,
                page_size=shape.page_tokens,
                sliding_window_size=shape.window or None,
                tree_components=self.pools.components,
                tree_core_backend=shape.core,
                sidecar_draft_device_pools=self.pools.drafts,
                tp_cache_group=group,
                attn_tp_cache_group=group,
            )
            self.tree = sg.UnifiedRadixCache(params)
            self.linker = TierdLinker(
                server_args,
                params,
                components=set(self.pools.components),
                extra_config={"socket": socket, "lookup_timeout_s": PATIENCE_S},
            )
            self._stack.callback(self.linker.close)
            self.linker.client.connect(PATIENCE_S)
            self.tree.init_cache_linker(self.linker)
            self.pools.kv.register_layer_transfer_counter(self.tree.linker.layer_done_counter)
        except BaseException:
            self._stack.close()
            raise
        self._sg = sg

    def __enter__(self) -> TreeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the daemon and give SGLang's settings back. Idempotent."""
        self._stack.close()

    # --- a request's life -------------------------------------------------------------------

    def match(self, rid: str, tokens: Sequence[int]) -> Any:
        """Match a prompt against the tree and the tier, as that of a request that waits. Returns:
        SGLang's `Req`, which says what was found."""
        req = self._new_request(rid, tokens)
        req.init_next_round_input(self.tree)
        return req

    def admit(self, rid: str, tokens: Sequence[int]) -> Running:
        """Match a prompt against the tree and the tier, and queue the load of what it found."""
        req = self.match(rid, tokens)
        device_hit = req.prefix_len
        req.lock = self.tree.lock(req.last_node)
        loaded = 0
        if req.needs_host_load_back():
            loaded, req.last_node = self.tree.init_load_back(
                self._sg.InitLoadBackParams(
                    best_match_node=req.best_match_node,
                    host_hit_length=req.host_hit_length,
                    req=req,
                )
            )
            req.host_loaded_length = loaded
            req.prefix_len += loaded
            if loaded:
                self.pools.spoil(self.tree.prefix_device_indices(req)[device_hit:], req.kv)
        return Running(req, tokens, device_hit, loaded)

    def forward(self, *batch: Running) -> None:
        """Start the loads that are queued for these requests, and compute the rest of their
        prompts, all of them in one batch.

        Raises: MemoryError: the pool is too small for it, even with everything else evicted.
        """
        self._run_batch({running: len(running.tokens) for running in batch})

    def forward_in_chunks(self, running: Running, chunk_tokens: int) -> None:
        """A prefill in chunks, each stashed in the tree before the next one runs."""
        end = len(running.tokens)
        while not running.aborted:
            chunk_end = min(end, running.req.prefix_len + chunk_tokens)
            self._run_batch({running: chunk_end})
            if chunk_end == end:
                return
            self._sg.checkpoint_kv_cache(running.req, self.tree)
            self.step()

    def prefill(self, rid: str, tokens: Sequence[int]) -> Running:
        """`admit` and `forward`."""
        running = self.admit(rid, tokens)
        self.forward(running)
        return running

    def decode(self, running: Running, tokens: Sequence[int]) -> None:
        """Go on with these tokens as the request's output, a page at a time; what slides out of
        its windows is freed."""
        for at in range(0, len(tokens), self.shape.page_tokens):
            piece = tokens[at : at + self.shape.page_tokens]
            req = running.req
            req.prefix_len = req.extend_end
            if self.shape.window:
                self.tree.evict_sliding_windows(req, req.prefix_len)
            req.output_ids.extend(piece)
            running.tokens = [*running.tokens, *piece]
            self._run_batch({running: len(running.tokens)})

    def finish(self, running: Running) -> None:
        """End a request: its KV goes to the tree, which offers new nodes to the linker."""
        running.req.finished_reason = self._sg.FINISH_LENGTH(length=0)
        self._sg.release_kv_cache(running.req, self.tree, checkpoint=True)

    def serve(self, rid: str, tokens: Sequence[int]) -> Running:
        """`step`, `prefill` and `finish` in one."""
        self.step()
        running = self.prefill(rid, tokens)
        self.finish(running)
        return running

    def step(self) -> None:
        """What SGLang's scheduler does for the cache between two iterations: at the end of one,
        and at the start of the next."""
        self.tree.flush_pending_backups()
        self.tree.check_hicache_events()

    def drain(self, timeout_s: float = PATIENCE_S) -> None:
        """Run idle iterations until no offload is pending.

        Raises: TimeoutError: some still are.
        """
        deadline = time.monotonic() + timeout_s
        self.step()
        while self.tree.linker.pending_offloads:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(self.tree.linker.pending_offloads)} offloads pending after {timeout_s} s"
                )
            time.sleep(0.001)
            self.step()

    def evict(self, tokens: int = 1 << 30, *, window_tokens: int = 0, states: int = 0) -> int:
        """Evict from the device's part of the tree: of full attention, of sliding windows, and
        states. Returns: tokens evicted."""
        amounts = self._sg.EvictParams(
            num_tokens=tokens, swa_num_tokens=window_tokens, mamba_num=states
        )
        return int(self.tree.evict(amounts).num_tokens_evicted)

    def flush_cache(self) -> None:
        """SGLang's /flush_cache: empty the tree and the pools."""
        self.tree.reset()
        self.pools.allocator.clear()
        self.pools.requests.clear()

    @property
    def free_tokens(self) -> int:
        """Token slots that nobody holds."""
        return self.pools.free_tokens

    @property
    def locked_tokens(self) -> int:
        """Tokens that cannot be evicted, by running requests or by pending offloads."""
        return int(self.tree.full_protected_size())

    def unaccounted(self) -> dict[str, int]:
        """Of each pool, slots that are neither free nor the tree's. Between requests there are
        none."""
        held = {
            "full": self.tree.full_evictable_size() + self.tree.full_protected_size(),
            "swa": self.tree.swa_evictable_size() + self.tree.swa_protected_size(),
            "state": self.tree.mamba_evictable_size() + self.tree.mamba_protected_size(),
        }
        free = self.pools.free()
        return {name: total - free[name] - held[name] for name, total in self.pools.total().items()}

    # --- inside -----------------------------------------------------------------------------

    def _new_request(self, rid: str, tokens: Sequence[int]) -> Any:
        sampling = self._sg.SamplingParams(max_new_tokens=1)
        sampling.normalize(None)
        return self._sg.Req(rid, "", array("q", tokens), sampling)

    def _allocate(self, tokens: int) -> torch.Tensor:
        """Token slots of whole pages. Shape: (tokens,), int64."""
        slots = self._evict_and_allocate(tokens)
        if slots is None:
            self.drain()  # what is being backed up cannot be evicted
            slots = self._evict_and_allocate(tokens)
        if slots is None:
            raise MemoryError(f"{tokens} tokens do not fit into {self.free_tokens} free ones")
        return slots

    def _evict_and_allocate(self, tokens: int) -> torch.Tensor | None:
        free = self.pools.free()
        short = max(0, tokens - free["full"])
        short_windows = max(0, tokens - free.get("swa", tokens))
        if short or short_windows:
            self.evict(short, window_tokens=short_windows)
        return self.pools.allocate(tokens)

    def _run_batch(self, ends: Mapping[Running, int]) -> None:
        """One forward pass that brings each request to its end."""
        restore = self.tree.ready_to_load_host_cache()
        for running, end in ends.items():
            self._prepare(running.req, end)
        self.linker.layer_done_counter.set_consumer(restore)
        for running in ends:
            self.pools.start_states(running.req.kv)
        outcomes = [self._compute(running, end) for running, end in ends.items()]
        failed = self.tree.finish_external_linker_loads([running.req for running in ends])
        for running, (checked, wrong) in zip(ends, outcomes, strict=True):
            running.aborted = running.req in failed
            if not running.aborted:
                running.checked += checked
                running.wrong += wrong

    def _prepare(self, req: Any, end: int) -> None:
        """Fill the request's row of token slots, with those of reused KV and with new ones."""
        start = req.prefix_len
        if req.kv.req_pool_idx is None:
            if self.shape.states and not req.kv.holds_mamba and not self.pools.free()["state"]:
                self.evict(0, states=1)
            self.pools.requests.alloc([req])
            reused = self.tree.prefix_device_indices(req)
            row = self.pools.requests.req_to_token[req.kv.req_pool_idx]
            row[:start] = reused.to(row.dtype)
        row = self.pools.requests.req_to_token[req.kv.req_pool_idx]
        page = self.shape.page_tokens
        # The rest of a page that has been begun is this request's already.
        begun = min(-start % page, end - start)
        if begun:
            more = torch.arange(1, begun + 1, device=row.device)
            row[start : start + begun] = row[start - 1] + more
        fresh = end - start - begun
        if fresh:
            slots = self._allocate(-(-fresh // page) * page)
            row[start + begun : end] = slots[:fresh].to(row.dtype)
        req.extend_end = end
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end

    def _compute(self, running: Running, end: int) -> tuple[int, int]:
        """Read what each layer needs of the tokens before, write that of the new ones.

        Returns: the bytes read, and those among them that were wrong.
        """
        start = running.req.prefix_len
        row = self.pools.requests.req_to_token[running.req.kv.req_pool_idx]
        slots = row[:end].to(torch.int64)
        chain = chain_states(running.tokens[:end], self.weights_version)
        checked = wrong = 0
        for rows in self.pools.kept():
            if rows.role == "state":
                slot = running.req.kv.mamba_pool_idx.reshape(1).to(torch.int64)
                differing, size = rows.compare(slot[: min(start, 1)], chain[start - 1 : start])
                rows.write(slot, chain[-1:])
            else:
                first = max(0, start - self.shape.window) if rows.role == "swa" else 0
                own = self.pools.slots_in(rows.role, slots)
                differing, size = rows.compare(own[first:start], chain[first:start])
                rows.write(own[start:], chain[start:])
            checked += size
            wrong += differing
        return checked, wrong
