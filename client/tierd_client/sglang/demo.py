"""Conversations whose KV does not fit on the device, through SGLang's own tree and a daemon."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tierd_client.sglang.tree_engine import TreeEngine
from tierd_client.sglang.tree_pools import EngineShape

_VOCABULARY = 50_000
_SHAPE = EngineShape(page_tokens=16, pool_tokens=1536, layers=8, heads=8, head_dim=128)


def run(
    socket: str,
    *,
    conversations: int = 16,
    turns: int = 8,
    turn_tokens: int = 48,
    shape: EngineShape = _SHAPE,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """Serve the turns of several conversations, one after the other, and check what comes back.

    Every turn's prompt is the whole conversation so far. All of them together (192 MiB by
    default) are four times as large as the device's pool, so that most turns find their prefix
    evicted there, and restored from the daemon on `socket` as far as it has kept it.

    Args:
        turn_tokens: New tokens a turn.
        progress: Called with the share that is done and a line to show.

    Returns: `requests`, `aborted`; `pages_backed_up`, `pages_restored`; `hit_rate`, the share
        that was restored of the pages that had been computed before and were gone from the
        device; `device_hit_rate`, the share of all prompt tokens found on the device;
        `bytes_checked`, `bytes_wrong` of the reused KV.
    Raises: TimeoutError: backups that are neither done nor given up.
    """
    rng = random.Random(seed)
    histories: list[list[int]] = [[] for _ in range(conversations)]
    requests = aborted = checked = wrong = 0
    prompt_tokens = device_tokens = lost_tokens = loaded_tokens = 0
    total = conversations * turns
    with TreeEngine(socket, shape) as engine:
        for turn in range(turns):
            for number, history in enumerate(histories):
                before = len(history) // shape.page_tokens * shape.page_tokens
                history += [rng.randrange(_VOCABULARY) for _ in range(turn_tokens)]
                running = engine.serve(f"{number}-{turn}", history)
                # A real engine decodes for longer than a backup takes.
                engine.drain()
                requests += 1
                aborted += running.aborted
                checked += running.checked
                wrong += running.wrong
                prompt_tokens += len(history)
                device_tokens += running.device_hit
                lost_tokens += max(0, before - running.device_hit)
                loaded_tokens += running.loaded
                if progress is not None:
                    restored = engine.linker.stats.restored
                    progress(requests / total, f"{requests} requests, {restored} pages restored")
        stats = engine.linker.stats
        return {
            "requests": requests,
            "aborted": aborted,
            "pages_backed_up": stats.kept,
            "pages_restored": stats.restored,
            "hit_rate": loaded_tokens / lost_tokens if lost_tokens else 0.0,
            "device_hit_rate": device_tokens / prompt_tokens,
            "bytes_checked": checked,
            "bytes_wrong": wrong,
        }
