"""What takes in what others wrote, each as a target that can be fed any number of messages.

A target raises on the first thing that must not happen. What it is fed follows from its seed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from fuzz_bytes import Config, Decoders, Framing
from fuzz_client import Client
from fuzz_daemon import Daemon
from fuzz_plans import Geometry


class Target(Protocol):
    """Args: `rng`: what it is fed follows from it. `directory`: for its files."""

    def __init__(self, rng: random.Random, directory: Path) -> None: ...

    def feed(self, count: int) -> None:
        """So many messages. Raises: whatever shows a fault."""

    def close(self) -> None:
        """Give back what it has."""


TARGETS: dict[str, tuple[type[Target], int, float]] = {
    "decoders": (Decoders, 10_000, 0.70),
    "framing": (Framing, 500, 0.05),
    "config": (Config, 300, 0.02),
    "geometry": (Geometry, 300, 0.08),
    "client": (Client, 500, 0.05),
    "daemon": (Daemon, 2_000, 0.10),
}
"""By name: the target, messages of a short run, and its part of a long one."""
