"""Ranks, copiers and control die while a real GPU is at work for them. Prints what it measures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]

from cuda_rank import CudaRank, key  # noqa: E402

from tierd.cli.status import fetch  # noqa: E402

GIB = 1 << 30
PATIENCE_S = 60.0
POOL_BYTES = 4 * GIB
MEMORY = "8GiB"


def until(condition: Callable[[], object], what: str) -> float:
    """Wait for a condition. Returns: how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + PATIENCE_S, f"it does not come: {what}"
        time.sleep(0.002)
    return time.monotonic() - started


class Daemon:
    """`tierd serve` on the first GPU."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "run" / "tierd.sock"
        self._log = directory / "daemon.log"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tierd", "serve", "--socket", str(self.socket)]
        command += ["--devices", "0", "--memory", MEMORY, "--no-memory-check"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"tierd ready"), self._log.read_text()

    def status(self) -> dict[str, Any]:
        return fetch(self.socket)

    @property
    def copier(self) -> int:
        return int(self.status()["copiers"][0]["pid"])

    def ready(self) -> bool:
        return bool(self.status()["copiers"][0]["state"] == "ready")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def daemon(tmp_path: Path, stack: ExitStack) -> Daemon:
    daemon = Daemon(tmp_path)
    stack.callback(daemon.close)
    return daemon


def start_rank(daemon: Daemon, stack: ExitStack, instance: str) -> subprocess.Popen[bytes]:
    """A rank process with backups under way."""
    rank = Path(__file__).parent / "cuda_rank.py"
    command = [sys.executable, str(rank), str(daemon.socket), instance, str(POOL_BYTES)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout.readline() == b"ready\n"
    return process


def used() -> int:
    """GPU memory of all processes."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def make_engine(daemon: Daemon, stack: ExitStack, **options: Any) -> CudaRank:
    """An engine of this process with four pages in the tier, whose restores go to pages 8 to 11."""
    engine = CudaRank(daemon.socket, "here", 64 << 20, **options)
    stack.callback(engine.client.close)
    assert engine.client.connect(PATIENCE_S)
    back_up(engine, "page")
    until(lambda: restored(engine), "restores are served: the watchdog process is up")
    return engine


def back_up(engine: CudaRank, name: str) -> None:
    for page in range(4):
        engine.fill(page, 10 * page + 1)
    keys = b"".join(key(name, page) for page in range(4))

    def kept() -> bool:
        engine.client.flush()
        acks = engine.client.acks()
        if (acks and not acks[-1].kept) or not engine.client.connected:
            offer()
            return False
        return bool(acks)

    def offer() -> None:
        if engine.client.connected:
            engine.client.backup([engine.named(keys, range(4))], parent=b"")

    until(lambda: (engine.client.flush(), engine.client.connected)[1], "it is connected")
    offer()
    until(kept, "its pages are kept")


def start_restore(engine: CudaRank, name: str = "page") -> Any:
    for page in range(8, 12):
        engine.fill(page, 200)
    keys = b"".join(key(name, page) for page in range(4))
    engine.client.flush()
    return engine.client.restore({"r": [engine.named(keys, range(8, 12))]})


def restored(engine: CudaRank, name: str = "page") -> bool:
    restore = start_restore(engine, name)
    restore.wait_layer(len(engine.layers) - 1)
    landed = restore.finish()
    if landed:
        assert all(engine.holds(8 + page, 10 * page + 1) for page in range(4))
    return bool(landed)


def test_gpu_memory_of_a_killed_rank_is_free_again_while_its_pages_were_being_copied(
    daemon: Daemon, stack: ExitStack
) -> None:
    other = make_engine(daemon, stack)
    copier = daemon.copier
    took: list[float] = []
    for n in range(5):
        before = used()
        rank = start_rank(daemon, stack, f"victim {n}")
        held = used() - before
        rank.kill()
        if not POOL_BYTES <= held <= 2 * POOL_BYTES:
            continue  # somebody else uses this GPU, and its memory as a whole says nothing
        took.append(until(lambda b=before: used() <= b + (64 << 20), "its memory is free"))
        assert daemon.copier == copier
        assert restored(other), "another engine notices nothing"
    assert took, "the GPU is not ours alone: no round could be measured"
    seconds = ", ".join(f"{s:.2f}" for s in took)
    print(f"\n{held / GIB:.1f} GiB of GPU memory free after kill -9 in {seconds} s")


def test_a_new_engine_starts_in_the_memory_of_one_that_was_killed(
    daemon: Daemon, stack: ExitStack
) -> None:
    rank = start_rank(daemon, stack, "old")
    free, _ = torch.cuda.mem_get_info()
    # More than is free while the old one's pages are still mapped.
    wanted = free + POOL_BYTES // 2
    rank.kill()
    started = time.monotonic()

    def fits() -> bool:
        try:
            torch.empty(wanted, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            return False
        return True

    until(fits, "the new engine's pool fits")
    print(f"\na pool in a killed engine's place: {time.monotonic() - started:.2f} s after kill -9")
    torch.cuda.empty_cache()


def test_a_copier_that_dies_in_a_restore_fails_it_and_no_more(
    daemon: Daemon, stack: ExitStack
) -> None:
    engine = make_engine(daemon, stack)
    back = []
    for _ in range(3):
        copier = daemon.copier
        os.kill(copier, signal.SIGSTOP)
        restore = start_restore(engine)
        assert not restore.settled, "it is under way"
        restore.wait_layer(len(engine.layers) - 1)
        os.kill(copier, signal.SIGKILL)
        started = time.monotonic()
        torch.cuda.synchronize()
        released = time.monotonic() - started
        assert not restore.finish()
        until(lambda c=copier: daemon.copier not in (0, c) and daemon.ready(), "another copier")
        back.append((released, time.monotonic() - started))
        until(lambda: restored(engine), "the pages, which nobody has lost, come back")
        back_up(engine, f"after {copier}")
    seconds = ", ".join(f"{r:.2f}/{s:.2f}" for r, s in back)
    print(f"\nkill -9 of a copier: waiting stream released / copier back after {seconds} s")


def test_a_thread_in_a_synchronising_call_goes_on_when_control_and_copier_are_killed(
    daemon: Daemon, stack: ExitStack
) -> None:
    engine = make_engine(daemon, stack)
    copier = daemon.copier
    os.kill(copier, signal.SIGSTOP)
    restore = start_restore(engine)
    assert not restore.settled, "it is under way"
    restore.wait_layer(len(engine.layers) - 1)
    killed: list[float] = []

    def kill() -> None:
        time.sleep(0.5)  # the main thread sits in the call by then, or it proves a little less
        daemon.process.kill()
        os.kill(copier, signal.SIGKILL)
        killed.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    torch.cuda.synchronize()
    took = time.monotonic() - killed[0]
    killer.join()
    daemon.process.wait()
    print(f"\ncontrol and copier killed: the stream is released after {took:.2f} s")
    assert not restore.finish()
    daemon.start()
    back_up(engine, "again")
    assert restored(engine, "again")


def test_control_answers_while_a_copier_with_much_pinned_memory_dies(
    daemon: Daemon, stack: ExitStack
) -> None:
    engine = make_engine(daemon, stack)
    until(lambda: engine.client.connected, "it is there")
    copier = daemon.copier
    pidfd = os.pidfd_open(copier)
    os.kill(copier, signal.SIGKILL)
    started = time.monotonic()
    slowest, states = 0.0, []
    while True:
        asked = time.monotonic()
        state = daemon.status()["copiers"][0]["state"]
        slowest = max(slowest, time.monotonic() - asked)
        if not states or states[-1] != state:
            states.append(state)
        if len(states) > 1 and state == "ready":
            break
        assert time.monotonic() < started + PATIENCE_S
    os.close(pidfd)
    took = time.monotonic() - started
    print(
        f"\na copier of a daemon with {MEMORY} killed: {' -> '.join(states)} in {took:.2f} s; "
        f"control's slowest answer meanwhile {slowest * 1e3:.0f} ms"
    )
    assert slowest < 1.0
    back_up(engine, "again")
    assert restored(engine, "again")
