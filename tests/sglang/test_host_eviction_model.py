"""`tierd bench eviction` compares with what SGLang keeps: its model of SGLang's host tier restores
the very pages that SGLang's own tree does, request by request."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tierd_client.sglang.imports import load_sglang

from tierd.bench.sglang_host import SglangHost
from tierd.bench.traces import Access, TraceBuilder
from tierd.bench.workloads import KINDS

pytestmark = pytest.mark.sglang


class SglangTree:
    """SGLang's tree (the Python core, page size 1) with a host tier that has no memory.

    What its cache does around the tree is done here: it asks for room, notes a copy as made at
    once, and loads back what a match finds on the host.
    """

    def __init__(self, host_pages: int) -> None:
        load_sglang()
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
        from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore

        params = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=1
        )
        self._full = ComponentType.FULL
        cache = SimpleNamespace(enable_session_radix_cache=False)
        self.core: Any = UnifiedTreeCore(params, {self._full: FullComponent(cache, params)})
        self.core.set_hicache_enabled()
        self.core.write_through_threshold = 1
        self._free = host_pages

    def serve(self, chain: list[int], leaves_gpu: bool) -> tuple[int, int]:
        """Returns the pages found on the GPU and those loaded back. Afterwards the GPU evicts
        everything, or nothing."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        core = self.core
        key = RadixKey(array("q", chain), None)
        match = core.match_prefix(MatchPrefixParams(key=key))
        if match.host_hit_length:
            node = match.best_match_node
            transfer, _ = core.build_load_back_spec(node)
            slots = torch.arange(len(transfer.host_indices))
            core.commit_load_back(node, slots, transfer, {})
            core.finish_load_back(node)
        lock = core.inc_lock_ref(match.best_match_node)
        step = core.begin_insert(InsertParams(key=key, value=torch.tensor(chain)))
        while True:
            for action in step.actions:
                for node in getattr(action, "node_ids", ()):
                    if not self._back_up(node):
                        break
            if step.result is not None:
                break
            step = core.resume_insert()
        core.dec_lock_ref(match.best_match_node, lock.to_dec_params())
        if leaves_gpu:
            while core.evictable_device_leaves:
                leaf = next(iter(core.evictable_device_leaves))
                _drain(core.evict_device_leaf(leaf.id, False))
        return match.device_prefix_len, match.host_hit_length

    def _back_up(self, node: int) -> bool:
        import torch

        value, _ = self.core.build_backup_spec(node)
        missing = len(value) - self._free
        if missing > 0:
            result = self.core.drive_host_eviction(self._full, missing)
            freed = result.tracker[self._full]
            _drain(result)
            self._free += freed
            if freed < missing:
                return False
        self._free -= len(value)
        self.core.commit_backup(node, torch.arange(len(value)), {})
        return True


def _drain(result: Any) -> None:
    """SGLang insists that what an eviction frees is taken away; there is no memory to give back."""
    for freed in (result.device_frees, result.host_frees, result.cache_actions):
        freed.clear()


def compare(requests: list[list[int]], leaves_gpu: list[bool], host_pages: int) -> int:
    """Serve requests with both; returns how many pages were loaded back."""
    tree, model = SglangTree(host_pages), SglangHost(host_pages, 1)
    on_gpu: dict[int, None] = {}
    restored = 0
    for chain, leaves in zip(requests, leaves_gpu, strict=True):
        on_gpu.update(dict.fromkeys(chain))
        found, loaded = tree.serve(chain, leaves)
        # The deepest first: a page's number is larger than those of the pages before it.
        left = sorted(on_gpu, reverse=True) if leaves else []
        assert model.serve(Access(chain, found, left)) == loaded
        if leaves:
            on_gpu.clear()
        restored += loaded
    return restored


@settings(max_examples=100, deadline=None)
@given(data=st.data(), host_pages=st.integers(1, 14))
def test_any_requests(data: st.DataObject, host_pages: int) -> None:
    builder = TraceBuilder("any", 1)
    blocks = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    for request in data.draw(st.lists(blocks, min_size=1, max_size=30)):
        builder.add(request)
    requests = builder.build().requests
    leaves = data.draw(st.lists(st.booleans(), min_size=len(requests), max_size=len(requests)))
    compare(requests, leaves, host_pages)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("every", [1, 7])
def test_a_workload_of_the_benchmark(kind: str, every: int) -> None:
    trace = KINDS[kind](200, 5)
    leaves = [number % every == 0 for number in range(len(trace.requests))]
    assert compare(trace.requests, leaves, trace.pages // 8) > 0
