"""The end of a daemon that was asked to stop: what it has accepted it finishes, within a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierd.control.groups import Group


@dataclass(frozen=True)
class Drain:
    """One drain. From its start on lookups miss, and backups that arrive are shed."""

    loads_until: float
    until: float

    def left(self, groups: Iterable[Group], now: float) -> str:
        """What is still under way, in words; empty: the daemon may go."""
        groups = list(groups)
        backups = sum(g.undecided + (len(g.backups) if g.backups else 0) for g in groups)
        restores = sum(g.leases.restoring for g in groups)
        leases = sum(len(g.leases) for g in groups) if now < self.loads_until else 0
        counts = {"backups": backups, "restores": restores, "leases": leases}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
