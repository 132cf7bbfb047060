"""`tierd bench startup`: how fast a daemon gets ready and its memory pinned, and how fast a killed
one's is free again. Real daemons, one for each row."""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from tierd.memory.limits import format_size
from tierd.wire.errors import TierdError

GIB = 1 << 30
READY_TIMEOUT_S = 120.0
PIN_TIMEOUT_S = 600.0
DEATH_TIMEOUT_S = 120.0
FREE_TIMEOUT_S = 20.0
LOOK_S = 0.005
"""Between two looks at what goes on."""
GIVEN_BACK = 0.98
"""The memory is free when so much of it is: others use some meanwhile."""
_LOG_LINES = 15

Status = Callable[[], Mapping[str, Any]]
"""Asks a running daemon for its status, as `tierd.control.status` documents it."""


class StartupFailedError(TierdError):
    """A daemon of the measurement failed. The text is what it said."""


@dataclass(frozen=True)
class Start:
    """One daemon's life. Seconds count from its start, those of its death from the kill.

    `hugepages`, `threads`: what `tierd serve` was given. `pinned_s`: by GiB, when so much was
    pinned, all devices together. `rate_gibps`: from the ready line to the end; None if little was
    left by then. `by_page`, `joined_bytes`: as `tierd.control.status` has them. `gone_s`: no
    process is left, and so no GPU memory. `free_s`: the kernel counts the memory as free; None
    where it does not count it, or others took as much meanwhile.
    """

    memory_bytes: int
    devices: int
    hugepages: str
    threads: int
    by_page: dict[str, int]
    ready_s: float
    pinned_s: dict[str, float]
    all_pinned_s: float
    rate_gibps: float | None
    gone_s: float
    free_s: float | None
    joined_bytes: int = 0


def measure(
    socket: Path,
    log: Path,
    status: Status,
    *,
    memory_bytes: int,
    hugepages: str,
    threads: int,
    flags: Sequence[str],
) -> Start:
    """Start a daemon, wait until all its memory is pinned, and kill it.

    Args:
        flags: More of `tierd serve`'s.

    Raises: StartupFailedError: it did not get ready, or could not pin its memory.
    """
    command = [sys.executable, "-m", "tierd", "serve", "--socket", str(socket)]
    command += ["--memory", str(memory_bytes), "--pin-ahead", "all", "--hugepages", hugepages]
    command += ["--pin-threads", str(threads), *flags]
    began = time.monotonic()
    with _daemon(command, log) as daemon:
        _await_ready(daemon, log)
        ready_s = time.monotonic() - began
        memory, history = _follow(daemon, status, log, began)
        pids = [daemon.pid, *(copier["pid"] for copier in status()["copiers"])]
        used = shared_bytes()
        pidfds = [os.pidfd_open(pid) for pid in pids]
        try:
            killed = time.monotonic()
            daemon.kill()
            daemon.wait()
            _await_death(pidfds)
            gone_s = time.monotonic() - killed
        finally:
            for fd in pidfds:
                os.close(fd)
    socket.unlink(missing_ok=True)
    free_s = None
    if used is not None and _await_memory(used - int(memory_bytes * GIVEN_BACK)):
        free_s = time.monotonic() - killed
    return Start(
        memory_bytes=memory_bytes,
        devices=len(pids) - 1,
        hugepages=hugepages,
        threads=threads,
        by_page=dict(memory["by_page"]),
        joined_bytes=memory["joined_bytes"],
        ready_s=ready_s,
        pinned_s={str(n): at for n, at in milestones(history)},
        all_pinned_s=history[-1][0],
        rate_gibps=rate(history),
        gone_s=gone_s,
        free_s=free_s,
    )


def rate(history: Sequence[tuple[float, int]]) -> float | None:
    """GiB/s from the first look to the last; None if most of it was over by the first.

    Args:
        history: (seconds, bytes pinned), in order.
    """
    (first_s, first), (last_s, last) = history[0], history[-1]
    if last - first < last / 2:
        return None
    return (last - first) / GIB / (last_s - first_s)


def milestones(history: Sequence[tuple[float, int]]) -> Iterator[tuple[int, float]]:
    """When 1, 2, 4, 8 ... GiB were pinned.

    Args:
        history: As for `rate`.
    """
    for gib in (1 << n for n in itertools.count()):
        reached = next((at for at, nbytes in history if nbytes >= gib * GIB), None)
        if reached is None:
            return
        yield gib, reached


def shared_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of shared memory on this machine, those in huge pages too. None: it is not counted."""
    values = {}
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        values[name] = int(value.split()[0]) * 1024
    if "Shmem" not in values:
        return None
    huge = 0
    for directory in Path("/sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        size = int(directory.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        total, free = (int((directory / f"{n}_hugepages").read_text()) for n in ("nr", "free"))
        huge += (total - free) * size
    return values["Shmem"] + huge


def as_table(starts: Sequence[Start]) -> Table:
    """A table that is Markdown as it stands."""
    marks = sorted({int(gib) for start in starts for gib in start.pinned_s})
    shown = [gib for gib in marks if gib in (1, 8, 64, 512)]
    table = Table(box=box.MARKDOWN)
    table.add_column("memory", no_wrap=True)
    table.add_column("pages", no_wrap=True)
    names = ["threads", "ready, s", *(f"{gib} GiB, s" for gib in shown), "all, s", "GiB/s"]
    for name in (*names, "killed: gone, s", "killed: free, s"):
        table.add_column(name, justify="right", no_wrap=True)
    for start in starts:
        table.add_row(
            format_size(start.memory_bytes),
            _pages(start),
            str(start.threads),
            f"{start.ready_s:.2f}",
            *(_seconds(start.pinned_s.get(str(gib))) for gib in shown),
            f"{start.all_pinned_s:.2f}",
            "" if start.rate_gibps is None else f"{start.rate_gibps:.1f}",
            f"{start.gone_s:.2f}",
            _seconds(start.free_s),
        )
    return table


def _pages(start: Start) -> str:
    """ "2.0 MiB", or what part of the memory each size has, and which the kernel has joined."""
    parts = sorted(((int(size), n) for size, n in start.by_page.items()), reverse=True)
    text = ", ".join(f"{n / start.memory_bytes:.0%} {format_size(size)}" for size, n in parts)
    if len(parts) == 1:
        text = format_size(parts[0][0])
    joined = f", {start.joined_bytes / start.memory_bytes:.0%} joined"
    return text + (joined if start.joined_bytes else "")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


@contextmanager
def _daemon(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon of one's own, ended in any case."""
    with log.open("wb") as stderr:
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        )
    try:
        yield daemon
    finally:
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(DEATH_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        assert daemon.stdout is not None
        daemon.stdout.close()


def _await_ready(daemon: subprocess.Popen[bytes], log: Path) -> None:
    assert daemon.stdout is not None
    if not select.select([daemon.stdout], [], [], READY_TIMEOUT_S)[0]:
        raise StartupFailedError(f"not ready after {READY_TIMEOUT_S:.0f} s:\n{_tail(log)}")
    if not daemon.stdout.readline().startswith(b"tierd ready"):
        raise StartupFailedError(f"the daemon did not start:\n{_tail(log)}")


def _follow(
    daemon: subprocess.Popen[bytes], status: Status, log: Path, began: float
) -> tuple[Mapping[str, Any], list[tuple[float, int]]]:
    """Look until all is pinned. Returns the last look's `memory`, and (seconds, bytes pinned) of
    every look."""
    history: list[tuple[float, int]] = []
    wanted = 0
    while True:
        memory = status()["memory"]
        now = time.monotonic() - began
        history.append((now, memory["pinned_bytes"]))
        wanted = max(wanted, memory["pin_ahead_bytes"])
        if memory["pin_ahead_bytes"] < wanted or daemon.poll() is not None:
            raise StartupFailedError(f"not all of the memory could be pinned:\n{_tail(log)}")
        if memory["pinned_bytes"] >= wanted:
            return memory, history
        if now > PIN_TIMEOUT_S:
            raise StartupFailedError(f"not pinned after {PIN_TIMEOUT_S:.0f} s:\n{_tail(log)}")
        time.sleep(LOOK_S)


def _await_death(pidfds: Sequence[int]) -> None:
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    for fd in pidfds:
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise StartupFailedError(f"a copier lives {DEATH_TIMEOUT_S:.0f} s after its daemon")


def _await_memory(at_most: int) -> bool:
    """Wait until no more shared memory is in use than that. False: it does not come about."""
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while (shared_bytes() or 0) > at_most:
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
