"""When the ranks of an engine look at the results of their offloads together."""

from __future__ import annotations

DRAIN_EVERY = 4
"""Scheduler iterations between two looks, where a look is a collective. An offload keeps its node
on the device until the look that finds its result."""


class DrainCadence:
    """Decides in which scheduler iterations a look is due, from what is the same on all ranks.

    Args:
        world_size: Ranks that must look together. One alone need not be spared anything.
    """

    def __init__(self, world_size: int) -> None:
        self._every = DRAIN_EVERY if world_size > 1 else 1
        self._waited = 0

    def due(self, pending: int) -> bool:
        """Call once an iteration, with the number of offloads that wait for their result."""
        self._waited = self._waited + 1 if pending else 0
        if self._waited < self._every:
            return False
        self._waited = 0
        return True
