"""Tells linkers that the engine's weights are about to change, however that comes about.

SGLang 0.5.23 resets its cache after an update only if it is asked to and nothing is running, and
a transfer between `begin_weight_update` and `end_weight_update` is not reported at all. So every
door is watched, from before it opens.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from tierd.wire.errors import RefusedError

_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
DOORS = (
    (_SCHEDULER, "Scheduler", "record_weight_version_change"),
    (_UPDATER, "SchedulerWeightUpdaterManager", "update_weights_from_disk"),
    (_UPDATER, "SchedulerWeightUpdaterManager", "update_weights_from_distributed"),
    (_UPDATER, "SchedulerWeightUpdaterManager", "update_weights_from_tensor"),
    (_UPDATER, "SchedulerWeightUpdaterManager", "update_weights_from_ipc"),
    (_UPDATER, "SchedulerWeightUpdaterManager", "begin_weight_update"),
)
"""(module, class, method): what changes weights, and what is called when they have changed.

`end_weight_update` is no door: what came before it went through one of these, and the flush that
an update asks for may come before the end.
"""


class Watcher(Protocol):
    """Whoever holds something that is worth nothing once the weights change."""

    def weights_change(self) -> None:
        """What the engine has cached so far belongs to weights that are going away."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(watcher: Watcher) -> None:
    """Call `watcher.weights_change()` before every change, as long as the watcher lives.

    The doors are classes of the engine, patched once in a process. A process without a scheduler
    has nothing that could call the first of them, so its module is not imported for it.

    Raises: RefusedError: this SGLang has no such door, so that a change could pass unnoticed.
    """
    for module_name, class_name, method in DOORS:
        if module_name == _SCHEDULER and module_name not in sys.modules:
            continue
        owner = getattr(importlib.import_module(module_name), class_name, None)
        door = vars(owner).get(method) if owner is not None else None
        if not callable(door):
            raise RefusedError(
                f"this SGLang has no {class_name}.{method}, so tierd would not notice that "
                "weights change and could serve KV of the old ones; use SGLang 0.5.23"
            )
        if not hasattr(door, "_is_watched_by_tierd"):
            setattr(owner, method, _watched(door))
    _watchers.add(watcher)


def unwatch(watcher: Watcher) -> None:
    """The watcher has nothing to lose any more."""
    _watchers.discard(watcher)


def _watched(door: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(door)
    def announce_and_call(*args: Any, **kwargs: Any) -> Any:
        for watcher in list(_watchers):
            watcher.weights_change()
        return door(*args, **kwargs)

    announce_and_call._is_watched_by_tierd = True  # type: ignore[attr-defined]
    return announce_and_call
