"""Hooks around SGLang's radix tree and the wrapper that drives the linker: a flush at the end of
each step, leases that end with their requests, and fewer collectives."""

from __future__ import annotations

_loaded = False


def install() -> None:
    """Allow the hooks. They go in when a `TierdLinker` is made, and only then."""
    global _loaded
    _loaded = True
