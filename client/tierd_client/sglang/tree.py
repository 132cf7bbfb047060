"""What the linker learns from the tree that drives it, beyond what its contract hands over.

SGLang 0.5.23 gives `offload()` keys and slots, but not the node that they belong to, nor the page
before its first one, which a host tier needs to keep chains whole. The wrapper that calls the
linker knows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper

MAX_HIT_MARKERS = 4096
"""Markers of external hits that the wrapper may hold between two scheduler iterations."""


class Origin(NamedTuple):
    """Where a backup's pages come from.

    `parent`: the key of the page before the first one; b"" if there is none, None if not known.
    """

    node_id: int | None = None
    parent: bytes | None = None


class Prefix(NamedTuple):
    """Pages from the root on: their hashes, and their token slots, int64."""

    hashes: list[str]
    slots: torch.Tensor


class Tree:
    """The radix tree behind a linker, once its wrapper is known. Every answer is the same on all
    ranks, because the tree is."""

    def __init__(self) -> None:
        self._wrapper: Any = None

    @property
    def is_known(self) -> bool:
        return self._wrapper is not None

    def meet(self, caller: object) -> None:
        """Remember the wrapper, if that is who is calling."""
        if isinstance(caller, UnifiedCacheLinkerWrapper):
            self._wrapper = caller

    def origins(self, lengths: Sequence[int]) -> list[Origin]:
        """Where the youngest offloads come from, in the order in which they were offered.

        Args:
            lengths: For each `offload()` since the last call, the tokens of its node.
        """
        pending = self._wrapper.pending_offloads if self._wrapper is not None else []
        # The wrapper appends one entry for each offload that was accepted, and all were.
        if len(pending) < len(lengths):
            return [Origin()] * len(lengths)
        young = pending[len(pending) - len(lengths) :]
        return [
            self._origin(entry.lock_node_id, n) for entry, n in zip(young, lengths, strict=True)
        ]

    def _origin(self, node_id: int, tokens: int) -> Origin:
        state = self._wrapper.cache.tree_core.validate_buffer_backup(node_id, tokens)
        if state is None:  # split since: the id now names the lower part only
            return Origin(node_id)
        if state.parent_is_root:
            return Origin(node_id, b"")
        if not state.parent_last_hash:
            return Origin(node_id)
        return Origin(node_id, bytes.fromhex(state.parent_last_hash))

    def prefix(self, node_id: int | None, page_tokens: int) -> Prefix | None:
        """All pages before those of an offloaded node, which keeps them on the device until its
        result. None if they cannot be named for sure."""
        pending = self._wrapper.pending_offloads if self._wrapper is not None else []
        if all(entry.lock_node_id != node_id for entry in pending):
            return None
        core = self._wrapper.cache.tree_core
        hashes = core.get_prefix_hash_values(node_id)
        slots = core.collect_full_device_indices(node_id, core.root_node_handle())
        tokens = len(hashes) * page_tokens
        if not tokens or len(slots) <= tokens:
            return None
        return Prefix(hashes, slots[:tokens])

    def drop_stale_hit_markers(self) -> None:
        """Bound the markers that the wrapper keeps for requests that never load.

        A request that matched here and was then served from the GPU leaves its marker, with one
        key a page, behind for ever. Call only between two scheduler iterations: every request is
        matched again in the iteration that admits it, so none of the markers is needed then.
        """
        if self._wrapper is not None and len(self._wrapper.hit_markers) > MAX_HIT_MARKERS:
            self._wrapper.hit_markers.clear()
