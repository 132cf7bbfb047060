"""Sizes of the demo: each has a working set larger than its device pool and its host memory."""

from __future__ import annotations

from tierd_client.demo.pages import Geometry
from tierd_client.demo.workload import Shape

HOST = (
    Geometry(layers=8, heads=4, head_dim=64, page_tokens=16, pages=256),
    Shape(
        conversations=48,
        system_prompts=4,
        system_pages=8,
        first_pages=(8, 16),
        turn_pages=(4, 8),
        max_pages=48,
        batch=4,
    ),
)
"""128 KiB a page and rank: seconds on two cores. 32 MiB of device pages a rank; for 128 MiB of
host memory a rank."""

CUDA = (
    Geometry(layers=36, heads=4, head_dim=128, page_tokens=64, pages=1024),
    Shape(
        conversations=64,
        system_prompts=4,
        system_pages=16,
        first_pages=(16, 32),
        turn_pages=(4, 12),
        max_pages=96,
        batch=6,
    ),
)
"""One rank of two of an 8B model, 4.5 MiB a page: 4.5 GiB of device pages a rank; for 12 GiB of
host memory a rank."""
