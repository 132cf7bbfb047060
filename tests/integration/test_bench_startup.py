"""`tierd bench startup` starts real daemons, sees their memory pinned, and kills them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

from drawings import texts
from rich.console import Console

from tierd.bench.startup import Start, as_table, milestones, rate

GIB = 1 << 30


def test_a_daemon_is_started_pinned_and_killed_and_that_can_be_drawn(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tierd", "bench", "startup", "--devices", "host:2"]
    command += ["--memory", "256MiB", "--threads", "2", "--hugepages", "off", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    (start,) = json.loads(done.stdout)
    assert (start["memory_bytes"], start["devices"], start["threads"]) == (256 << 20, 2, 2)
    assert start["by_page"] == {"4096": 256 << 20}
    assert 0 < start["ready_s"] <= start["all_pinned_s"]
    assert start["gone_s"] > 0

    command = [sys.executable, "-m", "tierd", "bench", "plot", "-", "-o", str(tmp_path / "it.svg")]
    subprocess.run(command, input=done.stdout, text=True, timeout=500, check=True)
    said = texts(tmp_path / "it.svg")
    assert "tierd bench startup: 256.0 MiB of host memory, 2 devices" in said
    assert {"2 threads", "no process is left"} <= set(said)


def test_what_makes_no_sense_is_said_before_anything_starts() -> None:
    for flags, said in (
        (["--threads", "1,0"], "--threads"),
        (["--hugepages", "4MiB"], "auto, off"),
    ):
        command = [sys.executable, "-m", "tierd", "bench", "startup", "--devices", "host", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_milestone_is_where_so_much_was_first_seen_pinned() -> None:
    history = [(1.0, 0), (2.0, 2 * GIB), (3.0, 3 * GIB), (4.0, 5 * GIB)]
    assert list(milestones(history)) == [(1, 2.0), (2, 2.0), (4, 4.0)]
    assert list(milestones([])) == []
    assert rate(history) == 5 / 3
    assert rate(history[2:]) is None, "most of it was over"


def test_the_table_shows_the_milestones_that_were_reached_and_what_memory_is_made_of() -> None:
    mixed = Start(
        memory_bytes=16 * GIB,
        devices=1,
        hugepages="2MiB",
        threads=4,
        by_page={"4096": 4 * GIB, "2097152": 12 * GIB},
        ready_s=1.25,
        pinned_s={"1": 1.5, "8": 2.5},
        all_pinned_s=3.0,
        rate_gibps=9.14,
        gone_s=0.5,
        free_s=None,
        joined_bytes=2 * GIB,
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(as_table([mixed]))
    line = console.export_text().splitlines()[3]
    assert [cell.strip() for cell in line.strip().strip("|").split("|")] == [
        "16.0 GiB",
        "75% 2.0 MiB, 25% 4.0 KiB, 12% joined",
        *("4", "1.25", "1.50", "2.50", "3.00", "9.1", "0.50", ""),
    ]
