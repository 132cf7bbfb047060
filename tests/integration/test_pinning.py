"""Memory that is pinned ahead of use: shown while it goes on, claimed by pools, pinned again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
from tier_harness import Engine, Shape, eventually, running

from tierd.wire.geometry import CHUNK_BYTES

MEMORY = 4 * CHUNK_BYTES


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
        engine = engines(daemon.socket, [Shape(page_tokens=1, layers=2, row_bytes=2 << 20)])
        assert engine.back_up("a", 15)
        assert daemon.status()["memory"]["claimed_bytes"] == 3 * CHUNK_BYTES
        psutil.Process(daemon.copier_pid()).send_signal(signal.SIGKILL)
        eventually(lambda: pinned() < MEMORY, "it is gone")
        eventually(lambda: daemon.copiers_ready() and pinned() == MEMORY, "and has pinned again")
        eventually(lambda: engine.lookup("a", 7) == 7, "its pages are still there")
        assert engine.restored("a", 7)
