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


class Origins(NamedTuple):
    """Where backups' pages come from, by columns.

    Attributes:
        node_ids: Of the tree's nodes; None if not known.
        parents: The keys of the pages before their first ones; b"" if there is none, None if not
            known.
    """

    node_ids: list[int | None]
    parents: list[bytes | None]


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
        """Has the wrapper been met?"""
        return self._wrapper is not None

    def meet(self, caller: object) -> None:
        """Remember the wrapper, if that is who is calling."""
        if isinstance(caller, UnifiedCacheLinkerWrapper):
            self._wrapper = caller

    def origins(self, pages: Sequence[int], page_tokens: int) -> Origins:
        """Where the youngest offloads come from, in the order in which they were offered.

        Args:
            pages: For each `offload()` since the last call, the pages of its node.
        """
        count = len(pages)
        pending = self._wrapper.pending_offloads if self._wrapper is not None else []
        # The wrapper appends one entry for each offload that was accepted, and all were.
        if len(pending) < count:
            return Origins([None] * count, [None] * count)
        node_ids = [entry.lock_node_id for entry in pending[len(pending) - count :]]
        core = self._wrapper.cache.tree_core
        nodes = getattr(core, "_node_arena", None)
        if nodes is not None:
            # The Python core: its own nodes, because a call for each of them would cost as much as
            # all else that is done for a backup.
            parents = [
                _parent(nodes.get(i), n, core.root_node)
                for i, n in zip(node_ids, pages, strict=True)
            ]
        else:
            ask = core.validate_buffer_backup
            states = [ask(i, n * page_tokens) for i, n in zip(node_ids, pages, strict=True)]
            parents = [_parent_key(state) for state in states]
        return Origins(node_ids, parents)

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


def _parent(node: Any, pages: int, root: Any) -> bytes | None:
    """The key before a node of the Python core, if it has as many pages as when it was offered:
    if it was split since, its id names the lower part only."""
    if node is None or node.hash_value is None or len(node.hash_value) != pages:
        return None
    if node.parent is root:
        return b""
    hashes = None if node.parent is None else node.parent.hash_value
    return bytes.fromhex(hashes[-1]) if hashes else None


def _parent_key(state: Any) -> bytes | None:
    """The key before a node, of what another core says of it; None if it was split since."""
    if state is None:
        return None
    if state.parent_is_root:
        return b""
    return bytes.fromhex(state.parent_last_hash) if state.parent_last_hash else None
