"""Replays a trace at several sizes against each policy, and says which part was restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tierd.bench.bound import belady_hits
from tierd.bench.gpu import through_gpu
from tierd.bench.sglang_host import SglangHost
from tierd.bench.tiers import ChainTier, HostTier, PageLru
from tierd.bench.traces import Trace
from tierd.eviction import ChainLru, ChainReuse

TIERS: dict[str, Callable[[int, int], HostTier]] = {
    "chain-reuse": lambda pages, page_tokens: ChainTier(pages, ChainReuse()),
    "chain-lru": lambda pages, page_tokens: ChainTier(pages, ChainLru()),
    "page-lru": lambda pages, page_tokens: PageLru(pages),
    "sglang": SglangHost,
}
"""What is compared, by name: made from a number of pages and the tokens of a page."""


@dataclass(frozen=True)
class Size:
    """A number of pages, or a share of a trace's pages."""

    pages: int = 0
    share: float = 0.0

    def of(self, trace: Trace) -> int:
        """How many pages that is of a trace."""
        return round(self.share * trace.pages) if self.share else self.pages


@dataclass(frozen=True)
class Row:
    """One trace at one size.

    `gpu_hit_rate` is a share of all tokens. `hit_rates` (by the names in TIERS) and `bound` are
    shares of the tokens that missed the GPU: what the tier restored of them, and the most that
    any could have restored.
    """

    trace: str
    requests: int
    trace_pages: int
    page_tokens: int
    gpu_pages: int
    gpu_hit_rate: float
    pages: int
    hit_rates: dict[str, float]
    bound: float


def rows(
    trace: Trace, gpu_sizes: Sequence[Size], sizes: Sequence[Size], step: Callable[[], None]
) -> Iterator[Row]:
    """Replay a trace behind GPU caches of these sizes at these sizes of the host tier.

    Args:
        step: Called after each replay: len(TIERS) + 1 times a row.
    """
    total = sum(len(chain) for chain in trace.requests)
    for gpu_size in gpu_sizes:
        accesses = through_gpu(trace, gpu_size.of(trace))
        gpu_hits = sum(access.gpu_hits for access in accesses)
        missed = max(1, total - gpu_hits)
        for size in sizes:
            pages = max(1, size.of(trace))
            hit_rates = {}
            for name, make in TIERS.items():
                tier = make(pages, trace.page_tokens)
                hit_rates[name] = sum(map(tier.serve, accesses)) / missed
                step()
            bound = belady_hits(accesses, pages) / missed
            step()
            yield Row(
                trace=trace.name,
                requests=len(trace.requests),
                trace_pages=trace.pages,
                page_tokens=trace.page_tokens,
                gpu_pages=gpu_size.of(trace),
                gpu_hit_rate=gpu_hits / total,
                pages=pages,
                hit_rates=hit_rates,
                bound=bound,
            )
