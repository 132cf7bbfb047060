"""Which engines the linker can serve, judged by their arguments before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_DRAFTS = ("EAGLE", "EAGLE3", "NEXTN")
"""Speculative algorithms whose draft models keep KV in the target's token slots."""

_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "enable_hierarchical_cache": (
        bool,
        "HiCache would be a second host tier beside tierd; leave out --enable-hierarchical-cache",
    ),
    "disaggregation_mode": (
        lambda mode: mode not in (None, "null"),
        "tierd does not serve prefill/decode disaggregation yet; leave out --disaggregation-mode",
    ),
    "speculative_algorithm": (
        lambda algorithm: algorithm not in (None, "NGRAM", *_DRAFTS),
        "tierd does not know where this --speculative-algorithm keeps its KV, and without it a "
        f"restored prefix would spoil the acceptance rate; use {', '.join(_DRAFTS)} or NGRAM",
    ),
    "enable_memory_saver": (
        bool,
        "the memory saver's KV pool cannot be shared through CUDA IPC; "
        "leave out --enable-memory-saver",
    ),
    "enable_kv_cache_sharding": (
        bool,
        "tierd does not serve sharded KV pages yet; leave out --enable-kv-cache-sharding",
    ),
    "dcp_size": (
        lambda size: (size or 1) > 1,
        "tierd does not serve decode context parallelism yet; leave out --dcp-size",
    ),
    "attn_cp_size": (
        lambda size: (size or 1) > 1,
        "tierd does not serve attention context parallelism yet; leave out --attn-cp-size",
    ),
    "pp_size": (
        lambda size: (size or 1) > 1,
        "SGLang 0.5.23 does not keep pipeline stages in step with a linker; leave out --pp-size",
    ),
    "dllm_algorithm": (
        lambda algorithm: algorithm is not None,
        "tierd does not serve diffusion models; leave out --dllm-algorithm",
    ),
}
ARGUMENTS = tuple(_ARGUMENTS)
"""The fields of SGLang's `ServerArgs` that are looked at."""


def refusals(server_args: Any, params: Any) -> Iterator[str]:
    """Why this engine cannot be served, whatever its pools: each reason with what to change; none
    if it can.

    Args:
        server_args: SGLang's `ServerArgs`, or None where there is no server.
        params: SGLang's `CacheInitParams`.
    """
    for name, (is_unsupported, reason) in _ARGUMENTS.items():
        if is_unsupported(getattr(server_args, name, None)):
            yield reason
    if params.pp_size > 1:
        yield _ARGUMENTS["pp_size"][1]
    if params.attn_cp_size > 1:
        yield _ARGUMENTS["attn_cp_size"][1]
    algorithm = getattr(server_args, "speculative_algorithm", None)
    drafts = params.mtp_draft_device_pools or params.sidecar_draft_device_pools
    if (params.is_eagle or algorithm in _DRAFTS) and not drafts:
        yield (
            "the engine does not say where its draft model keeps KV, and without it a restored "
            "prefix would spoil the acceptance rate; leave out --speculative-algorithm"
        )
