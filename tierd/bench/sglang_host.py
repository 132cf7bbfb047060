"""What SGLang's own host tier would keep: the decisions of HiCache, without its pools.

Facts from SGLang 0.5.23, `mem_cache/unified_cache/unified_tree_core.py` and `components/full.py`,
with `write_through` and the LRU policy, which are the defaults:
- The tree's nodes are evicted whole, least recent access first, and only nodes that have left the
  GPU, have a host copy, and have no children.
- A match makes its whole path recent, a node more than its children; an insertion makes it recent
  from the root down. A node that is split counts as accessed, both parts of it.
- A new node is backed up at once, after those before it that are not yet. If the host cannot make
  room for it, it stays without a copy, is tried again at the next insertion over it, and is gone
  when the GPU evicts it.
Simplified: prefill in chunks of 8192 tokens makes nodes of that size at most, as there; the GPU
evicts page by page, not node by node, and a node is on the GPU while a page of it is.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

from tierd.bench.traces import Access, Chain

CHUNKED_PREFILL_TOKENS = 8192
"""SGLang's default `--chunked-prefill-size` on a GPU of that memory class."""


@dataclass(eq=False)
class _Node:
    pages: Chain
    parent: _Node | None
    on_gpu: int = 0
    """How many of its pages, from the first on."""
    backed_up: bool = False
    last_access: float = 0.0
    children: set[_Node] = field(default_factory=set)


class SglangHost:
    """HiCache's host tier of `pages` pages. See `tierd.bench.tiers.HostTier`."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self._free = pages
        self._longest = max(1, CHUNKED_PREFILL_TOKENS // page_tokens)
        self._root = _Node([], None)
        self._node_of: dict[int, _Node] = {}
        self._clock = count(1)
        # (last access when pushed, number, node). An entry may be outdated.
        self._leaves: list[tuple[float, int, _Node]] = []
        self._pushes = count()

    def serve(self, access: Access) -> int:
        path = self._match(access.chain)
        matched = sum(len(node.pages) for node in path)
        self._insert(path, access.chain, matched)
        for page in access.left:
            self._leave_gpu(page)
        return matched - access.gpu_hits

    def _match(self, chain: Chain) -> list[_Node]:
        """The nodes that hold a prefix of a chain; the last is split where the chain leaves it."""
        path: list[_Node] = []
        at = 0
        while at < len(chain) and (node := self._node_of.get(chain[at])) is not None:
            same = 0
            for mine, asked in zip(node.pages, chain[at:], strict=False):
                if mine != asked:
                    break
                same += 1
            if same < len(node.pages):
                node = self._split(node, same)
            path.append(node)
            at += same
        now = float(next(self._clock))
        for node in reversed(path):
            node.last_access = now
            now -= 1e-5
        return path

    def _split(self, child: _Node, length: int) -> _Node:
        """Cut a node after `length` pages; returns the part before the cut."""
        head = _Node(child.pages[:length], child.parent)
        head.on_gpu = min(child.on_gpu, length)
        head.backed_up = child.backed_up
        head.children = {child}
        head.last_access = float(next(self._clock))
        assert child.parent is not None
        child.parent.children.remove(child)
        child.parent.children.add(head)
        child.parent = head
        child.pages = child.pages[length:]
        child.on_gpu -= head.on_gpu
        child.last_access = float(next(self._clock))
        for page in head.pages:
            self._node_of[page] = head
        self._note_leaf(child)
        return head

    def _insert(self, path: list[_Node], chain: Chain, matched: int) -> None:
        """All of a chain is on the GPU: what is not in the tree yet becomes nodes of a chunk each,
        and what has no copy is backed up."""
        for node in path:
            node.on_gpu = len(node.pages)
            node.last_access = float(next(self._clock))
        nodes = list(path)
        for at in range(matched, len(chain), self._longest):
            parent = nodes[-1] if nodes else self._root
            node = _Node(chain[at : at + self._longest], parent)
            node.on_gpu = len(node.pages)
            node.last_access = float(next(self._clock))
            parent.children.add(node)
            for page in node.pages:
                self._node_of[page] = node
            nodes.append(node)
        for node in nodes:
            if not node.backed_up and not self._back_up(node):
                break

    def _back_up(self, node: _Node) -> bool:
        missing = len(node.pages) - self._free
        if missing > 0 and self._evict(missing) < missing:
            return False
        self._free -= len(node.pages)
        node.backed_up = True
        return True

    def _evict(self, pages: int) -> int:
        """Free host memory of at least so many pages, if it can; returns how many went."""
        gone = 0
        while gone < pages and self._leaves:
            pushed, _, node = heapq.heappop(self._leaves)
            if not self._is_host_leaf(node) or pushed != node.last_access:
                self._note_leaf(node)
                continue
            gone += len(node.pages)
            self._free += len(node.pages)
            self._remove(node)
        return gone

    def _leave_gpu(self, page: int) -> None:
        """The GPU has evicted a page, after all that follows it. Without a copy it is lost."""
        node = self._node_of.get(page)
        if node is None:
            return
        node.on_gpu -= 1
        if node.backed_up:
            self._note_leaf(node)
            return
        assert node.pages[-1] == page, "the GPU evicts the deepest first"
        node.pages.pop()
        del self._node_of[page]
        if not node.pages:
            self._remove(node)

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.children.remove(node)
        node.parent = None
        for page in node.pages:
            del self._node_of[page]
        self._note_leaf(parent)

    def _is_host_leaf(self, node: _Node) -> bool:
        return node.parent is not None and node.backed_up and not node.on_gpu and not node.children

    def _note_leaf(self, node: _Node) -> None:
        if self._is_host_leaf(node):
            heapq.heappush(self._leaves, (node.last_access, next(self._pushes), node))
