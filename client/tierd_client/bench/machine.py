"""Where a measurement ran, to be said beside it."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    """`cpus`, `gpu` (None without one), `python`, `torch`, and `cuda` where torch has it."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
