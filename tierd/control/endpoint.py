"""The daemon's two sockets: the lifeline's Unix socket, and the ZeroMQ router beside it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import zmq

from tierd.channel import Channel
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ConfigError, ProtocolError

log = logging.getLogger("tierd.control")

BACKLOG = 128
QUEUED_MESSAGES = 10_000
UNREAD_BYTES = 2 * limits.MAX_MESSAGE_BYTES
"""Of answers that wait for whoever has asked to read them. Then he is given up."""
PROBE_S = 2.0


class Endpoint:
    """Owns the socket files while it is open.

    Args:
        path: The lifeline's Unix socket. Its directory exists, and only who may use it can enter.
        group: The id of a group whose members are served like ourselves, or None.

    Raises: ConfigError: a daemon serves there already, or the path is something else.
    """

    def __init__(self, path: Path, group: int | None = None) -> None:
        self.path = path
        self._group = group
        self._zmq_path = Path(f"{path}.zmq")
        self._context = zmq.Context()
        self.router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._open = False
        # Given up for a moment to turn somebody away when there is no other descriptor left.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _locked(path.parent):
                _clear_stale(path)
                self._zmq_path.unlink(missing_ok=True)
                before = os.umask(0o177)
                try:
                    self.listener.bind(str(path))
                    self._open = True
                    self.listener.listen(BACKLOG)
                    self.router.setsockopt(zmq.LINGER, 0)
                    self.router.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
                    self.router.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
                    # A client that was cut off is back under its name before we have had a turn:
                    # without this, its messages would be passed over from then on.
                    self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
                    # A little above our own limit: what is between gets an error reply,
                    # what is above costs its sender the connection.
                    self.router.setsockopt(zmq.MAXMSGSIZE, 2 * limits.MAX_MESSAGE_BYTES)
                    self.router.bind(f"ipc://{self._zmq_path}")
                finally:
                    os.umask(before)
                if group is not None:
                    for file in (path, self._zmq_path):
                        os.chown(file, -1, group)
                        file.chmod(0o660)
        except BaseException:
            self.close()
            raise
        self.listener.setblocking(False)

    def accept(self) -> Iterator[Channel[messages.FromLifeline]]:
        """The lifelines that came in. Those of users whom we do not serve are told so when they
        say something: to hang up on them at once would lose the answer."""
        if self._spare < 0:
            self._keep_spare()
        while True:
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                log.error(
                    "a connection was turned away (%s); an engine comes again by itself. "
                    "`ls -l /proc/%d/fd` says what holds the descriptors",
                    error.strerror,
                    os.getpid(),
                )
                return
            channel = Channel(sock, codec.FROM_LIFELINE, max_queued=UNREAD_BYTES)
            pid, uid, _ = channel.peer()
            if uid not in (os.getuid(), 0) and self._group not in channel.peer_groups():
                log.warning("refused a connection of user %d (pid %d)", uid, pid)
                channel.refuse(
                    f"this daemon serves user {os.getuid()}, not user {uid}; it can serve a "
                    "group: `tierd serve --group NAME`"
                )
            yield channel

    def _turn_away(self) -> None:
        """Take a connection and end it. Left waiting, it would keep the listener readable, and the
        loop awake, for as long as no descriptor is free."""
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with contextlib.suppress(OSError):
            self.listener.accept()[0].close()
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Have a descriptor to give up, unless others have taken them all just now."""
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def heard(self) -> bool:
        """Has a client sent something?"""
        events = self.router.getsockopt(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def receive(self, most: int) -> Iterator[tuple[bytes, bytes]]:
        """What clients have sent: (routing id, message). Not more than `most`, so that others get
        a turn."""
        for _ in range(most):
            try:
                parts = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                yield parts[0], parts[1]
            else:
                reason = f"a message is one frame; this one has {len(parts) - 1}"
                self.send(parts[0], messages.Error(reason=reason))

    def send(self, route: bytes, message: messages.Message) -> None:
        """Send to a client. One that is gone, or reads nothing, gets nothing: its lifeline's end
        or its own deadlines tell it."""
        try:
            data = codec.encode(message)
        except ProtocolError as error:
            data = codec.encode(messages.Error(reason=str(error)))
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self.router.send(route, zmq.SNDMORE | zmq.NOBLOCK)
            self.router.send(data, zmq.NOBLOCK)

    def close(self, linger_s: float = 0.0) -> None:
        """Remove the sockets' files and close them; what was sent may take so long to be taken.
        Idempotent."""
        # The files while we still listen, and the lifeline's last: another daemon puts its own in
        # their place as soon as that one is gone, or answers no more.
        if self._open:
            self._open = False
            self._zmq_path.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        self.listener.close()
        self._context.destroy(linger=int(linger_s * 1000))
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _clear_stale(path: Path) -> None:
    """Remove the socket file of a daemon that is gone.

    Raises: ConfigError: a daemon answers there, or the file is no socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket; choose another --socket")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    probe.settimeout(PROBE_S)
    try:
        probe.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        log.info("taking over the socket of a daemon that is gone: %s", path)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot tell whether a daemon serves on {path}: {error}") from None
    else:
        raise ConfigError(f"a daemon serves on {path} already; stop it, or choose another --socket")
    finally:
        probe.close()


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two daemons that start at once must not both find the other's socket stale."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
