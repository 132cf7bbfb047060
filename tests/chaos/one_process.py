"""A whole daemon in this process, turned by hand: control, its sockets, and copiers whose every
operation is checked against what was registered."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tierd.channel import Channel
from tierd.config import ServeConfig
from tierd.control.copiers import Copier, CopierState
from tierd.control.deadlines import Deadlines
from tierd.control.endpoint import Endpoint
from tierd.control.server import Control
from tierd.control.state import State
from tierd.copier.backend import Attachment, Chunk, SharedMemory
from tierd.copier.host import HostBackend
from tierd.copier.operations import Records
from tierd.copier.plan import Batch, Direction
from tierd.copier.worker import Worker
from tierd.wire import codec
from tierd.wire.geometry import CHUNK_BYTES
from tierd.wire.messages import Allocation

CHUNKS = 8
DEADLINE_S = 120.0


class OutOfBoundsError(AssertionError):
    """A copy was planned that reaches beyond what a rank registered."""


class Bounds:
    """Ranges of addresses that may be used."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        self._number = 0

    def add(self, first: int, size: int) -> int:
        self._number += 1
        self._ranges[self._number] = (first, first + size)
        return self._number

    def remove(self, number: int) -> None:
        del self._ranges[number]

    def check(self, firsts: Sequence[int], ends: Sequence[int]) -> None:
        """Raises: OutOfBoundsError: a range that is not inside one of ours."""
        for first, end in zip(firsts, ends, strict=True):
            if not any(low <= first and end <= high for low, high in self._ranges.values()):
                raise OutOfBoundsError(f"{first:#x} to {end:#x}")


class CheckedBackend(HostBackend):
    """The host backend; a copy that is not within one allocation and one chunk is an error."""

    def __init__(self) -> None:
        self.device, self.host = Bounds(), Bounds()
        self.operations = 0

    def map_chunk(self, fd: int, size: int, *options: Any) -> Chunk:
        chunk = super().map_chunk(fd, size, *options)
        chunk.resources.callback(self.host.remove, self.host.add(chunk.address, size))
        return chunk

    def attach(
        self, allocations: Sequence[Allocation], fds: Sequence[int], segment: SharedMemory
    ) -> Attachment:
        attachment = super().attach(allocations, fds, segment)
        for address, allocation in zip(attachment.addresses, allocations, strict=True):
            number = self.device.add(address, allocation.size)
            attachment.resources.callback(self.device.remove, number)
        return attachment

    def submit(self, direction: Direction, batch: Batch) -> None:
        for ops in (batch.boxes, batch.rows):
            self.check(ops)
        super().submit(direction, batch)

    def check(self, ops: Records) -> None:
        """Raises: OutOfBoundsError: an operation that leaves the ranges that are mapped."""
        self.operations += len(ops)
        for op in ops.tolist():
            device, host, width, depth, device_stride, host_stride = op
            last = depth - 1
            self.device.check([device], [device + last * device_stride + width])
            self.host.check([host], [host + last * host_stride + width])


class LocalCopier(Copier):
    """A copier in this process. It cannot be killed: a reason to do so is a fault found."""

    worker: Worker

    def __init__(self, device: str, deadlines: Deadlines) -> None:
        super().__init__(device, deadlines)
        self.backend = CheckedBackend()
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, codec.FROM_COPIER)
        self.worker = Worker(
            Channel(theirs, codec.TO_COPIER),
            self.backend,
            device,
            ready_timeout_s=deadlines.ready_s,
        )
        self.pidfd = os.pidfd_open(os.getpid())
        self.state = CopierState.STARTING

    def overdue(self, now: float) -> bool:
        return False

    def end(self) -> None:
        raise AssertionError(f"copier {self.device} would have been killed")

    def stop(self, timeout_s: float) -> None:
        self.worker.stop()
        if self.channel is not None:
            self.channel.close()
        os.close(self.pidfd)


class OneProcess:
    """The daemon. `turn` is one turn of control and of every copier.

    Args: `patience`: of the daemon, as of `tierd serve`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        devices: int = 2,
        memory_bytes: int = CHUNKS * CHUNK_BYTES,
        patience: float = 100.0,
    ) -> None:
        names = tuple(f"host:{n}" for n in range(devices))
        config = ServeConfig(
            socket=directory / "tierd.sock",
            memory_bytes=memory_bytes,
            devices=names,
            log_level="error",
            patience=patience,
        )
        self.state = State(Endpoint(config.socket), config)
        self.copiers = [LocalCopier(name, self.state.deadlines) for name in names]
        self.state.copiers = {copier.device: copier for copier in self.copiers}
        self.control = Control(self.state)

    def turn(self) -> None:
        self.control.turn(time.monotonic())
        for copier in self.copiers:
            copier.worker.turn()

    def turns(self) -> Iterator[None]:
        """Turns, for as long as anybody would wait for something."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.turn()
            yield

    @property
    def operations(self) -> int:
        """Copies that were checked."""
        return sum(copier.backend.operations for copier in self.copiers)

    def settle(self) -> None:
        """Turn until nothing is under way."""
        deadline = time.monotonic() + DEADLINE_S
        quiet = 0
        while quiet < 20:
            self.turn()
            busy = any(copier.jobs for copier in self.copiers) or any(
                group.heals or group.undecided or group.placing
                for group in self.state.groups.values()
            )
            quiet = 0 if busy else quiet + 1
            assert time.monotonic() < deadline, "it does not come to rest"

    def check(self) -> None:
        """At rest every used slot is a page, and nothing is held that no lease holds."""
        for catalog in self.state.catalogs.values():
            for pool in catalog.pools.values():
                assert pool.capacity - pool.free_slots == pool.pages + pool.slots.withdrawn
        assert not len(self.state.writers)

    def describe(self) -> str:
        """What is under way, for whoever waits in vain."""
        groups = {
            name: (
                group.sequencer.waiting if group.sequencer else None,
                len(group.backups) if group.backups else None,
                len(group.heals),
                group.serving,
            )
            for name, group in self.state.groups.items()
        }
        rooms = {
            name: [(p.name, p.free_slots, p.capacity) for p in group.placing.placement.pools]
            for name, group in self.state.groups.items()
            if group.placing
        }
        jobs = {copier.device: len(copier.jobs) for copier in self.copiers}
        return (
            f"groups (waiting, undecided, heals, serving) {groups}, jobs {jobs}, "
            f"want room (pool, free, of) {rooms}"
        )

    def describe_room(self) -> str:
        """Who has the memory, and who uses it, for whoever gets none."""
        pools = [
            f"{catalog.digest.hex()[:6]} {pool.name}: capacity {pool.capacity}, free "
            f"{pool.free_slots}, pages {pool.pages}, held {pool.held}, withdrawn "
            f"{pool.slots.withdrawn}"
            for catalog in self.state.catalogs.values()
            for pool in catalog.pools.values()
        ]
        leases = {
            name: (len(group.leases), group.leases.restoring)
            for name, group in self.state.groups.items()
        }
        store = self.state.room.store
        return (
            f"{store.claimed_bytes >> 20} of {store.budget_bytes >> 20} MiB claimed by "
            f"[{'; '.join(pools)}]; leases and steps being restored: {leases}; "
            f"shed: {self.state.sheds.counts()}"
        )

    def close(self) -> None:
        self.control.close()


def memfd(nbytes: int) -> int:
    fd = os.memfd_create("tierd-fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd
