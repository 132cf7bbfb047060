"""A daemon and engines under load, what is done to them, and what must hold after each blow."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from gpu import Gpu
from tier_harness import DEADLINE_S, Daemon, eventually, is_dead, mappings, settles, shared_files
from traffic import (
    ACK_TIMEOUT_S,
    GPU_POOL_BYTES,
    LOOKUP_TIMEOUT_S,
    VERDICT_TIMEOUT_S,
    Mode,
    Phase,
    Place,
    Word,
    serve,
)

from tierd.wire.errors import TierdError

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["traffic"])

PATIENCE = 0.2
"""The daemon's deadlines, so many times as long as usual."""
BLOCKED_S = 5.0 + VERDICT_TIMEOUT_S
"""A restore's verdict is waited for so long at most: its own time, then the copier's to finish."""
SPARE_DESCRIPTORS = 2
"""Control has some for moments: a connection that is answered, a copier that is started."""
LOADED_S = 20.0
"""What a machine with other things to do may add to a bounded wait."""


class Engine:
    """The ranks of one engine, each a process under load, with their pages on one device."""

    def __init__(
        self, socket: Path, instance: str, world_size: int, seed: int, device: str
    ) -> None:
        self.instance = instance
        self.world_size = world_size
        self.words: list[Any] = []
        self.processes: list[Any] = []
        self._orders: list[Connection] = []
        pipes = [processes.Pipe() for _ in range(world_size - 1)]
        for rank in range(world_size):
            others = [ours for ours, _ in pipes] if rank == 0 else [pipes[rank - 1][1]]
            words = processes.RawArray(ctypes.c_int64, len(Word))
            mine, theirs = processes.Pipe()
            place = Place(socket, instance, rank, world_size, seed, device)
            process = processes.Process(target=serve, args=(place, words, theirs, others))
            process.start()
            theirs.close()
            self.words.append(words)
            self.processes.append(process)
            self._orders.append(mine)
        for ours, theirs in pipes:
            ours.close()
            theirs.close()

    def phase(self, rank: int) -> int:
        return int(self.words[rank][Word.PHASE])

    def total(self, word: Word) -> int:
        return sum(int(words[word]) for words in self.words)

    def tell(self, mode: Mode) -> None:
        with suppress(BrokenPipeError):  # its death shows where it is waited for
            self._orders[0].send(mode)

    def quiet(self) -> bool:
        """Has every rank come to rest, with every byte right?"""
        self.heard()
        return all(words[Word.PHASE] == Phase.QUIET for words in self.words)

    def heard(self) -> None:
        """Fail on what a rank has to complain of."""
        for pipe in self._orders:
            with suppress(EOFError, ConnectionError):
                while pipe.poll():
                    kind, text = pipe.recv()
                    assert kind != "wrong", text

    def kill(self, rank: int) -> int:
        """Returns the process's id."""
        process = self.processes[rank]
        process.kill()
        process.join()
        assert process.pid is not None
        return int(process.pid)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self._orders:
            pipe.close()
        self.processes.clear()
        self._orders.clear()


@dataclass
class Totals:
    """What a world's engines did, and the longest that anything took."""

    faults: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    words: dict[Word, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, engine: Engine) -> None:
        for words in engine.words:
            for word in (Word.KEPT, Word.SHED, Word.HITS, Word.LANDED, Word.FAILED):
                self.words[word] += int(words[word])
            self.words[Word.PAGES_CHECKED] += int(words[Word.PAGES_CHECKED])
            for word in (Word.FLUSH_US, Word.LOOKUP_US, Word.FINISH_US):
                self.words[word] = max(self.words[word], int(words[word]))

    def lines(self) -> Iterator[str]:
        """For people: a table of the faults, then what the load came to."""
        yield "| fault, or what was waited for | times | median s | longest s |"
        yield "|---|---|---|---|"
        for name in sorted(self.seconds):
            taken = sorted(self.seconds[name])
            yield f"| {name} | {len(taken)} | {taken[len(taken) // 2]:.2f} | {taken[-1]:.2f} |"
        yield ", ".join(f"{word.name.lower()} {value:,}" for word, value in self.words.items())


class World:
    """One daemon, and engines of one namespace.

    Args:
        world_size: Ranks of every engine.
        device: Where their pages lie: "host", for two devices of the host backend, or a GPU such
            as "cuda:0", which all ranks share. This process itself never touches it.
        engines: How many engines there always are.
    """

    def __init__(
        self,
        directory: Path,
        *,
        world_size: int,
        seed: int,
        device: str = "host",
        engines: int = 2,
    ) -> None:
        self.rng = random.Random(seed)
        self.totals = Totals()
        self.directory = directory
        self.world_size = world_size
        self.gpu = None if device == "host" else Gpu(device, processes)
        self.daemon = Daemon(
            directory,
            memory="128MiB",
            devices="host:2" if self.gpu is None else device.removeprefix("cuda:"),
            patience=PATIENCE,
        )
        self._device = "cpu" if device == "host" else device
        self.engines: list[Engine] = []
        self._count = engines
        self._names = itertools.count()
        self._descriptors: dict[tuple[int, int, int], int] = {}
        self._gpu_bytes: dict[int, int] = {}
        self._pids: set[int] = set()

    def start(self) -> None:
        self.daemon.start()
        for _ in range(self._count):
            self.new_engine()
        self.recovered()

    def new_engine(self) -> Engine:
        number = next(self._names)
        seed = self.rng.randrange(1 << 30)
        name = f"engine {number}"
        engine = Engine(self.daemon.socket, name, self.world_size, seed, self._device)
        self.engines.append(engine)
        self._pids |= {process.pid for process in engine.processes}
        return engine

    def a_device(self) -> str:
        """The name of one of the daemon's."""
        devices = sorted(copier["device"] for copier in self.daemon.status()["copiers"])
        return str(self.rng.choice(devices))

    def lose(self, engine: Engine) -> None:
        """An engine has died, or is to: what it did counts all the same."""
        self.engines.remove(engine)
        engine.heard()
        self.totals.add(engine)
        engine.close()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.totals.seconds[what].append(time.monotonic() - started)

    # --- what must hold -----------------------------------------------------------------------

    def recovered(self) -> None:
        """Every engine's backups are kept and its restores land, from now on."""
        before = {engine: self._done(engine) for engine in self.engines}

        def all_go_on() -> bool:
            for engine in self.engines:
                engine.heard()
                assert all(process.is_alive() for process in engine.processes), "an engine died"
            return all(
                new > old
                for engine in self.engines
                for new, old in zip(self._done(engine), before[engine], strict=True)
            )

        eventually(all_go_on, "every engine is served again")

    def _done(self, engine: Engine) -> tuple[int, ...]:
        return tuple(int(w[word]) for w in engine.words for word in (Word.KEPT, Word.LANDED))

    def check(self) -> None:
        """Bring all load to rest: then nothing may be held, half written, or too much."""
        self.recovered()
        for engine in self.engines:
            engine.tell(Mode.QUIET)
        for engine in self.engines:
            eventually(engine.quiet, f"{engine.instance} comes to rest")
        settles(self._unaccounted)
        for engine in self.engines:
            flush_s, lookup_s, finish_s = (
                max(words[word] for words in engine.words) / 1e6
                for word in (Word.FLUSH_US, Word.LOOKUP_US, Word.FINISH_US)
            )
            assert flush_s < LOADED_S, "a flush never waits"
            assert lookup_s < LOOKUP_TIMEOUT_S + LOADED_S
            assert finish_s < BLOCKED_S + LOADED_S
            engine.tell(Mode.TRAFFIC)

    def _unaccounted(self) -> list[str]:
        """What is not as it is at rest: sessions, copiers, queue, leases, slots, mappings and
        descriptors; each with what it is and what it should be."""
        status = self.daemon.status()
        wanted = {(e.instance, rank) for e in self.engines for rank in range(e.world_size)}
        sessions = {(s["instance"], s["rank"]) for s in status["sessions"]}
        left = [f"session of rank {rank} of {name}" for name, rank in sorted(sessions - wanted)]
        left += [f"no session of rank {rank} of {name}" for name, rank in sorted(wanted - sessions)]
        for copier in status["copiers"]:
            if copier["state"] != "ready":
                left.append(f"the copier of {copier['device']} is {copier['state']}")
        queue = status["queue"]
        left += [
            f"{queue[what]} {what} queued"
            for what in ("backups", "backup_pages", "restores")
            if queue[what]
        ]
        for pool in status["pools"]:
            name = f"{pool['pool']} of {pool['namespace']}"
            if pool["leased"]:
                left.append(f"{pool['leased']} pages of {name} leased")
            if pool["slots_used"] != pool["pages"]:
                left.append(f"{pool['slots_used']} slots of {name} used for {pool['pages']} pages")
        copiers = [copier["pid"] for copier in status["copiers"]]
        for who, pids in (("copiers", copiers), ("control", [self.daemon.pid])):
            segments = sum(_maps(pid, "tierd-segment") for pid in pids)
            if segments != len(wanted):
                left.append(f"{who} map {segments} segments for {len(wanted)} ranks")
        memory = status["memory"]
        assert memory["claimed_bytes"] <= memory["total_bytes"]
        # The same daemon with as many ranks and chunks has as many descriptors as the last time.
        # All chunks count: those that no pool has claimed yet come when nothing else happens.
        chunks = sum(memory["by_page"].values()) // memory["chunk_bytes"]
        now = len(os.listdir(f"/proc/{self.daemon.pid}/fd"))
        place = (self.daemon.pid, len(wanted), chunks)
        if not left:
            self._descriptors.setdefault(place, now)
        usual = self._descriptors.get(place, now)
        if now > usual + SPARE_DESCRIPTORS:
            left.append(f"{now} descriptors of control, {usual} the last time")
        if self.gpu is not None:
            used = self.gpu.used()
            usual = self._gpu_bytes.setdefault(len(wanted), used)
            if used > usual + GPU_POOL_BYTES // 2:
                left.append(f"{used >> 20} MiB of GPU memory in use, {usual >> 20} the last time")
        return left

    def stop(self) -> None:
        """End all, and look at what is left."""
        family = self.daemon.family() if self.daemon.process is not None else []
        for engine in self.engines:
            engine.tell(Mode.LEAVE)
        for engine in list(self.engines):
            for process in engine.processes:
                process.join(DEADLINE_S)
                assert process.exitcode == 0
            self.lose(engine)
        self.daemon.stop()
        self._close_gpu()
        assert all(is_dead(process.pid) for process in family)
        assert [file.name for file in self.directory.iterdir()] == ["daemon.log"]
        left = shared_files([*self._pids, *(process.pid for process in family)])
        # Torch names a rank's memory for the moment in which it is shared: a rank that is killed in
        # that moment leaves the file. The tier itself names nothing.
        for name in [name for name in left if name.startswith("torch_")]:
            Path("/dev/shm", name).unlink()
            left.remove(name)
        assert left == []

    def abandon(self) -> None:
        """After a failure: leave no process behind, whatever state it is in."""
        for engine in list(self.engines):
            for process in engine.processes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
            engine.close()
        self.engines.clear()
        self._close_gpu()
        with suppress(AssertionError, TierdError, psutil.Error):
            self.daemon.stop()

    def _close_gpu(self) -> None:
        if self.gpu is not None:
            self.gpu.close()
            self.gpu = None


@contextmanager
def running_world(directory: Path, **options: Any) -> Iterator[World]:
    """A world at work. At the end nothing of it is left in /dev/shm or its directory."""
    directory.mkdir()
    world = World(directory, **options)
    try:
        world.start()
        yield world
        world.stop()
    except BaseException:
        world.abandon()
        raise
    finally:
        print(*world.totals.lines(), sep="\n")


# --- what is done to it -----------------------------------------------------------------------

Fault = Callable[[World], None]
FAULTS: dict[str, Fault] = {}


def fault(call: Fault) -> Fault:
    """Register a fault under its name in words."""
    FAULTS[call.__name__.replace("_", " ")] = call
    return call


def _wait_for_phase(world: World, phase: Phase) -> tuple[Engine, int]:
    """A rank that is in some phase just now, and a moment later."""
    engine = world.rng.choice(world.engines)
    rank = world.rng.randrange(engine.world_size)
    deadline = time.monotonic() + 5.0
    while engine.phase(rank) != phase and time.monotonic() < deadline:
        pass
    time.sleep(world.rng.choice([0.0, 0.0002, 0.001, 0.004]))
    return engine, rank


def _rank_killed(world: World, phase: Phase) -> None:
    if phase is Phase.REGISTERING:
        world.lose(world.engines[0])
        engine, rank = world.new_engine(), world.rng.randrange(world.world_size)
        # Or has just done so: nobody can be sure to look in time.
        eventually(lambda: engine.phase(rank) >= phase, "it is about to register")
        time.sleep(world.rng.random() * 0.05)
    else:
        engine, rank = _wait_for_phase(world, phase)
    copiers = [c["pid"] for c in world.daemon.status()["copiers"] if c["pid"]]
    gpu = world.gpu if phase is not Phase.REGISTERING else None  # it may have taken nothing yet
    used = gpu.used() if gpu is not None else 0
    pid = engine.kill(rank)
    with world.timed("of a killed rank nothing is mapped"):
        if gpu is not None:
            eventually(lambda: gpu.used() <= used - GPU_POOL_BYTES, "its GPU memory is free")
        eventually(lambda: not any(_maps(c, f"torch_{pid}") for c in copiers), "mappings closed")
    for process in engine.processes:
        process.join(DEADLINE_S)
        assert process.exitcode is not None, "the others notice and leave"
    world.lose(engine)
    while len(world.engines) < 2:
        world.new_engine()


def _maps(pid: int, what: str) -> int:
    try:
        return mappings(pid, what)
    except (FileNotFoundError, ProcessLookupError):
        return 0


@fault
def rank_killed_while_it_registers(world: World) -> None:
    _rank_killed(world, Phase.REGISTERING)


@fault
def rank_killed_in_a_backup(world: World) -> None:
    _rank_killed(world, Phase.BACKUP)


@fault
def rank_killed_with_a_lease(world: World) -> None:
    _rank_killed(world, Phase.LEASE)


@fault
def rank_killed_in_a_restore(world: World) -> None:
    _rank_killed(world, Phase.RESTORE)


@fault
def copier_killed(world: World) -> None:
    device = world.a_device()
    world.rng.choice([lambda: None, lambda: _wait_for_phase(world, Phase.RESTORE)])()
    os.kill(world.daemon.copier_pid(device), signal.SIGKILL)
    with world.timed("a killed copier is back"):
        eventually(lambda: _restarts(world, device) and world.daemon.copiers_ready(), "it is back")


def _restarts(world: World, device: str) -> int:
    return next(c["restarts"] for c in world.daemon.status()["copiers"] if c["device"] == device)


@fault
def control_killed(world: World) -> None:
    _wait_for_phase(world, world.rng.choice([Phase.BACKUP, Phase.LEASE, Phase.RESTORE]))
    copiers = world.daemon.kill()
    _start_again(world)
    with world.timed("copiers of a killed control are gone"):
        eventually(lambda: all(is_dead(c.pid) for c in copiers), "its copiers are gone")


def _start_again(world: World) -> None:
    connections = {
        (engine, rank): engine.words[rank][Word.CONNECTIONS]
        for engine in world.engines
        for rank in range(engine.world_size)
    }
    world.daemon.start()
    with world.timed("ranks have registered with a new daemon"):
        eventually(
            lambda: all(e.words[r][Word.CONNECTIONS] > n for (e, r), n in connections.items()),
            "all register again",
        )


@fault
def control_and_copiers_killed_while_a_restore_is_awaited(world: World) -> None:
    copiers = [c["pid"] for c in world.daemon.status()["copiers"]]
    for pid in copiers:
        os.kill(pid, signal.SIGSTOP)
    _wait_for_phase(world, Phase.RESTORE)
    world.daemon.kill()
    for pid in copiers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _start_again(world)


@fault
def engine_killed_and_a_new_one_at_once(world: World) -> None:
    engine, _ = _wait_for_phase(world, world.rng.choice([Phase.BACKUP, Phase.RESTORE]))
    for process in engine.processes:
        process.kill()
    new = world.new_engine()
    world.lose(engine)
    with world.timed("a new engine in a dead one's place is served"):
        eventually(lambda: new.total(Word.KEPT) > 0, "its pages are kept")


@fault
def daemon_told_to_stop(world: World) -> None:
    _wait_for_phase(world, world.rng.choice([Phase.BACKUP, Phase.RESTORE]))
    with world.timed("a daemon that is told to stop has ended"):
        world.daemon.stop(world.rng.choice([signal.SIGTERM, signal.SIGINT]))
    _start_again(world)


PAST = {"a moment": 0.1, "the next engine's patience": 1.5, "every deadline": 8.0}
"""How long something is stopped: detach ends at 1 s, a restore at 6 s, an ack at 8 s."""


def _stop_for(world: World, pids: list[int], seconds: float) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _moment(world: World) -> float:
    return world.rng.choices(list(PAST.values()), [6, 3, 1])[0]


@fault
def rank_stopped_then_continued(world: World) -> None:
    engine, rank = _wait_for_phase(world, world.rng.choice([Phase.BACKUP, Phase.RESTORE]))
    pid = engine.processes[rank].pid
    _count_stop(engine)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_moment(world))
    _count_stop(engine)  # what was called between the two above ends after this
    os.kill(pid, signal.SIGCONT)


def _count_stop(engine: Engine) -> None:
    """What a rank times now says nothing; nor that of the others, who wait for it."""
    for words in engine.words:
        words[Word.STOPS] += 1


@fault
def copier_stopped_then_continued(world: World) -> None:
    _wait_for_phase(world, world.rng.choice([Phase.BACKUP, Phase.RESTORE]))
    _stop_for(world, [world.daemon.copier_pid(world.a_device())], _moment(world))


@fault
def copier_stopped_while_a_rank_dies(world: World) -> None:
    device = world.a_device()
    pid = world.daemon.copier_pid(device)
    os.kill(pid, signal.SIGSTOP)
    engine, _ = _wait_for_phase(world, Phase.RESTORE)
    for process in engine.processes:
        process.kill()
    world.new_engine()
    world.lose(engine)
    time.sleep(_moment(world))
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@fault
def control_stopped_then_continued(world: World) -> None:
    _wait_for_phase(world, world.rng.choice([Phase.BACKUP, Phase.RESTORE]))
    _stop_for(world, [world.daemon.pid], _moment(world))


@fault
def whole_daemon_stopped_then_continued(world: World) -> None:
    _wait_for_phase(world, world.rng.choice([Phase.BACKUP, Phase.RESTORE]))
    _stop_for(world, [process.pid for process in world.daemon.family()], _moment(world))


assert PAST["every deadline"] >= ACK_TIMEOUT_S
