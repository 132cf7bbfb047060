"""Real daemons in processes of their own, and small engines whose every byte is known."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tierd_client import Ack, DeviceBuffer, DevicePool, PoolPages, Restore, TierClient

from tierd.channel import Channel
from tierd.wire import codec, limits, messages
from tierd.wire.geometry import namespace_digest

DEADLINE_S = 120.0
PATIENCE = 10.0
"""Of the daemons, if a test is not about what happens when one's deadlines pass: they are so many
times as long as usual, so that a machine with other things to do lets none of them pass."""
OTHER_VERSION = """
from tierd.wire import limits
limits.PROTOCOL_VERSION = {}
from tierd.cli.main import main
main()
"""
"""The command of a release that speaks another version of the protocol."""


def eventually(condition: Callable[[], object], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds; fail with its name if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)


def settles(missing: Callable[[], Sequence[str]], timeout_s: float = DEADLINE_S) -> None:
    """Wait until nothing is missing any more; fail with what still is if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while left := missing():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {'; '.join(left)}"
        time.sleep(0.002)


def freeze(pid: int) -> None:
    """Stop a process. Returns when none of its threads does anything any more."""
    assert pid > 0, "there is no such process"
    os.kill(pid, signal.SIGSTOP)

    def stands_still() -> bool:
        states = set()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                states.add((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states <= set("Tt")

    eventually(stands_still, f"process {pid} stands still")


class Daemon:
    """`tierd serve` on the host backend."""

    def __init__(
        self,
        directory: Path,
        *,
        memory: str = "512MiB",
        devices: str = "host",
        patience: float = PATIENCE,
        log_level: str = "info",
        group: str | None = None,
        verify: str = "off",
        persist: Path | None = None,
        pin_ahead: str | None = None,
        hugepages: str = "off",
        memory_check: bool = False,
        protocol: int = limits.PROTOCOL_VERSION,
    ) -> None:
        self.socket = directory / "tierd.sock"
        self._log = directory / "daemon.log"
        self._options = ["--devices", devices, "--memory", memory, "--hugepages", hugepages]
        self._options += [] if memory_check else ["--no-memory-check"]
        self._options += ["--patience", str(patience), "--log-level", log_level]
        self._options += ["--group", group] if group else []
        self._options += ["--verify", verify]
        self._options += ["--persist", str(persist)] if persist else []
        self._options += ["--pin-ahead", pin_ahead] if pin_ahead else []
        self._program = ["-m", "tierd"]
        if protocol != limits.PROTOCOL_VERSION:
            self._program = ["-c", OTHER_VERSION.format(protocol)]
        self._admin: Channel[messages.ToLifeline] | None = None
        self._family: list[psutil.Process] = []
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when engines can connect."""
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *self._program, "serve", "--socket", str(self.socket)),
                    *self._options,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        line = self.process.stdout.readline() if ready else ""
        assert line.startswith("tierd ready"), f"{line!r}\n{self.log}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def ask(self, request: messages.FromLifeline) -> messages.ToLifeline:
        """An admin request and its answer."""
        if self._admin is None or self._admin.closed:
            self._admin = lifeline(self.socket)
        self._admin.send(request)
        ((answer, _),) = self._admin.wait(DEADLINE_S)
        return answer

    def status(self) -> dict[str, Any]:
        answer = self.ask(messages.StatusRequest(protocol=limits.PROTOCOL_VERSION))
        assert isinstance(answer, messages.Status)
        return answer.data

    def clear(self) -> int:
        answer = self.ask(messages.ClearRequest(protocol=limits.PROTOCOL_VERSION))
        assert isinstance(answer, messages.Done)
        return answer.detail["pages"]

    def pause(self, paused: bool) -> None:
        self.ask(messages.PauseRequest(protocol=limits.PROTOCOL_VERSION, paused=paused))

    def copier_pid(self, device: str = "host:0") -> int:
        return next(c["pid"] for c in self.status()["copiers"] if c["device"] == device)

    def copiers_ready(self) -> bool:
        return all(copier["state"] == "ready" for copier in self.status()["copiers"])

    def family(self) -> list[psutil.Process]:
        """The daemon and every process it started."""
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self, number: signal.Signals = signal.SIGTERM, *, hasty: bool = False) -> None:
        """End it, if it still runs, and see to it that nothing of it is left.

        Args: `hasty`: without what it would finish, or wait for, before its end.
        """
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self.process is None:
            return
        if self.process.poll() is None:
            family = self.family()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            draining = self._log.stat().st_size
            self.process.send_signal(number)
            if hasty and self._has_work_left(draining):
                self.process.send_signal(number)
            self.process.wait(DEADLINE_S)
            _, alive = psutil.wait_procs(family, DEADLINE_S)
            assert not alive
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def _has_work_left(self, log_size: int) -> bool:
        """Once it says, after so much in its log, that it drains: is there anything to finish?"""
        assert self.process is not None
        process, said = self.process, ""

        def drains() -> bool:
            nonlocal said
            said = self._log.read_bytes()[log_size:].decode(errors="replace")
            return "lookups miss from now on" in said or process.poll() is not None

        eventually(drains, "it drains")
        return process.poll() is None and "under way (nothing)" not in said

    def kill(self) -> list[psutil.Process]:
        """Kill control alone. Returns the processes that it leaves behind."""
        assert self.process is not None
        _, *copiers = self.family()
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.stop()
        return copiers


@contextlib.contextmanager
def running(directory: Path, **options: Any) -> Iterator[Daemon]:
    directory.mkdir(exist_ok=True)
    daemon = Daemon(directory, **options)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.stop(hasty=True)


def lifeline(path: Path) -> Channel[messages.ToLifeline]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    return Channel(sock, codec.TO_LIFELINE)


# --- engines ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One pool: every layer has K and V as halves of one allocation."""

    name: str = "kv"
    page_tokens: int = 4
    pages: int = 32
    layers: int = 2
    row_bytes: int = 256
    """Of one token in one buffer."""
    replicated: bool = False
    """All ranks compute the same."""


def keys(name: str, pages: int, first: int = 0) -> list[bytes]:
    """The keys of a chain. Chains of different names share nothing."""
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(first, pages)]


def content(key: bytes, rank: int, pool: str, buffer: int, nbytes: int) -> np.ndarray[Any, Any]:
    """What belongs into a row: it says which page, shard, pool and buffer it is of."""
    seed = hashlib.blake2b(key + f"{rank} {pool} {buffer}".encode(), digest_size=8).digest()
    words = np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(-(-nbytes // 8))
    return words.view(np.uint8)[:nbytes]


class Pages:
    """One rank's pages of one pool, on the CPU or on a GPU."""

    def __init__(self, shape: Shape, rank: int, device: str = "cpu") -> None:
        self.shape, self.rank = shape, 0 if shape.replicated else rank
        self._device = device
        tokens = shape.pages * shape.page_tokens
        self._layers = [
            torch.zeros(2, tokens, shape.row_bytes, dtype=torch.uint8, device=device)
            for _ in range(shape.layers)
        ]
        self._buffers = [layer[half] for half in (0, 1) for layer in self._layers]

    def pool(self) -> DevicePool:
        buffers = [
            DeviceBuffer(layer[half], n) for half in (0, 1) for n, layer in enumerate(self._layers)
        ]
        return DevicePool(
            self.shape.name, self.shape.page_tokens, buffers, replicated=self.shape.replicated
        )

    def named(self, names: Sequence[bytes], pages: Sequence[int]) -> PoolPages:
        tokens = self.shape.page_tokens
        slots = torch.tensor([page * tokens + t for page in pages for t in range(tokens)])
        return PoolPages(self.shape.name, b"".join(names), slots.to(self._device, torch.int64))

    def compute(self, names: Sequence[bytes], pages: Sequence[int]) -> None:
        """The forward pass: fill pages with what belongs to their keys."""
        for name, number, row in self._rows(names, pages):
            expected = content(name, self.rank, self.shape.name, number, row.nbytes)
            _write(row, expected)

    def wipe(self, pages: Sequence[int]) -> None:
        for _, _, row in self._rows([b""] * len(pages), pages):
            _write(row, np.full(row.nbytes, 0xEE, np.uint8))

    def wrong(self, names: Sequence[bytes], pages: Sequence[int]) -> int:
        """Bytes that are not what belongs there."""
        wrong = 0
        for name, number, row in self._rows(names, pages):
            expected = content(name, self.rank, self.shape.name, number, row.nbytes)
            wrong += int((row.cpu().numpy().ravel() != expected).sum())
        return wrong

    def _rows(
        self, names: Sequence[bytes], pages: Sequence[int]
    ) -> Iterator[tuple[bytes, int, torch.Tensor]]:
        tokens = self.shape.page_tokens
        for name, page in zip(names, pages, strict=True):
            for number, buffer in enumerate(self._buffers):
                yield name, number, buffer[page * tokens : (page + 1) * tokens]


def _write(row: torch.Tensor, data: np.ndarray[Any, Any]) -> None:
    """On the CPU without torch, which would do it with several threads."""
    if row.is_cuda:
        row.copy_(torch.from_numpy(data).reshape(row.shape))
    else:
        row.numpy()[:] = data.reshape(row.shape)


class Rank:
    """One rank: its pages and its client."""

    def __init__(
        self,
        path: Path,
        shapes: Sequence[Shape] = (Shape(),),
        *,
        rank: int = 0,
        world_size: int = 1,
        instance: str = "engine",
        namespace: Mapping[str, str] | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.pages = {shape.name: Pages(shape, rank, device) for shape in shapes}
        self.client = TierClient(
            path,
            [pages.pool() for pages in self.pages.values()],
            namespace=namespace or {"model": "m"},
            instance=instance,
            rank=rank,
            world_size=world_size,
            **{"retry_s": 0.05, "lookup_timeout_s": DEADLINE_S, **options},
        )


class Engine:
    """All ranks of an engine in this process, making the same calls.

    A chain is named; page i of it lies in device page `at + i` of every pool.
    """

    def __init__(
        self,
        path: Path,
        shapes: Sequence[Shape] = (Shape(),),
        *,
        world_size: int = 1,
        instance: str = "engine",
        connect: bool = True,
        **options: Any,
    ) -> None:
        self.ranks = [
            Rank(path, shapes, rank=r, world_size=world_size, instance=instance, **options)
            for r in range(world_size)
        ]
        self.shapes = list(shapes)
        self.acks: list[Ack] = []
        """Of rank 0; `others_acks` are those of the other ranks."""
        self.others_acks: list[Ack] = []
        self._rid = 0
        if connect:
            for rank in self.ranks:
                assert rank.client.connect(DEADLINE_S)

    @property
    def client(self) -> TierClient:
        return self.ranks[0].client

    def digest(self) -> bytes:
        """What its chunks say that they are of."""
        client = self.client
        return namespace_digest(client._namespace, len(self.ranks), client._specs, "")

    def step(self) -> None:
        """One iteration of the scheduler."""
        for rank in self.ranks:
            rank.client.flush()
        first, *others = [rank.client.acks() for rank in self.ranks]
        self.acks += first
        for mine in others:
            self.others_acks += mine

    def offer(self, name: str, pages: int, *, first: int = 0, at: int = 0) -> int:
        """Compute pages `first` and on of a chain, and offer them."""
        names = keys(name, pages, first)
        places = range(at + first, at + pages)
        parent = keys(name, first, first - 1)[0] if first else b""
        for rank in self.ranks:
            for pool in rank.pages.values():
                pool.compute(names, places)
            seq = rank.client.backup(
                [pool.named(names, places) for pool in rank.pages.values()],
                node_id=len(names),
                parent=parent,
            )
        return seq

    def settled(self, seq: int) -> bool:
        """Step until a backup is acked on every rank; whether it was kept."""
        wanted = len(self.ranks)

        def acks() -> list[Ack]:
            return [ack for ack in (*self.acks, *self.others_acks) if ack.seq == seq]

        def all_acked() -> bool:
            self.step()
            return len(acks()) == wanted

        eventually(all_acked, f"backup {seq} is acked")
        (kept,) = {ack.kept for ack in acks()}
        return kept

    def back_up(self, name: str, pages: int, *, first: int = 0, at: int = 0) -> bool:
        return self.settled(self.offer(name, pages, first=first, at=at))

    def lookup(self, name: str, pages: int, rid: str | None = None) -> int:
        """The longest prefix that every rank can restore."""
        if rid is None:
            self._rid += 1
            rid = f"look {self._rid}"
        blob = b"".join(keys(name, pages))
        return min(max(r.client.lookup(rid, blob), default=0) for r in self.ranks)

    def start_restore(
        self, name: str, pages: int, *, at: int = 0, rid: str = "load"
    ) -> list[Restore]:
        """Wipe the device pages and have a chain loaded into them."""
        names, places = keys(name, pages), range(at, at + pages)
        restores = []
        for rank in self.ranks:
            for pool in rank.pages.values():
                pool.wipe(places)
            restores.append(
                rank.client.restore(
                    {rid: [pool.named(names, places) for pool in rank.pages.values()]}
                )
            )
        return restores

    def restored(self, name: str, pages: int, *, at: int = 0, rid: str = "load") -> bool:
        """Load a chain; whether it has landed, on every rank, with every byte right."""
        landed = [r.finish() for r in self.start_restore(name, pages, at=at, rid=rid)]
        names, places = keys(name, pages), range(at, at + pages)
        if all(landed):
            for rank in self.ranks:
                for pool in rank.pages.values():
                    assert pool.wrong(names, places) == 0
        return all(landed)

    def connected(self) -> bool:
        self.step()
        return all(rank.client.connected for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.client.close()


class RankProcess:
    """A rank in a process of its own: one that can be killed."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(Path(__file__).parent / "rank_process.py")),
                *(str(path), json.dumps(options)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() is True, "it could not connect"

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, what: str, name: str, pages: int = 0) -> Any:
        """What the rank answers to "offer", "ack", "lookup", "restore" or "reconnect"."""
        assert self.process.stdin is not None
        print(json.dumps([what, name, pages]), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        return json.loads(self.process.stdout.readline()) if ready else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def is_dead(pid: int) -> bool:
    """Gone, or a zombie: it writes nowhere any more."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def open_files(pid: int) -> dict[Path, str]:
    """A process's descriptors, as paths that can be opened, and what they are of."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            found[link] = os.readlink(link)
    return found


def mappings(pid: int, what: str) -> int:
    """How many mappings of a process are of something with this in its name."""
    return sum(what in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def shared_files(pids: Sequence[int]) -> list[str]:
    """Files in /dev/shm that processes have left there: named after them first of all, as torch
    does, or after tierd. Other programs of this machine make and remove theirs all the time, with
    numbers of their own; and a directory of tierd's is somebody's `--persist`."""
    mine = re.compile(f"tierd|\\D*({'|'.join(map(str, pids))})(?!\\d)")
    with os.scandir("/dev/shm") as files:
        return sorted(f.name for f in files if mine.match(f.name) and not f.is_dir())
