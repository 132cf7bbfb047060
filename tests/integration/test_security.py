"""Who gets in, what they can reach, and what the log gives away."""

from __future__ import annotations

import ast
import fcntl
import gc
import json
import logging
import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tierd_client
from registrations import REGISTER
from tier_harness import DEADLINE_S, Daemon, Engine, eventually, keys, lifeline, open_files, running
from tierd_client import TierClient

import tierd
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ConfigError
from tierd.wire.messages import Allocation

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
STRANGER, MEMBERS = 54321, 54322
"""A user and a group whom this machine does not know."""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user can enter, for a daemon's own to be made in."""
    folder = Path(tempfile.mkdtemp(prefix="tierd-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def served(folder: Path, **options: Any) -> Iterator[Daemon]:
    """A daemon that makes the directory of its socket itself."""
    daemon = Daemon(folder, **options)
    daemon.socket = folder / "run" / "tierd.sock"
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop()


def as_user(groups: list[int], call: Callable[[], str]) -> str:
    """What a call says in a process of STRANGER's, who is in these groups."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        gc.disable()  # garbage of this process's may be what its threads work with
        try:
            os.setgroups(groups)
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            answer = call()
        except BaseException as error:
            answer = repr(error)
        os.write(theirs, answer.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def asked(path: Path, request: messages.FromLifeline) -> Callable[[], str]:
    """What the daemon answers."""

    def call() -> str:
        channel = lifeline(path)
        channel.send(request)
        ((answer, _),) = channel.wait(DEADLINE_S)
        return repr(answer)

    return call


ORDERS = [
    messages.StatusRequest(protocol=limits.PROTOCOL_VERSION),
    messages.ClearRequest(protocol=limits.PROTOCOL_VERSION),
    messages.PauseRequest(protocol=limits.PROTOCOL_VERSION, paused=True),
    REGISTER,
]


def modes(daemon: Daemon) -> tuple[int, int, int]:
    """Of the directory, the lifeline's socket and ZeroMQ's."""
    path = daemon.socket
    files = (path.parent, path, Path(f"{path}.zmq"))
    assert all(file.stat().st_uid == os.geteuid() for file in files)
    directory, lifeline_mode, zmq_mode = (stat.S_IMODE(file.stat().st_mode) for file in files)
    return directory, lifeline_mode, zmq_mode


def test_a_daemons_sockets_are_its_users_own(tmp_path: Path) -> None:
    with served(tmp_path) as daemon:
        assert modes(daemon) == (0o700, 0o600, 0o600)


@as_root
def test_another_user_cannot_even_reach_the_socket(public: Path) -> None:
    with served(public) as daemon:
        assert "PermissionError" in as_user([], asked(daemon.socket, ORDERS[0]))


@as_root
def test_another_user_is_refused_whatever_the_sockets_modes_have_become(public: Path) -> None:
    with served(public) as daemon:
        daemon.socket.parent.chmod(0o755)
        daemon.socket.chmod(0o666)
        for order in ORDERS:
            answer = as_user([], asked(daemon.socket, order))
            assert "Refused" in answer
            assert f"not user {STRANGER}" in answer
        assert not daemon.status()["paused"]
        assert daemon.status()["sessions"] == []


@as_root
def test_users_of_the_group_are_served_and_no_others(public: Path) -> None:
    with served(public, group=str(MEMBERS)) as daemon:
        assert modes(daemon) == (0o750, 0o660, 0o660)
        assert daemon.socket.stat().st_gid == MEMBERS
        assert "PermissionError" in as_user([], asked(daemon.socket, ORDERS[0]))
        assert "Status" in as_user([MEMBERS], asked(daemon.socket, ORDERS[0]))
        assert "Done" in as_user([7, MEMBERS, 8], asked(daemon.socket, ORDERS[1]))
        daemon.socket.parent.chmod(0o755)
        daemon.socket.chmod(0o666)
        assert "Refused" in as_user([7, 8], asked(daemon.socket, ORDERS[0]))


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://127.0.0.1:1", "ipc:///tmp/x"])
def test_an_address_of_the_network_is_refused(address: str) -> None:
    command = [sys.executable, "-m", "tierd", "serve", "--devices", "host", "--socket", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "TCP would need CURVE keys" in done.stderr
    assert not Path(address.split(":")[0] + ":").exists()


def test_a_client_of_a_network_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="CURVE"):
        Engine(Path("tcp://somewhere:5555"), connect=False)


def test_what_a_rank_is_given_it_cannot_write_to_or_shrink(daemon: Daemon) -> None:
    engine = Engine(daemon.socket)
    assert engine.back_up("a", 2)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for link, target in open_files(daemon.pid).items():
        if "memfd:tierd-" not in target:
            continue
        fd = os.open(link, os.O_RDWR)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals, target
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        if "presence" in target:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4096)
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
        os.close(fd)
    mine = open_files(os.getpid()).values()
    assert not any("tierd-chunk" in what for what in mine), "host memory is no rank's business"
    engine.close()


PICKLES = {
    *("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    *("multiprocessing", "jsonpickle", "yaml", "code", "runpy"),
}
CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "allow_pickle", "set_sharing_strategy"}
OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}


def sources() -> list[Path]:
    return [
        file
        for package in (tierd, tierd_client)
        for file in Path(str(package.__file__)).parent.rglob("*.py")
    ]


@pytest.mark.parametrize("file", sources(), ids=lambda file: "/".join(file.parts[-3:]))
def test_nothing_is_ever_unpickled(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        imported: list[str] = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        assert not {name.split(".")[0] for name in imported} & PICKLES, ast.unparse(node)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("np.load", "numpy.load", "torch.load"), ast.unparse(node)
            assert name.split(".")[-1] not in CALLS | OBJECTS, ast.unparse(node)


def test_no_log_line_carries_a_key_a_handle_or_a_ticket_of_entry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with running(tmp_path / "d", log_level="debug") as daemon:
        engine = Engine(daemon.socket)
        assert engine.back_up("a", 4)
        assert engine.restored("a", 4)
        assert not engine.restored("nowhere", 2)
        handle = bytes(range(64))
        secret = keys("a", 4)
        link = engine.client._link
        routing_id = link._dealer.identity
        link._dealer.send(secret[0])
        link._dealer.send(codec.encode(messages.Reset(epoch="", next_seq=0)) + secret[0])
        wrong = messages.Lookup(request=1, epoch="", rid="r", pools=[0], keys=secret[0])
        with socket.socket(fileno=os.dup(link._lifeline.fileno())) as sock:
            sock.sendall(codec.frame(codec.encode(wrong)[:-1] + secret[1]))
        guest = lifeline(daemon.socket)
        register = ORDERS[-1]
        assert isinstance(register, messages.Register)
        allocations = [Allocation(size=1, handle=handle)]
        guest.send(
            messages.Register(
                **{name: getattr(register, name) for name in register.__struct_fields__}
                | {"allocations": allocations}
            ),
            [0, 1],
        )
        ((answer, _),) = guest.wait(DEADLINE_S)
        assert isinstance(answer, messages.Refused)
        guest.close()
        eventually(lambda: daemon.status()["counters"]["errors"] >= 4, "it has complained")
        os.kill(daemon.copier_pid(), signal.SIGKILL)
        engine.offer("b", 4, at=8)
        engine.step()
        eventually(daemon.copiers_ready, "the copier is back")
        engine.close()
        eventually(lambda: daemon.status()["sessions"] == [], "the engine is gone")
        text = daemon.log + caplog.text + json.dumps(daemon.status())
        text += answer.reason
    assert "registered" in text
    assert "no valid message" in text or "not a valid message" in text
    for blob in (*secret, *keys("b", 4), handle, routing_id):
        for start in range(0, len(blob) - 8, 4):
            piece = blob[start : start + 8]
            assert piece.hex() not in text.lower()
            assert repr(piece)[2:-1] not in text


def test_a_second_connection_cannot_take_a_ranks_place_by_its_name(daemon: Daemon) -> None:
    engine = Engine(daemon.socket)
    assert engine.back_up("a", 2)
    other = TierClient(
        daemon.socket,
        [pages.pool() for pages in engine.ranks[0].pages.values()],
        namespace={"model": "m"},
        instance="engine",
    )
    with pytest.raises(Exception, match="registered already"):
        other.connect(DEADLINE_S)
    other.close()
    assert engine.restored("a", 2)
    engine.close()
