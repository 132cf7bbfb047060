"""README.md keeps its word: its example runs as it is shown, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from pathlib import Path

from tierd.config import ServeOptions

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TIMEOUT_S = 120
PATIENT = f"""
from tierd_client import TierClient
TierClient.__init__.__kwdefaults__["lookup_timeout_s"] = {TIMEOUT_S}.0
TierClient.connect.__defaults__ = ({TIMEOUT_S}.0,)
"""
"""Before the example: on a machine with other things to do, everything may take its time."""


def block(name: str) -> str:
    """The code block under a comment `<!-- name -->`."""
    match = re.search(rf"<!-- {name} -->\n```\w*\n(.*?)\n```", README, re.DOTALL)
    assert match, f"README.md has no block {name!r}"
    return match[1]


def test_the_client_example_runs_as_shown(tmp_path: Path) -> None:
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    serve = [sys.executable, "-m", "tierd", "serve", "--devices=host", "--memory=64MiB"]
    serve += ["--no-memory-check", "--patience=10"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environ) as daemon:
        try:
            assert daemon.stdout is not None
            assert select.select([daemon.stdout], [], [], TIMEOUT_S)[0]
            assert daemon.stdout.readline().startswith("tierd ready on ")
            example = subprocess.run(
                [sys.executable, "-c", PATIENT + block("example: client")],
                env=environ,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        finally:
            daemon.terminate()
            daemon.wait(TIMEOUT_S)
    assert (example.returncode, example.stderr) == (0, "")
    assert "kept=True" in example.stdout
    assert "4]" in example.stdout


def test_the_two_commands_are_where_ci_looks_for_them() -> None:
    assert block("command: main").endswith("&& tierd demo")
    assert block("command: test").endswith("&& pytest")


def test_every_file_that_it_names_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_setting_is_in_its_table() -> None:
    for name in ServeOptions.__dataclass_fields__:
        assert f"\n| `{name.replace('_', '-')}` |" in README


def test_a_packages_page_names_every_module_of_it() -> None:
    pages = [*(ROOT / "tierd").glob("*/README.md"), ROOT / "client/tierd_client/README.md"]
    assert len(pages) > 4
    for page in pages:
        modules = {file.name for file in page.parent.glob("*.py") if not file.name.startswith("__")}
        named = set(re.findall(r"`(?:\w+/)?(\w+\.py)`", page.read_text()))
        assert modules <= named, page
        assert all(list(ROOT.glob(f"*/**/{name}")) for name in named), page
