"""Hooks around SGLang's radix tree and the wrapper that drives the linker: a flush at the end of
each step, fewer collectives, and leases that end with their requests.

They are written for SGLang 0.5.23. What a hook decides is the same on all ranks, so a feature is
used only where every rank has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from tierd_client.sglang.plugin.cadence import DrainCadence
from tierd_client.sglang.plugin.hooks import Hook, put_in

log = logging.getLogger(__name__)

FLUSH = "flush"
"""What a step has offered is sent when its results are processed, not in the next iteration."""
REDUCTIONS = "reductions"
"""No all-reduce in an iteration without pending offloads, and few in the others."""
RELEASE = "release"
"""The lease of a lookup, and the wrapper's note of it, end when the request needs them no more."""

_loaded = False


def install() -> None:
    """Allow the hooks. They go in when a linker is made: engines without one stay as they are,
    and processes without a cache import nothing for them."""
    global _loaded
    _loaded = True


def features() -> tuple[str, ...]:
    """Put the hooks in, if SGLang has loaded the plugin. Raises nothing: the other ranks wait.

    Returns: the features that this rank has. They do nothing yet.
    """
    if not _loaded:
        return ()
    return tuple(name for name, hooks in HOOKS.items() if put_in(hooks))


class ActivePlugin:
    """What the plugin does for one linker, which has it as its `plugin`. Says so in the log.

    Args:
        own: Features that this rank has.
        features: Those that every rank has.
        world_size: Ranks of the group.
    """

    def __init__(self, own: Iterable[str], features: frozenset[str], world_size: int) -> None:
        self.features = features
        self.cadence = DrainCadence(world_size)
        active = f"active: {', '.join(sorted(features))}" if features else "not active"
        lacking = ", ".join(sorted(set(own) - features))
        log.info("tierd plugin %s%s", active, lacking and f"; another rank lacks {lacking}")


def _served(wrapper: Any, feature: str) -> Any | None:
    """The linker behind SGLang's wrapper, if it is tierd's and its ranks have the feature."""
    linker = None if wrapper is None else wrapper.cache_linker
    plugin = getattr(linker, "plugin", None)
    return linker if isinstance(plugin, ActivePlugin) and feature in plugin.features else None


def _flush_pending_backups(original: Callable[..., Any], cache: Any) -> None:
    original(cache)
    linker = _served(cache.linker, FLUSH)
    if linker is not None:
        linker.flush()


def _check_hicache_events(original: Callable[..., Any], cache: Any) -> None:
    """SGLang's own drain, which begins with a collective, only when it is due."""
    linker = _served(cache.linker, REDUCTIONS)
    if linker is None or linker.plugin.cadence.due(len(cache.linker.pending_offloads)):
        original(cache)
    else:
        cache.linker.num_completed_offloads()  # this rank alone sends and receives


def _match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """SGLang leaves the marker of an earlier hit where the device has everything by now."""
    linker = _served(wrapper, RELEASE)
    if linker is None:
        return original(wrapper, key, req, result)
    wrapper.hit_markers.pop(req.rid, None)
    result = original(wrapper, key, req, result)
    if not wrapper.has_hit(req.rid):
        linker.release(req.rid)
    return result


def _load_back(original: Callable[..., Any], wrapper: Any, req: Any) -> Any:
    loaded, node = original(wrapper, req)
    linker = _served(wrapper, RELEASE)
    if linker is not None and not loaded:
        linker.release(req.rid)
    return loaded, node


def _release_request(original: Callable[..., Any], wrapper: Any, rid: str) -> None:
    original(wrapper, rid)
    linker = _served(wrapper, RELEASE)
    if linker is not None:
        linker.release(rid)


_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"

HOOKS: dict[str, tuple[Hook, ...]] = {
    FLUSH: (Hook(f"{_CACHE}.flush_pending_backups", ("self",), _flush_pending_backups),),
    REDUCTIONS: (Hook(f"{_CACHE}.check_hicache_events", ("self",), _check_hicache_events),),
    RELEASE: (
        Hook(f"{_WRAPPER}.match", ("self", "key", "req", "result"), _match),
        Hook(f"{_WRAPPER}.load_back", ("self", "req"), _load_back),
        Hook(f"{_WRAPPER}.release_request", ("self", "rid"), _release_request),
    ),
}
