"""SGLang's own tree, wrapper, allocators and KV pool on the CPU, driven as its scheduler does.

For the demo and the tests. Only the model is missing: the KV of a token is a fixed function of
the tokens up to it, of the layer and of the weights' version, so that every byte that comes back
from the tier can be checked, and one from another place or another context is wrong.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import time
import types
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class EngineShape:
    """Sizes of an engine. `core`: SGLang's tree core, "python" or "rust". `pool_tokens` is a
    multiple of `page_tokens`."""

    page_tokens: int = 4
    pool_tokens: int = 256
    layers: int = 4
    heads: int = 2
    head_dim: int = 8
    core: str = "python"


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


class CpuEngine:
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
        shape: EngineShape = EngineShape(),
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
                enable_unified_cache_external_linker=True, page_size=shape.page_tokens
            )
        )
        try:
            self.requests = sg.ReqToTokenPool(
                size=16,
                max_context_len=shape.pool_tokens + shape.page_tokens,
                device="cpu",
                enable_memory_saver=False,
            )
            self.kv = sg.MHATokenToKVPool(
                size=shape.pool_tokens,
                page_size=shape.page_tokens,
                dtype=torch.bfloat16,
                head_num=shape.heads,
                head_dim=shape.head_dim,
                layer_num=shape.layers,
                device="cpu",
                enable_memory_saver=False,
            )
            self.allocator = _allocator(sg, shape, self.kv)
            components = (sg.ComponentType.FULL,)
            params = sg.CacheInitParams(
                disable=False,
                req_to_token_pool=self.requests,
                token_to_kv_pool_allocator=self.allocator,
                page_size=shape.page_tokens,
                tree_components=components,
                tree_core_backend=shape.core,
                tp_cache_group=group,
                attn_tp_cache_group=group,
            )
            self.tree = sg.UnifiedRadixCache(params)
            self.linker = TierdLinker(
                server_args, params, components=set(components), extra_config={"socket": socket}
            )
            self._stack.callback(self.linker.close)
            self.tree.init_cache_linker(self.linker)
            self.kv.register_layer_transfer_counter(self.tree.linker.layer_done_counter)
        except BaseException:
            self._stack.close()
            raise
        self._sg = sg

    def __enter__(self) -> CpuEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the daemon and give SGLang's settings back. Idempotent."""
        self._stack.close()

    # --- a request's life -------------------------------------------------------------------

    def admit(self, rid: str, tokens: Sequence[int]) -> Running:
        """Match a prompt against the tree and the tier, and queue the load of what it found."""
        req = self._new_request(rid, tokens)
        req.init_next_round_input(self.tree)
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

    def prefill(self, rid: str, tokens: Sequence[int]) -> Running:
        """`admit` and `forward`."""
        running = self.admit(rid, tokens)
        self.forward(running)
        return running

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
        """What SGLang's scheduler does for the cache at the start of each iteration."""
        self.tree.check_hicache_events()

    def drain(self, timeout_s: float = 20.0) -> None:
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

    def evict(self, tokens: int = 1 << 30) -> int:
        """Evict from the device's part of the tree. Returns: tokens evicted."""
        return int(self.tree.evict(self._sg.EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def flush_cache(self) -> None:
        """SGLang's /flush_cache: empty the tree and the pools."""
        self.tree.reset()
        self.allocator.clear()
        self.requests.clear()

    @property
    def free_tokens(self) -> int:
        return int(self.allocator.available_size())

    @property
    def locked_tokens(self) -> int:
        """Tokens that cannot be evicted, by running requests or by pending offloads."""
        return int(self.tree.full_protected_size())

    # --- inside -----------------------------------------------------------------------------

    def _new_request(self, rid: str, tokens: Sequence[int]) -> Any:
        sampling = self._sg.SamplingParams(max_new_tokens=1)
        sampling.normalize(None)
        return self._sg.Req(rid, "", array("q", tokens), sampling)

    def _allocate(self, count: int) -> torch.Tensor:
        """Token slots for `count` tokens, from whole pages. Shape: (count,), int64."""
        page = self.shape.page_tokens
        whole = -(-count // page) * page
        if (short := whole - self.free_tokens) > 0:
            self.evict(short)
        slots = self.allocator.alloc(whole)
        if slots is None:
            raise MemoryError(f"{whole} tokens do not fit into {self.free_tokens} free ones")
        return slots[:count].to(torch.int64)

    def _run_batch(self, ends: Mapping[Running, int]) -> None:
        """One forward pass that brings each request to its end."""
        restore = self.tree.ready_to_load_host_cache()
        for running, end in ends.items():
            self._prepare(running.req, end)
        self.linker.layer_done_counter.set_consumer(restore)
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
            self.requests.alloc([req])
            reused = self.tree.prefix_device_indices(req)
            row = self.requests.req_to_token[req.kv.req_pool_idx]
            row[:start] = reused.to(row.dtype)
        row = self.requests.req_to_token[req.kv.req_pool_idx]
        row[start:end] = self._allocate(end - start).to(row.dtype)
        req.extend_end = end
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end

    def _compute(self, running: Running, end: int) -> tuple[int, int]:
        """Read the KV of everything before, write that of the new tokens.

        Returns: the bytes read, and those among them that were wrong.
        """
        start = running.req.prefix_len
        row = self.requests.req_to_token[running.req.kv.req_pool_idx]
        slots = row[:end].to(torch.int64).numpy()
        states = chain_states(running.tokens[:end], self.weights_version)
        checked = wrong = 0
        for layer in range(self.shape.layers):
            # The pool's accessors wait for the layer, as a model's attention makes them do.
            for side, buffer in enumerate(self.kv.get_kv_buffer(layer)):
                rows = buffer.view(torch.uint8).reshape(len(buffer), -1).numpy()
                want = token_rows(states, 2 * layer + side, rows.shape[1])
                found = rows[slots[:start]]
                if not np.array_equal(found, want[:start]):
                    wrong += int(np.count_nonzero(found != want[:start]))
                checked += found.size
                rows[slots[start:]] = want[start:]
        return checked, wrong


def chain_states(tokens: Sequence[int], weights_version: int) -> U64:
    """A number for each token that depends on all tokens up to it. Shape: (len(tokens),)."""

    def chain() -> Iterator[int]:
        state = weights_version + 1
        for token in tokens:
            state = ((state ^ token) * 0x9E3779B97F4A7C15 + 1) & 0xFFFFFFFFFFFFFFFF
            state ^= state >> 29
            yield state

    return np.fromiter(chain(), np.uint64, len(tokens))


def token_rows(states: U64, buffer: int, row_bytes: int) -> U8:
    """The KV that a buffer must hold for these tokens.

    Args:
        row_bytes: Bytes of a token's row, a multiple of 8.

    Shape: (len(states), row_bytes).
    """
    words = np.arange(1, row_bytes // 8 + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (states + np.uint64(buffer))[:, None] * (words | np.uint64(1))
    mixed ^= mixed >> np.uint64(31)
    rows: U8 = mixed.view(np.uint8)
    return rows


def _allocator(sg: types.SimpleNamespace, shape: EngineShape, kv: Any) -> Any:
    if shape.page_tokens == 1:
        return sg.TokenToKVPoolAllocator(shape.pool_tokens, torch.bfloat16, "cpu", kv, False)
    return sg.PagedTokenToKVPoolAllocator(
        shape.pool_tokens, shape.page_tokens, torch.bfloat16, "cpu", kv, False
    )


@functools.cache
def load_sglang() -> types.SimpleNamespace:
    """What the engine needs of SGLang 0.5.23.

    Raises: ModuleNotFoundError: SGLang, or one of the packages that its cache imports, is missing.
    """
    # Take the Rust core that the wheel brings, rather than try to build one.
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    stand_in_for_torchvision()
    names = {
        "sglang.srt.managers.schedule_batch": ("FINISH_LENGTH", "Req"),
        "sglang.srt.mem_cache.allocator": (
            "PagedTokenToKVPoolAllocator",
            "TokenToKVPoolAllocator",
        ),
        "sglang.srt.mem_cache.base_prefix_cache": ("EvictParams", "InitLoadBackParams"),
        "sglang.srt.mem_cache.cache_init_params": ("CacheInitParams",),
        "sglang.srt.mem_cache.common": ("checkpoint_kv_cache", "release_kv_cache"),
        "sglang.srt.mem_cache.memory_pool": ("MHATokenToKVPool", "ReqToTokenPool"),
        "sglang.srt.mem_cache.unified_cache.component_type": ("ComponentType",),
        "sglang.srt.mem_cache.unified_radix_cache": ("UnifiedRadixCache",),
        "sglang.srt.runtime_context": ("get_context",),
        "sglang.srt.sampling.sampling_params": ("SamplingParams",),
    }
    found = types.SimpleNamespace()
    for module_name, wanted in names.items():
        module = importlib.import_module(module_name)
        for name in wanted:
            setattr(found, name, getattr(module, name))
    return found


def stand_in_for_torchvision() -> None:
    """Let SGLang be imported where torchvision is not installed.

    SGLang's model configurations import it, for image processors that no text cache needs, and
    its wheels do not work with a torch built for the CPU. Does nothing where it is installed.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    # transformers must have noticed that it is absent before something by that name is there.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    for name in ("torchvision", "torchvision.transforms", "torchvision.io"):
        _add_stand_in(name)
    _add_stand_in("torchvision.transforms.functional")


def _add_stand_in(name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []

    def attribute(wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return type(wanted, (), {})

    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
