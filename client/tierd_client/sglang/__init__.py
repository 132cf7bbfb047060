"""tierd as a cache linker of SGLang 0.5.23: the engine's radix tree on a host-memory tier.

    --enable-unified-cache-external-linker
    --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker": "TierdLinker",
        "linker_module_path": "tierd_client.sglang", "linker_extra_config": {"socket": "PATH"}}'

Importing this package does not import SGLang; asking it for `TierdLinker` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierd_client.sglang.linker import TierdLinker

__all__ = ["TierdLinker"]


def __getattr__(name: str) -> Any:
    if name == "TierdLinker":
        from tierd_client.sglang.linker import TierdLinker

        return TierdLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
