"""The `tierd` command as a user meets it: real processes, real sockets, exit statuses and words."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import torch
from tierd_client import DeviceBuffer, DevicePool, PoolPages, TierClient

from tierd.cli.gpus import visible_gpus
from tierd.cli.main import COMMANDS
from tierd.cli.serve import notify_systemd
from tierd.wire.errors import ConfigError

TIERD = [sys.executable, "-m", "tierd"]
TIMEOUT_S = 120


def run(*arguments: str, descriptors: int | None = None) -> subprocess.CompletedProcess[str]:
    """One command to its end, on a wide terminal. `descriptors`: how many it may have open."""
    limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}:{descriptors}"]
    return subprocess.run(
        [*limit, *TIERD, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "COLUMNS": "250"},
    )


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of its output; empty if it ends, or says nothing in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    return process.stdout.readline() if ready else ""


class Daemon:
    """A `tierd serve` that has said that it is ready."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [
                *(*TIERD, "serve", "--socket", str(path), "--memory=256MiB", "--devices=host:2"),
                *("--no-memory-check", "--patience=10"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environ},
        )
        self.ready_line = read_line(self.process)

    def tierd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run(*arguments, "--socket", str(self.path))

    def family(self) -> list[psutil.Process]:
        """The daemon and every process it started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


@contextlib.contextmanager
def daemon_on(path: Path, **environ: str) -> Iterator[Daemon]:
    daemon = Daemon(path, environ)
    try:
        yield daemon
    finally:
        if daemon.process.poll() is None:
            os.killpg(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait(TIMEOUT_S)
        assert daemon.process.stdout is not None
        daemon.process.stdout.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon_on(tmp_path_factory.mktemp("daemon") / "tierd.sock") as running:
        yield running


def test_the_ready_line_says_where_and_with_what(daemon: Daemon) -> None:
    assert daemon.ready_line.startswith(f"tierd ready on {daemon.path}, 256.0 MiB, ")
    assert "host:0, host:1" in daemon.ready_line


def test_status_is_one_object_for_programs(daemon: Daemon) -> None:
    status = json.loads(daemon.tierd("status", "--json").stdout)
    assert status["pid"] == daemon.process.pid
    assert status["memory"]["total_bytes"] == 256 << 20
    assert [copier["device"] for copier in status["copiers"]] == ["host:0", "host:1"]
    assert {copier["state"] for copier in status["copiers"]} == {"ready"}


def test_status_is_tables_for_people(daemon: Daemon) -> None:
    status = daemon.tierd("status")
    assert status.returncode == 0
    for words in ("Pools", "Engines", "Copiers", "copy path", "hit rate", "host:1", "256.0 MiB"):
        assert words in status.stdout


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[TierClient]:
    """A rank with two layers of 16 pages of 4 tokens, registered."""
    layers = [torch.zeros(2, 64, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    buffers = [DeviceBuffer(kv[half], i) for half in (0, 1) for i, kv in enumerate(layers)]
    pool = DevicePool("kv", 4, buffers)
    client = TierClient(
        daemon.path,
        [pool],
        namespace={"model": "m"},
        instance="engine-of-tests",
        lookup_timeout_s=TIMEOUT_S,
    )
    assert client.connect(TIMEOUT_S)
    yield client
    client.close()


def back_up(client: TierClient, key: bytes) -> bool:
    """One page, waited for; whether it was kept."""
    client.backup([PoolPages("kv", key, torch.arange(4))], parent=b"")
    client.flush()
    deadline = time.monotonic() + TIMEOUT_S
    while not (acks := client.acks()):
        assert time.monotonic() < deadline
        client.flush()
    return acks[0].kept


def test_status_shows_engines_and_what_they_keep(daemon: Daemon, engine: TierClient) -> None:
    assert back_up(engine, b"s" * 32)
    (session,) = json.loads(daemon.tierd("status", "--json").stdout)["sessions"]
    assert (session["pid"], session["rank"]) == (os.getpid(), 0)
    table = daemon.tierd("status").stdout
    assert "engine-of-tests" in table
    assert "0 of 1" in table
    assert "4 tok" in table


def test_a_paused_daemon_misses_and_sheds_and_goes_on_where_it_was(
    daemon: Daemon, engine: TierClient
) -> None:
    assert back_up(engine, b"p" * 32)
    daemon.tierd("pause")
    assert engine.lookup("while paused", b"p" * 32) == []
    assert not back_up(engine, b"q" * 32)
    daemon.tierd("resume")
    assert engine.lookup("resumed", b"p" * 32) == [1]
    engine.cancel("resumed")
    assert back_up(engine, b"q" * 32)


def test_what_was_cleared_is_not_found(daemon: Daemon, engine: TierClient) -> None:
    assert back_up(engine, b"c" * 32)
    daemon.tierd("clear")
    assert engine.lookup("cleared", b"c" * 32) == []


def test_pause_is_seen_until_resume(daemon: Daemon) -> None:
    assert daemon.tierd("pause").stdout.startswith("paused")
    assert "PAUSED" in daemon.tierd("status").stdout
    assert daemon.tierd("resume").stdout.startswith("resumed")
    assert json.loads(daemon.tierd("status", "--json").stdout)["paused"] is False


def test_clear_says_what_it_dropped(daemon: Daemon) -> None:
    assert daemon.tierd("clear").stdout.startswith("cleared")
    assert isinstance(json.loads(daemon.tierd("clear", "--json").stdout), dict)


def test_watch_goes_on_until_ctrl_c(daemon: Daemon) -> None:
    command = [*TIERD, "status", "--json", "--watch", "--interval=0.1"]
    with subprocess.Popen(
        [*command, "--socket", str(daemon.path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as watch:
        looks = [json.loads(read_line(watch)) for _ in range(3)]
        watch.send_signal(signal.SIGINT)
        _, errors = watch.communicate(timeout=TIMEOUT_S)
    assert looks[0]["uptime_s"] < looks[2]["uptime_s"]
    assert (watch.returncode, errors) == (0, "")


def test_a_second_daemon_on_a_live_socket_is_refused(daemon: Daemon) -> None:
    second = daemon.tierd("serve", "--devices=host", "--memory=64MiB")
    assert second.returncode == 2
    assert str(daemon.path) in second.stderr
    assert daemon.tierd("status").returncode == 0


def test_neither_control_nor_a_copier_has_torch_in_it(daemon: Daemon) -> None:
    family = daemon.family()
    assert len(family) == 3
    for process in family:
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()


def imported(statements: str) -> set[str]:
    """The modules in a process that has run these."""
    return set(
        subprocess.run(
            [sys.executable, "-c", f"import sys\n{statements}\nprint(*sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
            timeout=TIMEOUT_S,
        ).stdout.split()
    )


def test_importing_tierd_imports_no_torch() -> None:
    commands = "".join(f"import {module}\n" for module, _, _ in COMMANDS.values())
    modules = imported(f"{commands}import tierd.control.server, tierd.copier.__main__")
    assert "tierd.control.server" in modules
    assert "torch" not in modules


def test_a_look_at_the_daemon_waits_for_nothing_that_other_commands_need(tmp_path: Path) -> None:
    modules = imported(
        f"sys.argv = ['tierd', 'status', '--socket', {str(tmp_path / 'none')!r}]\n"
        "from tierd.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert exit.code == 3, exit.code"
    )
    assert "tierd.cli.status" in modules
    assert not modules & {"numpy", "zmq", "tierd.config", "tierd.cli.bench", "tierd.cli.demo"}


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_ends_everything_and_leaves_nothing(
    tmp_path: Path, stop: signal.Signals
) -> None:
    with daemon_on(tmp_path / "run" / "tierd.sock") as daemon:
        family = daemon.family()
        os.killpg(daemon.process.pid, stop)
        assert daemon.process.wait(TIMEOUT_S) == 0
        gone, alive = psutil.wait_procs(family, TIMEOUT_S)
        assert (len(gone), alive) == (3, [])
        assert list((tmp_path / "run").iterdir()) == []


def test_sigterm_to_the_daemon_alone_ends_its_copiers_too(tmp_path: Path) -> None:
    with daemon_on(tmp_path / "tierd.sock") as daemon:
        family = daemon.family()
        daemon.process.terminate()
        assert daemon.process.wait(TIMEOUT_S) == 0
        assert psutil.wait_procs(family, TIMEOUT_S)[1] == []


def test_a_stale_socket_file_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "tierd.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with daemon_on(path) as daemon:
        assert daemon.ready_line.startswith("tierd ready")
        assert daemon.tierd("status").returncode == 0


def test_a_service_manager_is_told_when_engines_can_connect(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(TIMEOUT_S)
        with daemon_on(tmp_path / "tierd.sock", NOTIFY_SOCKET=str(address)) as daemon:
            assert manager.recv(64) == b"READY=1"
            assert daemon.tierd("status").returncode == 0
            assert manager.recv(64) == b"WATCHDOG=1", "its loop goes round"
            manager.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # a full queue would take no other word
                while manager.recv(64):
                    pass
            manager.settimeout(TIMEOUT_S)
            daemon.process.terminate()
            word = b"WATCHDOG=1"
            while word == b"WATCHDOG=1":
                word = manager.recv(64)
            assert word == b"STOPPING=1"


def test_a_service_manager_that_is_gone_costs_the_daemon_nothing(tmp_path: Path) -> None:
    with daemon_on(tmp_path / "tierd.sock", NOTIFY_SOCKET=str(tmp_path / "gone")) as daemon:
        assert daemon.ready_line.startswith("tierd ready")
        assert daemon.tierd("status").returncode == 0


def test_a_service_manager_that_does_not_listen_holds_nobody_up(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        for _ in range(10_000):  # far more than its queue holds
            notify_systemd("WATCHDOG=1", address)
        assert manager.recv(64) == b"WATCHDOG=1"


@pytest.mark.parametrize("command", ["status", "clear", "pause", "resume"])
def test_without_a_daemon_one_line_says_how_to_start_one(tmp_path: Path, command: str) -> None:
    answer = run(command, "--socket", str(tmp_path / "none.sock"))
    assert answer.returncode == 3
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert f"tierd serve --socket {tmp_path / 'none.sock'}" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory=8PiB", "--devices=host"], "--memory 8PiB is more than"),
        (["--memory=63MiB", "--devices=host"], "at least one chunk of 64.0 MiB"),
        (["--memory=lots", "--devices=host"], "write one like 64GiB"),
        (["--devices=GPU-none"], "there is no GPU 'GPU-none'"),
        (["--config=/nonexistent.toml"], "/nonexistent.toml"),
        (["--socket=/proc/tierd/tierd.sock", "--devices=host"], "cannot create its directory"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    arguments: list[str], words: str
) -> None:
    refused = run("serve", *arguments)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert refused.stdout == ""


def test_more_chunks_than_the_process_may_have_descriptors_are_refused(tmp_path: Path) -> None:
    refused = run(
        *("serve", "--socket", str(tmp_path / "tierd.sock"), "--devices=host"),
        *("--memory=64GiB", "--no-memory-check"),
        descriptors=1000,
    )
    assert refused.returncode == 2
    assert "--memory 64.0 GiB" in refused.stderr
    assert "1,000" in refused.stderr
    assert "LimitNOFILE" in refused.stderr


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="CUDA can use the GPUs of this machine")
def test_gpus_that_cuda_cannot_use_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    assert visible_gpus(tmp_path) == []
    (tmp_path / "nvidiactl").touch()
    assert visible_gpus(tmp_path) == []
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ConfigError, match=r"this machine has GPUs, but .*--devices host"):
        visible_gpus(tmp_path)


def test_the_config_file_of_a_daemon_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text('memroy = "1GiB"\n')
    refused = run("serve", "--config", str(file))
    assert refused.returncode == 2
    assert "unknown key `memroy`" in refused.stderr


@pytest.mark.parametrize("command", ["serve", "status", "pause", "resume", "demo"])
def test_help_teaches_by_example(command: str) -> None:
    assert f"tierd {command}" in run(command, "--help").stdout.split("Examples:")[1]
