"""Messages and file descriptors over a connected Unix stream socket.

The lifeline of a rank, the admin commands and the control-copier conversation all use it. A
channel never blocks: `send` queues what the socket does not take, `receive` returns what is
there. End of file is the notice that the other side is gone.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from tierd.wire import codec, limits
from tierd.wire.errors import OutOfStepError, ProtocolError
from tierd.wire.messages import Message

T = TypeVar("T")
_FD = array.array("i").itemsize
_SO_PEERGROUPS = 59
"""asm-generic/socket.h, since Linux 4.13: x86-64 and AArch64."""
_READ = 1 << 18
READS = 64
"""Reads in one `receive`: a sender that never pauses must not hold the loop's other work back."""
_QUEUED_BYTES = 512
"""What a queued message costs beside its own bytes: many small ones are memory, too."""


class ChannelClosed(Exception):  # noqa: N818 - an event, not a fault
    """The other side is gone."""


class Channel(Generic[T]):
    """One end of a conversation.

    Args:
        sock: A connected Unix stream socket; the channel owns it.
        decoder: What the other side may say.
        max_queued: Bytes that may wait for a slow reader before `send` gives the channel up.
    """

    def __init__(
        self, sock: socket.socket, decoder: codec.Decoder[T], *, max_queued: int = 64 << 20
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = decoder
        self._frames = codec.Frames()
        # One for all reads: fresh ones, which shrink to what came, would end up on top of the heap,
        # and small blocks that outlive them there keep all below from being used for the next.
        self._buffer = memoryview(bytearray(_READ))
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._queued = 0
        self._max_queued = max_queued
        self._refusal: str | None = None
        self.closed = False

    def fileno(self) -> int:
        """The socket's descriptor, to be polled; -1 once the channel is closed."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Does something wait for the socket to take it? `flush` when it is writable."""
        return bool(self._out)

    @property
    def queued(self) -> int:
        """Bytes that the socket has not taken yet, and what it costs to keep them."""
        return self._queued

    @property
    def has_message(self) -> bool:
        """Has `next` something to say, although the socket may have nothing to read?"""
        return self._frames.ready

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue a message and write what the socket takes. The descriptors are duplicated, so
        the caller keeps its own.

        Raises:
            ChannelClosed: the other side is gone, or reads so slowly that the queue is full; or
                this process has no descriptor left to duplicate with.
            ProtocolError: the message or the number of descriptors is over the limit.
            OSError: a descriptor that is none; nothing was sent.
        """
        if self.closed:
            raise ChannelClosed
        if len(fds) > limits.MAX_FDS:
            raise ProtocolError(f"{len(fds)} descriptors; a message takes {limits.MAX_FDS}")
        data = codec.frame(codec.encode(message), len(fds))
        if not fds and not self._out:
            sent = self._write(data, [])
            if sent == len(data):
                return
            data = data[sent:]
        self._queue(data, fds)
        self.flush()

    def _queue(self, data: bytes, fds: Sequence[int]) -> None:
        """Keep what the socket does not take now. Raises: as `send`."""
        cost = len(data) + _QUEUED_BYTES
        if self._queued + cost > self._max_queued:
            self.close()
            raise ChannelClosed
        duplicates: list[int] = []
        try:
            for fd in fds:
                duplicates.append(os.dup(fd))
        except OSError as error:
            close_all(duplicates)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.close()
                raise ChannelClosed from None
            raise
        self._out.append((memoryview(data), duplicates))
        self._queued += cost

    def flush(self) -> None:
        """Write what the socket takes now.

        Raises: ChannelClosed: the other side is gone.
        """
        while self._out:
            data, fds = self._out[0]
            sent = self._write(data, fds)
            if not sent:
                return
            close_all(fds)
            self._queued -= sent
            if sent < len(data):
                self._out[0] = (data[sent:], [])
            else:
                self._queued -= _QUEUED_BYTES
                self._out.popleft()

    def _write(self, data: bytes | memoryview, fds: Sequence[int]) -> int:
        """Bytes that the socket has taken; the descriptors went with the first one.

        Raises: ChannelClosed: the other side is gone.
        """
        try:
            if not fds:
                return self._sock.send(data, socket.MSG_NOSIGNAL)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())
            return self._sock.sendmsg([data], [rights], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            raise ChannelClosed from None

    def receive(self) -> list[tuple[T, list[int]]]:
        """The messages that have arrived, each with its file descriptors (now the caller's).

        Not all of them if there are many: the socket stays readable then.

        Raises:
            ChannelClosed: end of file, and nothing before it was left unread.
            ProtocolError: a message that makes no sense. Messages before it in the same read are
                lost, so the conversation must end.
        """
        messages: list[tuple[T, list[int]]] = []
        try:
            messages.extend(iter(self._pop, None))
            for _ in range(READS):
                more = self._read()
                messages.extend(iter(self._pop, None))
                if not more:
                    break
        except ProtocolError:
            for _, fds in messages:
                close_all(fds)
            raise
        except ChannelClosed:
            if not messages:
                self.close()
                raise
        return messages

    def next(self) -> tuple[T, list[int]] | None:
        """The next message alone, with its file descriptors (now the caller's). None: it has not
        come, or not as a whole.

        Raises:
            ChannelClosed: end of file, and nothing before it was left unread.
            ProtocolError: it makes no sense; those after it may, unless it is an OutOfStepError.
        """
        message = self._pop()
        try:
            for _ in range(READS):
                if message is not None:
                    break
                more = self._read()
                message = self._pop()
                if not more:
                    break
        except ChannelClosed:
            self.close()
            raise
        return message

    def _pop(self) -> tuple[T, list[int]] | None:
        """The next message of those that have been read. Raises: ProtocolError: as `next`."""
        frame = self._frames.pop()
        if frame is None:
            # What is left belongs to a frame that has begun, or to none.
            if len(self._fds) > limits.MAX_FDS:
                raise OutOfStepError("file descriptors came that no message announces")
            return None
        payload, count = frame
        if count > len(self._fds):
            raise OutOfStepError(f"a message announces {count} descriptors; {len(self._fds)} came")
        fds = [self._fds.popleft() for _ in range(count)]
        try:
            return self._decoder.decode(payload), fds
        except ProtocolError:
            close_all(fds)
            raise

    def _read(self) -> bool:
        """Read once. Returns: whether there may be more, which a poll would tell as well.

        Raises:
            ChannelClosed: end of file; the socket is still open.
            OutOfStepError: the conversation must end.
        """
        if self.closed:
            raise ChannelClosed
        try:
            size, ancillary, flags, _ = self._sock.recvmsg_into(
                [self._buffer], socket.CMSG_SPACE(limits.MAX_FDS * _FD), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionError:
            raise ChannelClosed from None
        for level, kind, blob in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(blob[: len(blob) - len(blob) % _FD])
                self._fds.extend(got)
        if flags & socket.MSG_CTRUNC:
            raise OutOfStepError("file descriptors were lost: too many in one message")
        if size and self._refusal is not None:
            raise OutOfStepError(self._refusal)
        if not size:
            raise ChannelClosed
        self._frames.add(self._buffer[:size])
        # A read ends early also where descriptors come.
        return size == _READ or bool(ancillary)

    @property
    def ended(self) -> bool:
        """Has the other side closed its end, even if not all has been read that it said before?"""
        if self.closed:
            return True
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def refuse(self, reason: str) -> None:
        """Decode nothing from now on: whatever comes is an OutOfStepError with this reason."""
        self._refusal = reason

    def wait(self, timeout_s: float) -> list[tuple[T, list[int]]]:
        """Block until at least one message is there; an empty list is a time-out.

        Raises: ChannelClosed, ProtocolError: as `receive`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            messages = self.receive()
            left = deadline - time.monotonic()
            if messages or left <= 0:
                return messages
            self.flush()
            poller = select.poll()
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
            poller.poll(left * 1000)

    def drain(self, timeout_s: float) -> None:
        """Block until everything queued is written, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while self._out and not self.closed and (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT)
            poller.poll(left * 1000)
            with contextlib.suppress(ChannelClosed):
                self.flush()

    def close(self) -> None:
        """Close the socket and every descriptor that is still under way. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._sock.close()
        self._frames = codec.Frames()
        close_all(self._fds)
        self._fds.clear()
        for _, fds in self._out:
            close_all(fds)
        self._out.clear()
        self._queued = 0

    def peer(self) -> tuple[int, int, int]:
        """Credentials of the process at the other end when it connected: (pid, uid, gid)."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("3i", raw)
        return pid, uid, gid

    def peer_groups(self) -> set[int]:
        """The groups of the process at the other end when it connected, as far as can be known:
        of a process in more than 256 only the first."""
        try:
            raw = self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 1024)
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            raw = b""
        return {self.peer()[2], *struct.unpack(f"{len(raw) // 4}I", raw)}


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors, each at most once, whatever state they are in."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
