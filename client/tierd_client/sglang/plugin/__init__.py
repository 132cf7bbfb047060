"""The plugin of SGLang (entry point group `sglang.srt.plugins`): what the linker's contract has no
call for.

SGLang runs `install` early in each of its processes, before it is known what a process is for and
whether the engine uses tierd at all. So nothing of SGLang or torch is imported here, and a feature
changes nothing in an engine that has no tierd linker. Without the plugin everything works too.
"""

from __future__ import annotations

import importlib

FEATURES = ("tierd_client.sglang.plugin.tree", "tierd_client.sglang.plugin.arena")
"""Modules with a function `install()` each, run in this order. Importing one and running it must be
cheap in a process that needs nothing of it. If one raises, SGLang logs it and the engine runs on
without that one and those after it."""


def install() -> None:
    """The entry point: SGLang calls it once a process, and filters it by the name `tierd`
    (`SGLANG_PLUGINS`)."""
    for feature in FEATURES:
        importlib.import_module(feature).install()
