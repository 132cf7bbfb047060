"""Real daemons and engines for the tests: each in processes of its own, ended with the test."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tierd.cli.daemon import ask
from tierd.wire.limits import PROTOCOL_VERSION
from tierd.wire.messages import Status, StatusRequest

DEADLINE_S = 300.0


class Daemon:
    """`tierd serve`, by default on the host backend with two devices, and with more patience than
    usual: on a machine with other things to do none of its deadlines passes."""

    def __init__(
        self,
        directory: Path,
        memory: str = "256MiB",
        devices: str = "host:2",
        flags: Sequence[str] = (),
        patience: float = 10.0,
    ) -> None:
        self.socket = directory / "tierd.sock"
        self._memory = memory
        self._devices = devices
        self._flags = [*flags, "--patience", str(patience)]
        self._log = directory / "daemon.log"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when engines can connect."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tierd", "serve", "--socket", str(self.socket)),
                    *("--devices", self._devices, "--memory", self._memory, "--no-memory-check"),
                    *self._flags,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        line = read_line(self._process)
        assert line.startswith("tierd ready"), f"{line!r}\n{self._log.read_text()}"

    def kill(self) -> None:
        """End all its processes at once, with nothing said to anybody."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        _reap(self._process)

    def freeze(self) -> None:
        """Stop its control: it answers nobody, and nobody notices."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self._process.terminate()
            _reap(self._process)

    def status(self) -> dict[str, Any]:
        request = StatusRequest(protocol=PROTOCOL_VERSION)
        return ask(self.socket, request, Status, timeout_s=DEADLINE_S).data

    @property
    def pages_copied(self) -> tuple[int, int]:
        """Pages that the copiers have moved to the host and back since the daemon started."""
        copiers = self.status()["copiers"]
        return (
            sum(copier["backup_pages"] for copier in copiers),
            sum(copier["restore_pages"] for copier in copiers),
        )


class EngineProcess:
    """A `TreeEngine` in a process of its own, one rank of an engine.

    A call sends its command and returns; `answer` waits for the result. The ranks of a group
    agree in collectives, so all of them must have been told before one is waited for.
    """

    def __init__(self, daemon: Daemon, model: Path, *arguments: str) -> None:
        self._log = daemon.socket.parent / f"engine-{time.monotonic_ns()}.log"
        script = str(Path(__file__).with_name("engine_process.py"))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, script, str(daemon.socket), str(model), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        line = read_line(self.process)
        assert line, self._log.read_text()
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def call(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def refusal(self) -> str:
        """What the engine could not start for."""
        answer = json.loads(read_line(self.process))
        return str(answer["refused"])

    def kill(self) -> None:
        self.process.kill()
        _reap(self.process)


@contextlib.contextmanager
def engine_processes(
    daemon: Daemon, model: Path, ranks: Sequence[Sequence[str]] = ((),)
) -> Iterator[list[EngineProcess]]:
    """Engines that have started, one for each list of arguments; killed at the end."""
    engines = [EngineProcess(daemon, model, *arguments) for arguments in ranks]
    try:
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def both(ranks: list[EngineProcess], command: str, **arguments: Any) -> Any:
    """One step of a group: every rank does the same, and must say the same."""
    for rank in ranks:
        rank.tell(command, **arguments)
    first, *others = [rank.answer() for rank in ranks]
    assert all(other == first for other in others)
    return first


def _reap(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a process that is ending, and close our ends of its pipes."""
    process.wait(DEADLINE_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it has not read any more
                pipe.close()


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of its output; empty if it ends, or says nothing in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    return process.stdout.readline() if ready else ""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.01)


def prompt(seed: int, length: int) -> list[int]:
    """A prompt unlike any other seed's."""
    return [(seed * 7919 + i * 31) % 50_000 for i in range(length)]


def write_model(directory: Path, weights: bytes = b"weights", age_s: float = 3600.0) -> Path:
    """A model's directory as far as tierd looks: files, older than any engine."""
    directory.mkdir(exist_ok=True)
    for name, content in (("config.json", b"{}"), ("model.safetensors", weights)):
        (directory / name).write_bytes(content)
        os.utime(directory / name, (time.time() - age_s,) * 2)
    return directory
