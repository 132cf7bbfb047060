"""What tierd promises of copies, of a loop beside them, and of control: on one H200, for the pages
of Qwen3-8B (a row of 2 KiB a token). Those of the scheduler's thread are in `scheduler_targets`."""

from __future__ import annotations

from collections.abc import Mapping

MODEL = "Qwen3-8B"

RATES: Mapping[tuple[str, int, int], Mapping[str, float]] = {
    ("arena", 64, 1): {"to_host": 0.95, "to_device": 0.95, "both": 0.90},
    ("arena", 16, 4): {"to_host": 0.90, "to_device": 0.90},
    ("arena", 1, 64): {"to_host": 0.80, "to_device": 0.80},
    ("arena", 1, 1): {"to_host": 0.28, "to_device": 0.21},
    ("stock", 64, 1): {"to_host": 0.84, "to_device": 0.83},
    ("stock", 1, 64): {"to_host": 0.80, "to_device": 0.80},
}
"""By placement, tokens of a page and pages side by side: at least so much of the contiguous copy,
of batches large enough for their constant part not to count."""

SLOWDOWNS = ((1.5, 0.003), (10.0, 0.010))
"""At so many GB/s, a decode-like loop is slower by so much at most."""

PAGES_S = 40_000
"""Pages that control takes in, each second and rank."""
LOOKUP_US = 1000.0
"""What a lookup takes at most meanwhile."""

LAYER_PAGE_TOKENS = 64
"""Restores' layers are promised for pages of so many tokens."""
FIRST_LAYER_TOKENS = 8192
WHOLE_TOKENS = (8192, 65536)
_CONSTANT_S = 600e-6


def first_layer_s(tokens: int, group_bytes: float, link_gbps: float) -> float | None:
    """When layer 0 of a restore is usable at the latest.

    Args:
        tokens: Of the restore. None is promised of others than FIRST_LAYER_TOKENS.
        group_bytes: What the layers that come with it have.
        link_gbps: One contiguous copy to the device.
    """
    if tokens != FIRST_LAYER_TOKENS:
        return None
    return 1.3 * group_bytes / link_gbps / 1e9 + _CONSTANT_S


def whole_restore_s(tokens: int, nbytes: int, own_gbps: float) -> float | None:
    """When all layers of a restore are usable at the latest.

    Args:
        tokens: Of the restore. None is promised of others than WHOLE_TOKENS.
        own_gbps: What pages of this kind reach to the device in a large batch.
    """
    if tokens not in WHOLE_TOKENS:
        return None
    return 1.10 * nbytes / own_gbps / 1e9 + _CONSTANT_S
