"""The engine's own prefix cache, in front of the tier: what it hits is never looked up there."""

from __future__ import annotations

from tierd.bench.tiers import ChainTier
from tierd.bench.traces import Access, Trace
from tierd.eviction import ChainLru


def through_gpu(trace: Trace, pages: int) -> list[Access]:
    """The accesses behind a GPU cache of `pages` pages: least recently used, the deepest first.

    While a request runs, all its pages are on the GPU; of one that is longer than the cache its
    beginning stays. 0: nothing stays.
    """
    if not pages:
        return [Access(chain, 0, chain[::-1]) for chain in trace.requests]
    cache = ChainTier(pages, ChainLru())
    accesses = []
    for chain in trace.requests:
        hits = cache.serve(Access(chain, 0, []))
        accesses.append(Access(chain, hits, chain[: pages - 1 : -1] + cache.take_dropped()))
    return accesses
