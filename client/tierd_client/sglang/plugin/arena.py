"""Puts the KV pools of an engine that has a tierd linker into arenas, as they are made."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from tierd_client.sglang.plugin.hooks import Hook, misfit

log = logging.getLogger(__name__)

OPTION = "arena"
"""The field of `linker_extra_config` that switches it off."""
_POOLS = "sglang.srt.mem_cache.memory_pool"
_DEEPSEEK_V4 = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_MODULE = "tierd_client.sglang"


def install() -> None:
    """Register the hooks; SGLang applies them when it has loaded its plugins.

    A process that makes KV pools has imported their module by then, so that no other process
    imports it for this.
    """
    if _POOLS not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        reason = misfit(hook)
        if reason:
            log.warning("tierd: a part of the plugin stays out: %s", reason)
        else:
            HookRegistry.register(hook.target, hook.around, HookType.AROUND)


def wanted(config: Any) -> bool:
    """Whether an engine with this `--unified-cache-external-linker-config` is to have arenas."""
    if not isinstance(config, dict) or config.get("linker_module_path") != _MODULE:
        return False
    extra = config.get("linker_extra_config")
    return not isinstance(extra, dict) or extra.get(OPTION, True) is not False


def _create(original: Callable[[Any], Any], pool: Any) -> Any:
    if not _engine_wants_arenas():
        return original(pool)
    from tierd_client.sglang.arena import create_in_arena

    return create_in_arena(original, pool)


def _engine_wants_arenas() -> bool:
    from sglang.srt.runtime_context import get_context

    context = get_context()
    if not context.is_config_namespace_published("memory"):
        return False
    memory = context.config_bag("memory")
    return memory.enable_unified_cache_external_linker and wanted(
        memory.unified_cache_external_linker_config
    )


HOOKS = tuple(
    Hook(target, ("self",), _create)
    for target in (
        f"{_POOLS}.MHATokenToKVPool._create_buffers",
        f"{_POOLS}.MHATokenToKVPoolFP4._create_buffers",
        f"{_POOLS}.MHATokenToKVPoolMXFP8._create_buffers",
        f"{_POOLS}.MLATokenToKVPool._create_buffers",
        f"{_POOLS}.MLATokenToKVPoolFP4._create_buffers",
        f"{_POOLS}.DSATokenToKVPool._create_index_key_cache",
        f"{_DEEPSEEK_V4}.DeepSeekV4SingleKVPool._create_buffers",
        f"{_DEEPSEEK_V4}.DeepSeekV4IndexerPool._create_buffer",
    )
)
"""What allocates the tensors of pools; each time an allocation of its own."""
