"""A real SGLang server on a GPU, with a daemon beside it: evicted prompts come back as they were,
and they outlive the server.

Needs a GPU, sglang and a model with weights in files:

    TIERD_TEST_MODEL=DIR pytest tests/cuda/test_sglang_server.py -s

`TIERD_TEST_SGLANG_FLAGS` adds flags to the server's command (an attention backend, say).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
MODEL = os.environ.get("TIERD_TEST_MODEL", "")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not MODEL, reason="TIERD_TEST_MODEL names no model"),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang"),
    pytest.mark.timeout(400),
]

PROMPT = 2048
POOL = 4 * PROMPT
NEW = 16
PATIENCE_S = 180.0


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(0.05)
    return value


def prompt(seed: int, tokens: int = PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 50_000) for _ in range(tokens)]


def free_port() -> int:
    """A port that the kernel gives to nobody else before it has been round all others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Server:
    """One `sglang.launch_server` in a process group of its own."""

    def __init__(self, daemon: Path, page: int, log: Path) -> None:
        self.port = free_port()
        linker = {
            "linker": "TierdLinker",
            "linker_module_path": "tierd_client.sglang",
            "linker_extra_config": {"socket": str(daemon)},
        }
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port), "--skip-tokenizer-init"),
            *("--page-size", str(page), "--max-total-tokens", str(POOL), "--random-seed", "1"),
            *("--mem-fraction-static", "0.5", "--enable-cache-report"),
            "--enable-unified-cache-external-linker",
            *("--unified-cache-external-linker-backend", "dynamic"),
            *("--unified-cache-external-linker-config", json.dumps(linker)),
            *shlex.split(os.environ.get("TIERD_TEST_SGLANG_FLAGS", "")),
        ]
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-6000:]
            try:
                self._ask("/health", None)
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                return False
            return True

        until(ready, "the server is up")

    def generate(self, tokens: list[int], new: int = NEW) -> tuple[list[int], dict[str, int]]:
        """Greedy tokens, and where the prompt's cached part came from."""
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        reply = self._ask("/generate", {"input_ids": tokens, "sampling_params": sampling})
        details = reply["meta_info"].get("cached_tokens_details") or {}
        return reply["output_ids"], {"device": 0, "host": 0, **details}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _ask(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if body is not None else None


class Daemon:
    """One `tierd serve`."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        command = [sys.executable, "-m", "tierd", "serve", "--socket", str(socket)]
        self.process = subprocess.Popen(
            [*command, "--memory", "8GiB", "--no-memory-check"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert "ready" in self.process.stdout.readline()

    def status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "tierd", "status", "--json", "--socket", str(self.socket)]
        return dict(json.loads(subprocess.check_output(command)))

    def clear(self) -> None:
        command = [sys.executable, "-m", "tierd", "clear", "--socket", str(self.socket)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def pages(self) -> int:
        return sum(pool["pages"] for pool in self.status()["pools"])

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path / "tierd.sock")
    yield running
    running.stop()


@pytest.mark.parametrize("page", [64, 1])
def test_a_prompt_comes_back_after_eviction_and_after_the_server(
    daemon: Daemon, tmp_path: Path, page: int
) -> None:
    """Greedy tokens after a host hit must be those after a device hit of the same length.

    The prompts that are compared share a prefix and end in less than a page of their own: of a
    prompt that was served before, SGLang uses the last page as first computed, which differs in
    its last bits from one computed on top of a cached prefix.
    """
    shared = prompt(7)
    one, other = shared + prompt(8, 37), shared + prompt(9, 37)
    whole = {"device": PROMPT, "host": 0}
    server = Server(daemon.socket, page, tmp_path / "first.log")
    try:
        server.wait_ready()
        server.generate(shared)
        wanted_of_one, hit = server.generate(one)
        assert hit == whole
        wanted_of_other, hit = server.generate(other)
        assert hit == whole
        fill(server, seed=100)
        daemon.clear()  # of the endings too: what is compared must be computed alike

        server.generate(shared)
        until(lambda: daemon.pages() >= PROMPT // page, "the prompt is backed up")
        fill(server, seed=200)
        tokens, hit = server.generate(one)
        print(f"\npage size {page}: after eviction {hit}")
        assert hit == {"device": 0, "host": PROMPT}
        assert tokens == wanted_of_one
    finally:
        server.kill()
    killed = time.monotonic()
    until(lambda: not daemon.status()["sessions"], "the daemon lets the dead server go", 10)
    print(f"the dead server was let go within {time.monotonic() - killed:.2f} s")

    server = Server(daemon.socket, page, tmp_path / "second.log")
    try:
        server.wait_ready()
        tokens, hit = server.generate(other)
        print(f"page size {page}: in a new server {hit}")
        assert hit == {"device": 0, "host": PROMPT}
        assert tokens == wanted_of_other
    finally:
        server.kill()
    status = daemon.status()
    counters = ("backups_kept", "backups_shed", "restores", "restores_failed")
    print({name: status["counters"][name] for name in counters})
    print(status["pools"][0]["copy_path"])
    assert status["counters"]["restores_failed"] == 0


def fill(server: Server, seed: int) -> None:
    """Other prompts, until nothing of those before is left on the device. Of uneven lengths, so
    that no page is handed back with its old content."""
    for i in range(12):
        server.generate(prompt(seed + i, PROMPT * (55 + 13 * i) // 100 + i), new=1)
