"""The processes of `tierd demo`: started, listened to, and ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tierd.wire.errors import TierdError

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
RANKS_TIMEOUT_S = 900.0
_LOG_LINES = 15

Line = Mapping[str, Any]


class DemoFailedError(TierdError):
    """A process of the demo failed. The text is what it said."""


@contextlib.contextmanager
def running_daemon(
    socket: Path, flags: Sequence[str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A real `tierd serve` with these flags, from its ready line to its clean end.

    Raises: DemoFailedError: it never got ready, or its end was not clean. To one that comes from
        inside it adds what the daemon has said.
    """
    command = [sys.executable, "-m", "tierd", "serve", "--socket", str(socket), *flags]
    started: list[subprocess.Popen[bytes]] = []
    try:
        _start(command, log, started)
        (daemon,) = started
        _await_ready(daemon, log)
        try:
            yield daemon
        except DemoFailedError as error:
            said = _tail(log)
            raise DemoFailedError(
                f"{error}\nthe daemon's log:\n{said}" if said else str(error)
            ) from error
    finally:
        _end(started)
    if daemon.returncode != 0:
        raise DemoFailedError(f"the daemon ended with {daemon.returncode}:\n{_tail(log)}")
    if socket.exists():
        raise DemoFailedError(f"the daemon left its socket behind: {socket}")


@contextlib.contextmanager
def running_group(
    commands: Sequence[Sequence[str]],
    logs: Sequence[Path],
    on_progress: Callable[[Line], None],
    timeout_s: float = RANKS_TIMEOUT_S,
) -> Iterator[list[Line]]:
    """Run processes that print JSON lines; give each one's `result`, in order. They stay, with
    their sessions, until the context ends: that closes their standard input.

    Raises: DemoFailedError: one failed, gave no result, or they took too long together.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            _start(command, log, processes)
        deadline = time.monotonic() + timeout_s
        yield _listen(processes, logs, on_progress, deadline)
        for process in processes:
            _stdin(process).close()
        for process, log in zip(processes, logs, strict=True):
            try:
                status = process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise DemoFailedError(f"{log.stem} does not end:\n{_tail(log)}") from None
            if status != 0:
                raise DemoFailedError(_epitaph(process, log))
    finally:
        _end(processes)


def _start(command: Sequence[str], log: Path, started: list[subprocess.Popen[bytes]]) -> None:
    """Start a process and note it in `started`.

    A signal that ends the demo is held back meanwhile: whoever it interrupted between the fork and
    the note would leave a process behind that nobody knows of.
    """
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in numbers}
    try:
        with log.open("wb") as stderr:
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        signal.raise_signal(late)


def _listen(
    processes: Sequence[subprocess.Popen[bytes]],
    logs: Sequence[Path],
    on_progress: Callable[[Line], None],
    deadline: float,
) -> list[Line]:
    """Read until every process has given its result."""
    results: dict[int, Line] = {}
    unfinished = [b""] * len(processes)
    with selectors.DefaultSelector() as selector:
        for index, process in enumerate(processes):
            selector.register(_stdout(process), selectors.EVENT_READ, index)
        while len(results) < len(processes):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DemoFailedError("not done in time")
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    # The first to end is the one to name: the others end because it is gone.
                    processes[key.data].wait(STOP_TIMEOUT_S)
                    raise DemoFailedError(_epitaph(processes[key.data], logs[key.data]))
                *lines, unfinished[key.data] = (unfinished[key.data] + data).split(b"\n")
                for line in map(json.loads, lines):
                    if "result" in line:
                        results[key.data] = line["result"]
                    else:
                        on_progress(line)
    return [results[index] for index in range(len(processes))]


def _await_ready(daemon: subprocess.Popen[bytes], log: Path) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(_stdout(daemon), selectors.EVENT_READ)
        if not selector.select(READY_TIMEOUT_S):
            raise DemoFailedError(f"no daemon after {READY_TIMEOUT_S:.0f} s:\n{_tail(log)}")
    if not _stdout(daemon).readline().startswith(b"tierd ready"):
        raise DemoFailedError(f"the daemon did not start:\n{_tail(log)}")


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end, and kill those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def _stdout(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _epitaph(process: subprocess.Popen[bytes], log: Path) -> str:
    return f"{log.stem} ended with exit status {process.returncode}:\n{_tail(log)}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
