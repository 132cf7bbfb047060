"""The watchdog process: whom it outlives, whom it does not, and when it lets streams go on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from descriptors import descriptors_left
from tier_harness import DEADLINE_S, Engine, freeze, running
from tierd_client.segment import SharedSegment, create_segment
from tierd_client.watchdog import Watchdog

from tierd.wire.layout import SegmentSpec

SPEC = SegmentSpec(backup_ring=64, restore_ring=64, max_layers=8)
ENTRY, GENERATION = 3, 41


class Peer:
    """A living process in the place of control or of a copier."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.pidfd = os.pidfd_open(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        assert self.process.stdin
        self.process.stdin.close()
        os.close(self.pidfd)


@contextmanager
def peers(count: int) -> Iterator[list[Peer]]:
    started = [Peer() for _ in range(count)]
    try:
        yield started
    finally:
        for peer in started:
            peer.close()


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    shared = create_segment(SPEC)
    yield shared
    shared.close()


@pytest.fixture
def watchdog(segment: SharedSegment) -> Iterator[Watchdog]:
    dog = Watchdog(segment.fd)
    yield dog
    dog.close()


def until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def arm(watchdog: Watchdog, control: Peer, copier: Peer) -> None:
    watchdog.watch(control.pidfd, copier.pidfd)
    until(watchdog.armed, "the watchdog is armed")


def await_layers(segment: SharedSegment, entry: int = ENTRY, generation: int = GENERATION) -> None:
    segment.fields.awaited[entry] = generation


def released(
    segment: SharedSegment, entry: int = ENTRY, generation: int = GENERATION
) -> Callable[[], bool]:
    return lambda: bool((segment.fields.layers[entry] == generation).all())


def test_streams_are_released_when_control_and_copier_are_both_killed(
    segment: SharedSegment, watchdog: Watchdog
) -> None:
    with peers(2) as (control, copier):
        arm(watchdog, control, copier)
        await_layers(segment)
        control.kill()
        copier.kill()
        until(released(segment), "every layer word holds the awaited generation")


def test_a_wait_that_is_enqueued_after_their_death_is_released_too(
    segment: SharedSegment, watchdog: Watchdog
) -> None:
    with peers(2) as (control, copier):
        arm(watchdog, control, copier)
        control.kill()
        copier.kill()
        for generation in range(1, 4):
            await_layers(segment, entry=generation, generation=generation)
            until(released(segment, generation, generation), f"generation {generation}")


@pytest.mark.parametrize("survivor", ["control", "copier"])
def test_while_one_of_them_lives_nothing_is_released(
    segment: SharedSegment, watchdog: Watchdog, survivor: str
) -> None:
    with peers(3) as (one, other, third):
        control, copier = (one, other) if survivor == "control" else (other, one)
        arm(watchdog, control, copier)
        await_layers(segment)
        other.kill()
        # An answer to a later message shows that the death, which came first, has been dealt with.
        arm(watchdog, control, copier)
        arm(watchdog, one, third)
        assert not segment.fields.layers.any()


def test_a_copier_that_hangs_after_controls_death_is_killed_before_streams_are_released(
    segment: SharedSegment,
) -> None:
    watchdog = Watchdog(segment.fd, copier_grace_s=0.2)
    with peers(2) as (control, copier):
        arm(watchdog, control, copier)
        freeze(copier.process.pid)
        await_layers(segment)
        control.kill()
        until(released(segment), "every layer word holds the awaited generation")
        assert copier.process.wait(DEADLINE_S) == -signal.SIGKILL
    watchdog.close()


def test_a_restore_of_the_next_daemon_is_not_released_on_account_of_the_last_one(
    segment: SharedSegment, watchdog: Watchdog
) -> None:
    with peers(4) as (control, copier, next_control, next_copier):
        arm(watchdog, control, copier)
        await_layers(segment, entry=0, generation=7)
        control.kill()
        copier.kill()
        until(released(segment, 0, 7), "the old wait is released")
        watchdog.watch(next_control.pidfd, next_copier.pidfd)
        until(watchdog.armed, "the watchdog is armed")
        await_layers(segment, entry=0, generation=8)
        arm(watchdog, next_control, next_copier)
        assert (segment.fields.layers[0] == 7).all()
        next_control.kill()
        next_copier.kill()
        until(released(segment, 0, 8), "the new wait is released")


def test_it_is_not_armed_before_it_has_said_so(segment: SharedSegment, watchdog: Watchdog) -> None:
    assert not watchdog.armed()
    with peers(2) as (control, copier):
        freeze(watchdog.pid)
        watchdog.watch(control.pidfd, copier.pidfd)
        assert not watchdog.armed()
        os.kill(watchdog.pid, signal.SIGCONT)
        until(watchdog.armed, "the watchdog is armed")


def test_a_killed_watchdog_is_noticed_and_started_again(
    segment: SharedSegment, watchdog: Watchdog
) -> None:
    with peers(2) as (control, copier):
        arm(watchdog, control, copier)
        first = watchdog.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: not watchdog.armed(), "its death is noticed")
        arm(watchdog, control, copier)
        assert watchdog.pid != first
        await_layers(segment)
        control.kill()
        copier.kill()
        until(released(segment), "the new watchdog releases")


def test_where_no_process_can_be_started_it_is_not_armed_and_another_try_comes_later(
    watchdog: Watchdog,
) -> None:
    with peers(2) as (control, copier):
        arm(watchdog, control, copier)
        killed = watchdog.pid
        os.kill(killed, signal.SIGKILL)
        until(lambda: watchdog.is_dead(), "its end is noticed")
        with descriptors_left(0):
            assert not watchdog.watch(control.pidfd, copier.pidfd)
            assert not watchdog.armed()
        until(lambda: watchdog.watch(control.pidfd, copier.pidfd), "another one is started")
        assert watchdog.pid != killed
        until(watchdog.armed, "it is armed")


def test_an_engine_whose_watchdog_was_killed_gets_another_one(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "run") as daemon:
        engine = Engine(daemon.socket)
        # As a rank on a GPU has.
        dog = engine.client._restores.watchdog = Watchdog(engine.client._shared.fd)
        assert engine.back_up("a", 4)
        until(lambda: engine.lookup("a", 4) == 4, "it is armed")
        os.kill(dog.pid, signal.SIGKILL)
        until(dog.is_dead, "it is dead")
        assert engine.lookup("a", 4) == 0, "nothing would release a stream that waits"
        until(lambda: engine.lookup("a", 4) == 4, "another one is armed")
        assert engine.restored("a", 4)
        engine.close()
        dog.close()


def test_closing_ends_the_process(segment: SharedSegment) -> None:
    watchdog = Watchdog(segment.fd)
    with peers(2) as (control, copier):
        arm(watchdog, control, copier)
        pidfd = os.pidfd_open(watchdog.pid)
        watchdog.close()
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)
    watchdog.close()


ENGINE = """
import os, sys
from tierd.wire.layout import SegmentSpec
from tierd_client.segment import create_segment
from tierd_client.watchdog import Watchdog
watchdog = Watchdog(create_segment(SegmentSpec(8, 8, 8)).fd)
watchdog.watch(os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid()))
while not watchdog.armed():
    pass
forked = os.fork()  # a worker that keeps the engine's descriptors open
if forked:
    print(watchdog.pid, forked, flush=True)
sys.stdin.read()
"""


def test_it_goes_with_a_killed_engine_even_if_a_forked_worker_lives_on() -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert engine.stdin
    assert engine.stdout
    watchdog_pid, worker_pid = map(int, engine.stdout.readline().split())
    maps = Path(f"/proc/{watchdog_pid}/maps").read_text()
    assert "torch" not in maps, "the watchdog must stay small"
    watchdog = os.pidfd_open(watchdog_pid)
    try:
        os.kill(watchdog_pid, signal.SIGTERM)  # what a service manager sends to everybody
        engine.kill()
        engine.wait()
        until(lambda: process_is_gone(watchdog), "the watchdog has exited")
    finally:
        os.kill(worker_pid, signal.SIGKILL)
        engine.stdin.close()
        engine.stdout.close()
        os.close(watchdog)


def process_is_gone(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])
