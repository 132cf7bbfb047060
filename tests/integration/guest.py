"""A rank that says what it likes, message by message, to a real daemon."""

from __future__ import annotations

import fcntl
import os
import socket
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq
from flushes import Row, columns
from tier_harness import (
    DEADLINE_S,
    keys,
    lifeline,
)
from tierd_client.segment import create_segment

from tierd.wire import codec, limits, messages
from tierd.wire.layout import SegmentSpec
from tierd.wire.messages import Allocation, BufferSpec, Part, PoolSpec

PAGES, ROW = 16, 512
SPEC = SegmentSpec(backup_ring=64, restore_ring=64, max_layers=4)
UNUSED = count()


def pool(**changes: Any) -> PoolSpec:
    """K and V of one layer, as halves of one allocation."""
    buffers = [
        BufferSpec(allocation=0, offset=half * PAGES * ROW, page_stride=ROW, row_bytes=ROW, layer=0)
        for half in (0, 1)
    ]
    return msgspec.structs.replace(
        PoolSpec(name="kv", num_pages=PAGES, page_tokens=1, buffers=buffers), **changes
    )


class Guest:
    """A rank that says what it likes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.channel = lifeline(path)
        self.shared = create_segment(SPEC)
        self.segment = self.shared.fields
        self.memory = memfd(2 * PAGES * ROW)
        self.pidfd = os.pidfd_open(os.getpid())
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)

    @property
    def fds(self) -> list[int]:
        return [self.shared.fd, self.pidfd, self.memory]

    def register(self, fds: list[int] | None = None, **changes: Any) -> messages.ToLifeline:
        """The daemon's answer to a registration."""
        message = messages.Register(
            protocol=limits.PROTOCOL_VERSION,
            software="a guest",
            instance="guest",
            rank=0,
            world_size=1,
            namespace={"model": "guest"},
            epoch="",
            device="host:0",
            pid=os.getpid(),
            next_seq=0,
            allocations=[Allocation(size=2 * PAGES * ROW)],
            pools=[pool()],
        )
        changed = msgspec.structs.replace(message, **changes)
        self.channel.send(changed, self.fds if fds is None else fds)
        return self.answer()

    def answer(self) -> messages.ToLifeline:
        """The next message on the lifeline; descriptors beside it are closed."""
        ((answer, fds),) = self.channel.wait(DEADLINE_S)
        for fd in fds:
            os.close(fd)
        return answer

    def refusal(self, fds: list[int] | None = None, **changes: Any) -> str:
        answer = self.register(fds, **changes)
        assert isinstance(answer, messages.Refused)
        return answer.reason

    def enter(self, **changes: Any) -> None:
        """Register as a rank that makes sense, and open the way for its messages."""
        welcome = self.register(**changes)
        assert isinstance(welcome, messages.Welcome)
        self.open(welcome.routing_id)

    def open(self, identity: bytes) -> None:
        self._dealer.setsockopt(zmq.IDENTITY, identity)
        self._dealer.connect(f"ipc://{self.path}.zmq")

    def say(self, *frames: bytes) -> None:
        self._dealer.send_multipart(list(frames))

    def hear(self) -> messages.ToClient:
        assert self._dealer.poll(DEADLINE_S * 1000), "the daemon says nothing"
        return codec.TO_CLIENT.decode(self._dealer.recv())

    def error(self, message: messages.Message | bytes) -> str:
        """What the daemon has to say about a message."""
        self.say(message if isinstance(message, bytes) else raw(message))
        answer = self.hear()
        assert isinstance(answer, messages.Error)
        return answer.reason

    def complaint(self, message: messages.Message | bytes) -> str:
        """What the daemon has to say about a message on the lifeline; the session goes on."""
        data = message if isinstance(message, bytes) else raw(message)
        with socket.socket(fileno=os.dup(self.channel.fileno())) as sock:
            sock.sendall(codec.frame(data))
        answer = self.answer()
        assert isinstance(answer, messages.Error)
        return answer.reason

    def flush(self, *numbers: int, seq: int = 0, **changes: Any) -> messages.Flush:
        """A backup of these pages, of one token each, ready to be sent."""
        self.segment.backup_ring[: len(numbers)] = numbers
        self.segment.ready[1] = 1
        message = messages.Flush(
            epoch="",
            ticket=1,
            fence=0,
            keys=b"".join(keys(f"guest {next(UNUSED)}", len(numbers))),
            **columns([Row(seq, [Part(0, len(numbers), 0)])]),
        )
        return msgspec.structs.replace(message, **changes)

    def kept(self, message: messages.Flush) -> bool:
        """Send a backup that is well-formed; the result."""
        self.say(raw(message))
        answer = self.hear()
        assert isinstance(answer, messages.Acks)
        return bool(answer.results[0])

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.channel.close()
        self.shared.close()
        os.close(self.memory)
        os.close(self.pidfd)


def raw(message: messages.Message) -> bytes:
    """A message's bytes, whatever its length."""
    return msgspec.msgpack.encode(message)


def memfd(nbytes: int, seals: int = 0) -> int:
    fd = os.memfd_create("tierd-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
