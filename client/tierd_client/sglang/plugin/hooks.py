"""Puts hooks around SGLang's methods, where those are what this was written for.

A method that is missing or takes other parameters is left alone, and said once.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class Hook(NamedTuple):
    """`around` is called instead of the method, with the method as its first argument.

    Attributes:
        target: The method's dotted path, "package.module.Class.method".
        parameters: Names of the parameters that it takes in SGLang 0.5.23, `self` included.
    """

    target: str
    parameters: tuple[str, ...]
    around: Callable[..., Any]


_in_place: dict[str, object] = {}
"""Per target, what the class has since its hook is in."""
_said: set[str] = set()


def misfit(hook: Hook) -> str:
    """Why a hook does not fit this SGLang; empty if it does."""
    try:
        method = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return f"this SGLang has no {hook.target} ({error})"
    if not inspect.isfunction(method):
        return f"{hook.target} is no method in this SGLang"
    parameters = tuple(inspect.signature(method).parameters)
    if parameters != hook.parameters:
        return f"{hook.target} takes {parameters} in this SGLang, not {hook.parameters}"
    return ""


def put_in(hook: Hook) -> bool:
    """Put a hook in, through SGLang's own registry, unless it is in already.

    Call it when SGLang has loaded its plugins; what others have registered is applied with it.

    Returns: whether it is in. If not, the reason has been logged.
    """
    reason = misfit(hook)
    if not reason:
        before = pkgutil.resolve_name(hook.target)
        if before is _in_place.get(hook.target):
            return True
        _apply(hook)
        after = pkgutil.resolve_name(hook.target)
        if after is not before:
            _in_place[hook.target] = after
            return True
        reason = f"{hook.target} has been hooked by another plugin before"
    if reason not in _said:
        _said.add(reason)
        log.warning("tierd: a part of the plugin stays out: %s", reason)
    return False


def _apply(hook: Hook) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    source = HookSource(plugin_name="tierd", dist_name="tierd")
    HookRegistry.register(hook.target, hook.around, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()
