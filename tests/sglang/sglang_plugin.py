"""tierd's plugin as SGLang finds it: by the entry point that pyproject.toml declares."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
GROUP = "sglang.srt.plugins"


def install_metadata(directory: Path) -> Path:
    """What installing tierd leaves behind for SGLang to find. Returns: `directory`, which must be
    on `sys.path`."""
    declared = tomllib.loads(_PYPROJECT.read_text())["project"]["entry-points"][GROUP]
    info = directory / "tierd-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tierd\nVersion: 0\n")
    lines = [f"{name} = {value}\n" for name, value in declared.items()]
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")
    return directory


def load() -> None:
    """What each of SGLang's processes does when it starts."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
