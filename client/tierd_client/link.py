"""The connection to a daemon: lifeline, ZeroMQ socket and process handles.

Knows how to get one and when it is lost. What a loss means is the client's business. What is waited
for goes over the lifeline, as far as it fits: ZeroMQ's own threads, at both ends, would take twice
as long.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from tierd.channel import Channel, ChannelClosed, close_all
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ProtocolError, RefusedError
from tierd.wire.presence import PresenceTable

log = logging.getLogger("tierd_client")

REGISTER_TIMEOUT_S = 30.0
"""A daemon that pins memory answers late; one that never answers is given up."""
PATIENT_TRIES = 10
"""A daemon of another version is asked again after so many pauses."""
QUEUED_MESSAGES = 1000
UNSENT_BYTES = 4 << 20
"""Of cancellations that the daemon has not had time to read. What they would end expires."""
QUICK_KEYS_BYTES = 32 << 10
"""A restore of so many keys at most goes over the lifeline, whose kernel buffer takes all of it at
once: nobody would write what it has left over while the engine's stream waits for the pages."""
_POLLIN = int(zmq.POLLIN)
"""The flag itself costs more to compare with than all else of a look."""


class LinkState(enum.Enum):
    """DOWN: nobody is there, or has refused. REGISTERING: the daemon has yet to answer. UP: it has
    let the rank in."""

    DOWN = "down"
    REGISTERING = "registering"
    UP = "up"


class ProcessHandle:
    """A process of the daemon's, by its pidfd: valid in any container, never reused."""

    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd

    def is_dead(self) -> bool:
        """Has it ended? Never waits."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def wait_dead(self, timeout_s: float) -> bool:
        """Wait up to so many seconds. Returns: whether it has ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def kill(self) -> None:
        """Raises: OSError: not permitted."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.pidfd)


class Link:
    """One client's connection, made again as often as it is lost.

    Args:
        path: The daemon's socket.
        retry_s: Pause between attempts.
    """

    def __init__(self, path: Path, retry_s: float) -> None:
        self.path = path
        self.state = LinkState.DOWN
        self.control: ProcessHandle | None = None
        self.copier: ProcessHandle | None = None
        self.presence: PresenceTable | None = None
        """What the daemon holds, as it shows to everybody."""
        self.lease_s = 0.0
        self.connection = 0
        """Counts the registrations that were accepted."""
        self.refusal: str | None = None
        """Why the daemon refused the last registration, if it did."""
        self.other_version = False
        """It did because it speaks another version of the protocol."""
        self._retry_s = retry_s
        self._next_try = 0.0
        self._give_up_at = 0.0
        self._lifeline: Channel[messages.ToLifeline] | None = None
        self._arrivals = select.poll()
        """Whether the lifeline has something: asked often, and cheaper than to read nothing."""
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._heard: list[messages.ToClient] = []
        self._reply: messages.LookupReply | None = None
        self._polled: tuple[LinkState, ProcessHandle | None] = (self.state, self.copier)

    @property
    def heartbeat_s(self) -> float:
        """When the daemon's control gave a sign of life last, seconds of its monotonic clock."""
        return 0.0 if self.presence is None else self.presence.heartbeat_s

    def due(self, now: float) -> bool:
        """Is it time for another attempt?"""
        return self.state is LinkState.DOWN and now >= self._next_try

    def register(self, message: messages.Register, fds: Sequence[int], now: float) -> bool:
        """Connect and send a registration. False: nobody is there, or no descriptor is left to
        connect with."""
        self._next_try = now + self._retry_s
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError as error:
            log.warning("cannot connect to %s, trying again: %s", self.path, error)
            return False
        sock.setblocking(False)
        try:
            sock.connect(str(self.path))
        except OSError:
            sock.close()
            return False
        self._lifeline = Channel(sock, codec.TO_LIFELINE)
        self._arrivals = select.poll()
        self._arrivals.register(sock, select.POLLIN)
        try:
            self._lifeline.send(message, fds)
        except ChannelClosed:
            self.drop()
            return False
        self.state = LinkState.REGISTERING
        self.refusal, self.other_version = None, False
        self._give_up_at = now + REGISTER_TIMEOUT_S
        return True

    def poll(self, now: float) -> bool:
        """Read the lifeline. True: the state, or the copier, is another one than when this was
        called last; `wait` may have seen it change."""
        lifeline = self._lifeline
        if lifeline is not None and (
            self.state is LinkState.REGISTERING
            or lifeline.closed
            or lifeline.wants_write
            or self._arrivals.poll(0)
        ):
            self._read(now)
        last, self._polled = self._polled, (self.state, self.copier)
        return last != self._polled

    def _read(self, now: float) -> None:
        lifeline = self._lifeline
        if lifeline is None:
            return
        try:
            lifeline.flush()
            for message, fds in lifeline.receive():
                self._on_lifeline(message, fds)
        except (ChannelClosed, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                log.warning("the daemon on %s makes no sense, trying again: %s", self.path, error)
            # A daemon that ends in good order sends its last acks before it closes.
            self._heard = self.receive()
            self.drop()
        if self.state is LinkState.REGISTERING and now >= self._give_up_at:
            log.warning("the daemon on %s does not answer a registration, trying again", self.path)
            self.drop()

    def _on_lifeline(self, message: messages.ToLifeline, fds: list[int]) -> None:
        if isinstance(message, messages.LookupReply) and not fds:
            self._reply = message
        elif isinstance(message, messages.Error) and not fds:
            self._heard.append(message)
        elif isinstance(message, messages.Welcome) and len(fds) == 3:
            self.control, self.copier = ProcessHandle(fds[0]), ProcessHandle(fds[1])
            self.presence = _open_presence(fds[2])
            self.lease_s = message.lease_s
            self._dealer = self._context.socket(zmq.DEALER)
            self._dealer.setsockopt(zmq.IDENTITY, message.routing_id)
            self._dealer.setsockopt(zmq.LINGER, 0)
            self._dealer.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
            self._dealer.setsockopt(zmq.RCVHWM, 0)  # ours to read; never lost on the way
            self._dealer.connect(f"ipc://{self.path}.zmq")
            self.state = LinkState.UP
            self.connection += 1
        elif isinstance(message, messages.CopierReplaced) and len(fds) == 1:
            self.copier = ProcessHandle(fds[0])
        elif isinstance(message, messages.PresenceReplaced) and len(fds) == 1:
            self.presence = _open_presence(fds[0])
        elif isinstance(message, messages.Refused):
            close_all(fds)
            self.refusal = message.reason
            self.other_version = message.protocol != limits.PROTOCOL_VERSION
            self.drop()
            if self.other_version:  # that takes an upgrade: no need to fill its log
                self._next_try = time.monotonic() + PATIENT_TRIES * self._retry_s
        else:
            close_all(fds)
            raise ProtocolError(f"unexpected {type(message).__name__} with {len(fds)} descriptors")

    def wait(self, timeout_s: float, now: float) -> None:
        """Read the lifeline once it has something; block for so long at most, in full milliseconds.
        What it has not taken yet is written meanwhile."""
        poller, lifeline = self._arrivals, self._lifeline
        if lifeline is not None and lifeline.wants_write:
            poller = select.poll()
            poller.register(lifeline, select.POLLIN | select.POLLOUT)
        ended = lifeline is not None and lifeline.closed
        arrived = ended or poller.poll(math.ceil(timeout_s * 1000))
        if arrived or self.state is LinkState.REGISTERING:
            self._read(now)

    def ask(self, lookup: messages.Lookup) -> bool:
        """Send a lookup; `reply` has the answer once `wait` has read it. False: there is no daemon,
        or it has not read all that it was sent before.

        Raises: ProtocolError: it is too large.
        """
        self._reply = None
        try:
            return self._say(lookup, 0)
        except ChannelClosed:
            return True  # whoever waits for the answer finds out

    def reply(self, lookup: messages.Lookup) -> messages.LookupReply | None:
        """The answer, if it has come: to this one, not to one that was given up."""
        reply = self._reply
        return reply if reply is not None and reply.request == lookup.request else None

    def cancel(self, rid: str) -> None:
        """Tell the daemon that a request will not load, unless it does not read."""
        with contextlib.suppress(ChannelClosed):  # its leases have ended with it
            self._say(messages.Cancel(rid=rid), UNSENT_BYTES)

    def restore(self, restore: messages.Restore) -> bool:
        """Ask for pages, on the quicker way that takes it. False: there is no daemon, or it has not
        read all that it was sent before: nobody will write to the pages.

        Raises: ProtocolError: it is too large.
        """
        if self._lifeline is None or self._lifeline.closed:
            return False
        try:
            if len(restore.keys) <= QUICK_KEYS_BYTES and self._say(restore, 0):
                return True
        except ChannelClosed:
            return False
        return self.send(restore)

    def _say(self, message: messages.FromRank, most_unsent: int) -> bool:
        """Say something on the lifeline, behind so much that is still unsent at most.

        Raises: ChannelClosed: the daemon is gone, which `poll` finds out, too.
        """
        lifeline = self._lifeline
        if lifeline is None or self.state is not LinkState.UP:
            return False
        if lifeline.wants_write:
            lifeline.flush()
        if lifeline.queued > most_unsent:
            return False
        lifeline.send(message)
        return True

    def send(self, message: messages.Message) -> bool:
        """Queue a message for the daemon. False: the queue is full, or there is no daemon.

        Raises: ProtocolError: the message is too large.
        """
        if self._dealer is None:
            return False
        try:
            self._dealer.send(codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[messages.ToClient]:
        """What the daemon has sent. A few microseconds if there is nothing."""
        received, self._heard = self._heard, []
        if self._dealer is None:
            return received
        try:
            # To ask first costs a third of what a `recv` that raises does.
            while int(self._dealer.get(zmq.EVENTS)) & _POLLIN:
                received.append(codec.TO_CLIENT.decode(self._dealer.recv(zmq.NOBLOCK)))
        except ProtocolError as error:
            log.warning("the daemon on %s makes no sense, trying again: %s", self.path, error)
            self.drop()
        return received

    def raise_refusal(self) -> None:
        """Raises: RefusedError: if the daemon refused the last registration."""
        if self.refusal is not None:
            raise RefusedError(self.refusal)

    def drop(self) -> None:
        """The connection is over. The process handles stay: their deaths still matter."""
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
            self._arrivals = select.poll()
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
        self.state = LinkState.DOWN
        self._next_try = time.monotonic() + self._retry_s

    def close(self) -> None:
        """End the connection for good, and forget the daemon's processes. Idempotent."""
        self.drop()
        self.control = self.copier = self.presence = None
        self._polled = (self.state, None)
        self._context.destroy(linger=0)


def _open_presence(fd: int) -> PresenceTable:
    """Map a presence table to read; takes the descriptor over.

    Raises: ProtocolError: it is none.
    """
    try:
        return PresenceTable(mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        raise ProtocolError(f"the presence table cannot be mapped: {error}") from None
    finally:
        os.close(fd)
