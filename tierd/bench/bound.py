"""What no policy can exceed on a trace: Belady's rule, with all that is still to come known."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tierd.bench.traces import Access


def belady_hits(accesses: Sequence[Access], pages: int) -> int:
    """The most pages that a tier of this size can restore over a trace.

    A restore takes a page's place from its last access before it to the restore itself. Whenever
    too many pages want a place, the one that is needed last goes without: that is the largest
    number of intervals of which no more than `pages` overlap. A page is never needed before the
    pages ahead of it in its chain are, so without a GPU cache in front this leaves no hole and is
    reached exactly; with one, it is an upper bound.
    """
    needed_at = _next_restore(accesses)
    waiting: dict[int, int] = {}
    latest: list[tuple[int, int]] = []
    hits = 0
    for access, needed in zip(accesses, needed_at, strict=True):
        for page in access.chain:
            hits += waiting.pop(page, None) is not None
        for page, when in zip(access.chain, needed, strict=True):
            if when:
                waiting[page] = when
                heapq.heappush(latest, (-when, page))
        while len(waiting) > pages:
            when, page = heapq.heappop(latest)
            if waiting.get(page) == -when:
                del waiting[page]
    return hits


def _next_restore(accesses: Sequence[Access]) -> list[list[int]]:
    """Per access and page, the number of the next access of that page, if it would restore it
    from the tier; 0 if the GPU has it then, or if there is none."""
    coming: dict[int, int] = {}
    needed: list[list[int]] = []
    for number in range(len(accesses) - 1, -1, -1):
        access = accesses[number]
        needed.append([coming.get(page, 0) for page in access.chain])
        for i, page in enumerate(access.chain):
            coming[page] = number if i >= access.gpu_hits else 0
    return needed[::-1]
