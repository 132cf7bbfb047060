"""Memory that is pinned ahead of use: shown while it goes on, claimed by pools, pinned again."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
from tier_harness import Engine, Shape, eventually, open_files, running

from tierd.wire.geometry import CHUNK_BYTES

MEMORY = 4 * CHUNK_BYTES
LARGE = Shape(page_tokens=1, layers=2, row_bytes=2 << 20)
"""Seven pages a chunk."""
F_SEAL_FUTURE_WRITE = 0x10
"""linux/fcntl.h: nobody can map the file to write to it any more; who has, can."""


def test_memory_pinned_ahead_serves_pools_and_comes_back_with_its_copier(
    tmp_path: Path, engines: Callable[..., Engine]
) -> None:
    with running(tmp_path, memory="256MiB", pin_ahead="all", devices="host:2") as daemon:

        def pinned() -> int:
            memory = daemon.status()["memory"]
            assert (memory["pin_ahead_bytes"], memory["by_page"]) == (MEMORY, {"4096": MEMORY})
            return int(memory["pinned_bytes"])

        eventually(lambda: pinned() == MEMORY, "all is pinned")
        assert "pinned 256.0 MiB of 256.0 MiB ahead of use" in daemon.log
        assert psutil.Process(daemon.copier_pid()).memory_info().shared > MEMORY // 2
        # Three of four chunks for one device: one has to move.
        engine = engines(daemon.socket, [LARGE])
        assert engine.back_up("a", 15)
        assert daemon.status()["memory"]["claimed_bytes"] == 3 * CHUNK_BYTES
        psutil.Process(daemon.copier_pid()).send_signal(signal.SIGKILL)
        eventually(lambda: daemon.status()["copiers"][0]["restarts"] == 1, "it is gone")
        eventually(lambda: daemon.copiers_ready() and pinned() == MEMORY, "and has pinned again")
        eventually(lambda: engine.lookup("a", 7) == 7, "its pages are still there")
        assert engine.restored("a", 7)


def seal(pid: int, name: str) -> None:
    """Have a file of a process's shared memory mapped by nobody who has not mapped it yet."""
    for link, what in open_files(pid).items():
        if what.startswith(f"/memfd:{name} "):
            with link.open("r+b") as file:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            return
    raise AssertionError(f"{pid} has no {name}")


def test_pages_that_a_copier_which_is_back_cannot_reach_are_dropped_and_the_rest_is_served(
    tmp_path: Path, engines: Callable[..., Engine]
) -> None:
    with running(tmp_path, memory="256MiB") as daemon:
        engine = engines(daemon.socket, [LARGE])
        assert engine.back_up("a", 15)
        assert daemon.status()["memory"]["claimed_bytes"] == 3 * CHUNK_BYTES
        seal(daemon.pid, "tierd-chunk-2")
        psutil.Process(daemon.copier_pid()).send_signal(signal.SIGKILL)
        eventually(lambda: engine.lookup("a", 15) == 7, "what lies in the first chunk is found")
        assert engine.restored("a", 7)
        (pool,) = daemon.status()["pools"]
        assert pool["pages"] == 7, "the others followed those that are lost"
        assert daemon.status()["counters"]["restores_failed"] == 0
        assert "cannot map a chunk of 64 MiB" in daemon.log
        eventually(lambda: daemon.status()["memory"]["total_bytes"] == 3 * CHUNK_BYTES, "no more")
        assert engine.back_up("a", 15, first=7)
        eventually(lambda: engine.lookup("a", 15) == 10, "half of what fits now")
