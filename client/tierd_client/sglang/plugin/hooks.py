"""Puts hooks around SGLang's methods, where those are what this was written for.

A method that is missing or takes other parameters is left alone, and said once.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
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


def put_in(hooks: Sequence[Hook]) -> bool:
    """Put hooks in, through SGLang's own registry, unless they are in already; none of them if one
    does not fit.

    Call it when SGLang has loaded its plugins; what others have registered is applied with it.

    Returns: whether all are in. If not, the reason has been logged.
    """
    reasons = [reason for hook in hooks if (reason := misfit(hook))]
    if not reasons:
        reasons = [
            f"another plugin has hooked {hook.target}" for hook in hooks if not _put_in(hook)
        ]
    for reason in reasons:
        if reason not in _said:
            _said.add(reason)
            log.warning("tierd: a part of the plugin stays out: %s", reason)
    return not reasons


def _put_in(hook: Hook) -> bool:
    """The registry patches a target once; whoever comes after that is not heard."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    before = pkgutil.resolve_name(hook.target)
    if before is _in_place.get(hook.target):
        return True
    source = HookSource(plugin_name="tierd", dist_name="tierd")
    HookRegistry.register(hook.target, hook.around, HookType.AROUND, source=source)
    HookRegistry.apply_hooks()
    after = pkgutil.resolve_name(hook.target)
    if after is before:
        return False
    _in_place[hook.target] = after
    return True
