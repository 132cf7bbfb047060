"""A group of two ranks on two GPUs of one host, one daemon beside them. Prints how fast both are
together, and one alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(180),
]

from group_rank import CONTIGUOUS_BYTES, CONTIGUOUS_COPIES, PAGE_BYTES  # noqa: E402

PAGES = 1920
"""4 GB a rank: what the link does counts, and not what it takes to begin."""
ROUNDS = 3
AHEAD_BYTES = 1 << 30
"""More than what is claimed ahead of use."""


class Daemon:
    def __init__(self, socket: Path) -> None:
        self.socket = socket
        command = [sys.executable, "-m", "tierd", "serve", "--socket", str(socket)]
        command += ["--devices", "0,1", "--memory", "20GiB", "--no-memory-check"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline()

    def status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "tierd", "status", "--json", "--socket", str(self.socket)]
        return dict(json.loads(subprocess.check_output(command)))

    def clear(self) -> None:
        command = [sys.executable, "-m", "tierd", "clear", "--socket", str(self.socket)]
        subprocess.run(command, check=True)

    def pinned(self) -> bool:
        memory = self.status()["memory"]
        return bool(memory["pinned_bytes"] >= memory["pin_ahead_bytes"])


class Ranks:
    """The processes of a group, which do the same at once."""

    def __init__(self, socket: Path, world_size: int, *options: str) -> None:
        script = str(Path(__file__).parent / "group_rank.py")
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    script,
                    str(socket),
                    str(rank),
                    str(world_size),
                    str(PAGES),
                    *options,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def do(self, what: str) -> float:
        """Returns: the seconds that the slowest took."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(what + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.processes if process.stdout]
        assert all(answers), f"a rank has failed to {what}"
        return max(map(float, answers))

    def round(self) -> tuple[float, float]:
        """There and back, every byte looked at. Returns: GB/s of each rank, there and back."""
        for what in ("connect", "fill"):
            self.do(what)
        there = self.do("backup")
        self.do("lookup")
        back = self.do("restore")
        self.do("check")
        return PAGES * PAGE_BYTES / there / 1e9, PAGES // 2 * PAGE_BYTES / back / 1e9

    def contiguous(self) -> tuple[float, float]:
        """Returns: GB/s of each rank in one block of memory, there and back."""
        self.do("pin")
        there, back = self.do("contiguous_to_host"), self.do("contiguous_to_device")
        nbytes = CONTIGUOUS_BYTES * CONTIGUOUS_COPIES
        return nbytes / there / 1e9, nbytes / back / 1e9

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "run" / "tierd.sock")
    while not daemon.pinned():
        assert daemon.process.poll() is None
    yield daemon
    daemon.process.terminate()
    assert daemon.process.wait(30) == 0
    assert daemon.process.stdout is not None
    daemon.process.stdout.close()


def a_round(daemon: Daemon, world_size: int, *options: str) -> tuple[float, float]:
    """The best of ROUNDS after one in which memory is claimed and pinned. Prints what the links
    carry."""
    ranks = Ranks(daemon.socket, world_size, *options)
    try:
        there, back = ranks.contiguous()
        print(f"{world_size} at once, contiguous: {there:.1f} GB/s each there, {back:.1f} back")
        ranks.round()
        rates = []
        for _ in range(ROUNDS):
            daemon.clear()
            rates.append(ranks.round())
            assert PAGES in [pool["pages"] for pool in daemon.status()["pools"]]
    finally:
        ranks.close()
    there, back = map(max, zip(*rates, strict=True))
    return there, back


def test_two_ranks_get_their_shards_back_each_over_its_own_link(daemon: Daemon) -> None:
    alone = a_round(daemon, 1)
    daemon.clear()
    together = a_round(daemon, 2)
    for what, one, two in zip(("backup", "restore"), alone, together, strict=True):
        print(f"{what}: {one:.1f} GB/s alone, {two:.1f} GB/s each together, {2 * two / one:.2f}")


def test_replicated_pages_are_held_once_and_come_back_to_both(daemon: Daemon) -> None:
    there, back = a_round(daemon, 2, "--replicated")
    (pool,) = daemon.status()["pools"]
    assert pool["shards"] == 1
    assert daemon.status()["memory"]["claimed_bytes"] < PAGES * PAGE_BYTES + AHEAD_BYTES
    print(f"replicated: backup {there:.1f} GB/s, restored to each at {back:.1f} GB/s")
