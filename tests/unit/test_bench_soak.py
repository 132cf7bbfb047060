"""`tierd bench soak`: what it takes for growth, and what not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tierd.bench.soak import Sample, Trend, as_table, look, trends
from tierd.cli.tables import print_whole

MIB = 2**20


def samples(count: int = 21, leak: float = 0.0, claims: int = 5) -> list[Sample]:
    """A process that claims 20 MiB so many times, once a sample, and loses so much with each
    backup."""
    return [
        Sample(
            at_s=10.0 * n,
            backups=1000 * n,
            lookups=0,
            values={
                ("control", "anonymous"): 50 * MIB + min(n, claims) * 20 * MIB + leak * 1000 * n,
                ("control", "descriptors"): 30.0,
                **({("copier", "threads"): 5.0} if n != 12 else {}),
            },
        )
        for n in range(count)
    ]


def test_what_a_process_claims_while_it_warms_up_is_no_growth() -> None:
    memory, descriptors = trends(samples())
    assert (memory.first, memory.last, memory.per_million) == (150.0, 150.0, 0.0)
    assert descriptors == Trend("control", "descriptors", 30.0, 30.0, 30.0, 0.0, 0.0, 0.0)


def test_what_has_filled_up_is_no_growth_in_the_last_third() -> None:
    memory, _ = trends(samples(claims=12))
    assert memory.per_million > 1000
    assert memory.per_million_lately == 0.0


def test_what_each_backup_leaves_behind_is_the_slope() -> None:
    memory, _ = trends(samples(leak=100.0))
    assert memory.per_million == pytest.approx(100e6 / MIB)
    assert memory.per_million_lately == pytest.approx(100e6 / MIB)
    assert memory.per_hour == pytest.approx(100 * 1000 * 360 / MIB)
    assert memory.largest == memory.last > memory.first


def test_a_process_that_was_started_again_has_no_slope() -> None:
    assert {trend.whose for trend in trends(samples())} == {"control"}


def test_too_short_a_run_says_so() -> None:
    with pytest.raises(ValueError, match="run it for longer"):
        trends(samples(3))
    with pytest.raises(ValueError, match="run it for longer"):
        trends([])


GROWING = f"""
import mmap, os, sys
print("as it was", flush=True)
sys.stdin.readline()
private = mmap.mmap(-1, {32 * MIB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
shared = mmap.mmap(-1, {16 * MIB})
for memory in (private, shared):
    for page in range(0, len(memory), mmap.PAGESIZE):
        memory[page] = 1
fd = os.open(os.devnull, os.O_RDONLY)
print("grown", flush=True)
sys.stdin.readline()
"""


def test_a_look_at_a_process_counts_what_it_has() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "as it was\n"
        before = look(process.pid)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "grown\n"
        after = look(process.pid)
    # The kernel counts in batches of pages.
    assert after["anonymous"] - before["anonymous"] == pytest.approx(32 * MIB, abs=4 * MIB)
    assert after["shared"] - before["shared"] == pytest.approx(16 * MIB, abs=2 * MIB)
    assert after["descriptors"] == before["descriptors"] + 1
    assert after["threads"] >= 1


def test_the_table_is_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    print_whole(as_table(trends(samples(leak=100.0))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("|")[1:3] == [" process ", " what           "]
    assert "anonymous, MiB" in lines[2]
