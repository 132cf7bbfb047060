"""What a tree engine needs of SGLang, imported also where there is no GPU."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import types


@functools.cache
def load_sglang() -> types.SimpleNamespace:
    """What the engine needs of SGLang 0.5.23.

    Raises: ModuleNotFoundError: SGLang, or one of the packages that its cache imports, is missing.
    """
    # Take the Rust core that the wheel brings, rather than try to build one.
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    stand_in_for_torchvision()
    names = {
        "sglang.srt.configs.mamba_utils": ("Mamba2CacheParams", "Mamba2StateShape"),
        "sglang.srt.managers.schedule_batch": ("FINISH_LENGTH", "Req"),
        "sglang.srt.mem_cache.allocator": (
            "PagedTokenToKVPoolAllocator",
            "TokenToKVPoolAllocator",
        ),
        "sglang.srt.mem_cache.allocator.swa": ("SWATokenToKVPoolAllocator",),
        "sglang.srt.mem_cache.base_prefix_cache": ("EvictParams", "InitLoadBackParams"),
        "sglang.srt.mem_cache.cache_init_params": ("CacheInitParams",),
        "sglang.srt.mem_cache.common": ("checkpoint_kv_cache", "release_kv_cache"),
        "sglang.srt.mem_cache.deepseek_v4_memory_pool": ("DeepSeekV4TokenToKVPool",),
        "sglang.srt.mem_cache.memory_pool": (
            "DSATokenToKVPool",
            "HybridLinearKVPool",
            "HybridReqToTokenPool",
            "MHATokenToKVPool",
            "MHATokenToKVPoolFP4",
            "MHATokenToKVPoolMXFP8",
            "MLATokenToKVPool",
            "MiniMaxSparseKVPool",
            "ReqToTokenPool",
        ),
        "sglang.srt.mem_cache.swa_memory_pool": ("SWAKVPool",),
        "sglang.srt.mem_cache.unified_cache.component_type": ("ComponentType",),
        "sglang.srt.mem_cache.unified_radix_cache": ("UnifiedRadixCache",),
        "sglang.srt.environ": ("envs",),
        "sglang.srt.runtime_context": ("get_context",),
        "sglang.srt.sampling.sampling_params": ("SamplingParams",),
    }
    found = types.SimpleNamespace()
    for module_name, wanted in names.items():
        module = importlib.import_module(module_name)
        for name in wanted:
            setattr(found, name, getattr(module, name))
    return found


def stand_in_for_torchvision() -> None:
    """Let SGLang be imported where torchvision is not installed.

    SGLang's model configurations import it, for image processors that no text cache needs, and
    its wheels do not work with a torch built for the CPU. Does nothing where it is installed.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    # transformers must have noticed that it is absent before something by that name is there.
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    for name in ("torchvision", "torchvision.transforms", "torchvision.io"):
        _add_stand_in(name)
    _add_stand_in("torchvision.transforms.functional")


def _add_stand_in(name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []

    def attribute(wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return type(wanted, (), {})

    module.__getattr__ = attribute  # type: ignore[method-assign]
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
