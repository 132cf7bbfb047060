"""A linker that keeps nothing: what it costs is what SGLang itself pays for having one."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker


class NoopLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """A `UnifiedCacheLinker` (SGLang 0.5.23). Every offload succeeds an iteration later, as no
    tier's can sooner; every lookup misses.

    Args:
        pools: By SGLang's `PoolName`, the pools that it would carry.
    """

    def __init__(self, pools: dict[Any, object]) -> None:
        self.pools = pools
        self.layer_done_counter = None
        self._offered = 0
        self._done = 0

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        self._offered += 1
        return True

    def num_completed_offloads(self) -> int:
        done = self._done
        self._done += self._offered
        self._offered = 0
        return done

    def pop_completed_offload(self) -> bool:
        self._done -= 1
        return True

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        return False

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def reset(self) -> None:
        self._offered = self._done = 0

    def close(self) -> None:
        self.reset()
