"""What `tierd bench scheduler` measures: kinds of engines and requests, and how many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierd_client.sglang.tree_pools import EngineShape

STEPS = {1: 8, 8: 4, 64: 4}
"""By how many requests finish in a step: steps a round."""
MATCH_PAGES = (100, 1000)
"""Lengths of the prompts that are looked up."""
REQUESTS = 96
"""The most that an engine runs at a time."""
CORES = ("rust", "python")
"""SGLang's tree cores; the first is what it chooses by itself."""


@dataclass(frozen=True)
class Case:
    """One kind of engine and of request.

    Attributes:
        pages: Of a request's prompt.
        window: Tokens of sliding windows; 0 is none.
        states: Whether layers have recurrent states.
        matches: Whether lookups are measured, too.
    """

    page_tokens: int
    pages: int
    core: str
    window: int = 0
    states: bool = False
    matches: bool = False

    @property
    def components(self) -> str:
        """The tree's components, in words."""
        return "FULL" + "+SWA" * bool(self.window) + "+Mamba" * self.states

    @property
    def name(self) -> str:
        """The case in words, unlike any other's."""
        tokens = f"{self.page_tokens} token" + "s" * (self.page_tokens > 1)
        return f"{self.components}, {self.pages} pages of {tokens}, {self.core} core"

    def shape(self, device: str) -> EngineShape:
        """A device that holds twice what the largest step does: from its third step on, every
        tier evicts. Few layers: their number costs the scheduler nothing. On a GPU the rows have
        the size of common models', which decides what HiCache copies them with."""
        step = max(STEPS) * self.pages
        pages = max(2 * step, MATCH_PAGES[-1] + self.pages if self.matches else 0)
        return EngineShape(
            page_tokens=self.page_tokens,
            pool_tokens=pages * self.page_tokens,
            layers=3,
            heads=1 if device == "cpu" else 8,
            head_dim=8 if device == "cpu" else 128,
            core=self.core,
            window=self.window,
            states=2 * REQUESTS if self.states else 0,
            requests=REQUESTS,
            device=device,
        )


def cases(quick: bool, cores: Sequence[str] = CORES) -> list[Case]:
    """What is measured, in that order."""
    found = []
    for core in cores:
        found.append(Case(64, 16, core, matches=True))
        found.append(Case(1, 256, core, matches=True))
        if not quick:
            found.append(Case(64, 16, core, window=128))
            found.append(Case(1, 256, core, window=128, states=True))
            found.append(Case(64, 64, core))
    return found
