"""`tierd demo --sglang`: SGLang's real tree, a real daemon, every reused byte checked."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.sglang


def test_the_tree_gets_back_what_it_evicted_byte_for_byte() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tierd", "demo", "--sglang", "--json"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert (report["bytes_wrong"], report["aborted"]) == (0, 0)
    assert report["pages_restored"] > 0
    assert report["bytes_checked"] > 0
