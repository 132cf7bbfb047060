"""`tierd demo` end to end on the host backend: what a newcomer types first."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import psutil
import pytest

DEMO = [sys.executable, "-m", "tierd", "demo", "--device=host"]
TIMEOUT_S = 500


@pytest.mark.parametrize("arguments", [[], ["--ranks=1", "--arena"]])
def test_pages_go_all_the_way_and_every_byte_is_right(arguments: list[str]) -> None:
    run = subprocess.run(
        [*DEMO, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["failures"] == []
    assert report["bytes_wrong"] == 0
    assert report["bytes_checked"] > 0
    assert report["working_set_pages"] > report["host_pages"] > report["device_pages"]
    for count in ("backed_up", "restored", "evicted_device", "evicted_host"):
        assert report[f"pages_{count}"] > 0
    assert 0 < report["enqueue_p50_us"] <= report["enqueue_p99_us"]


def test_the_table_has_the_figures_that_people_ask_for() -> None:
    run = subprocess.run(
        [*DEMO, "--ranks=1"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode == 0, run.stderr
    for words in ("pages backed up", "pages restored", "hit rate", "GB/s", "p99", "bytes wrong"):
        assert words in run.stdout


def test_a_run_too_short_to_evict_says_so_and_fails() -> None:
    run = subprocess.run(
        [*DEMO, "--turns=8"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert run.returncode == 1
    assert "no page was evicted from host memory" in " ".join(run.stdout.split())


def long_demo() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A demo that goes on until it is stopped, with its daemon and both ranks at work."""
    demo = subprocess.Popen(
        [*DEMO, "--turns=1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    parent = psutil.Process(demo.pid)
    while demo.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            family = parent.children(recursive=True)
            if sum("tierd_client.demo" in " ".join(child.cmdline()) for child in family) == 2:
                return demo, family
    raise AssertionError(demo.communicate()[1])


def test_a_rank_that_is_killed_is_named_and_nothing_is_left_running() -> None:
    demo, family = long_demo()
    rank = next(p for p in family if p.cmdline()[-2:] == ["--rank", "1"])
    rank.kill()
    _, errors = demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 1
    assert "rank1 ended with exit status -9" in errors
    assert psutil.wait_procs(family, TIMEOUT_S)[1] == []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_takes_everything_with_it(stop: signal.Signals) -> None:
    demo, family = long_demo()
    demo.send_signal(stop)
    demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode != 0
    assert psutil.wait_procs(family, TIMEOUT_S)[1] == []
