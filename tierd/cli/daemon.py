"""One question to a running daemon over its lifeline socket, and its answer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TypeVar

from tierd.channel import Channel, ChannelClosed, close_all
from tierd.wire import codec, messages
from tierd.wire.errors import DaemonUnavailableError, ProtocolError, RefusedError
from tierd.wire.messages import ToLifeline

REPLY_TIMEOUT_S = 10.0
CLEAR_TIMEOUT_S = 300.0
"""The daemon drops some pages at a time, with lookups in between: millions take a while."""

Reply = TypeVar("Reply", messages.Status, messages.Done)


def ask(
    path: Path,
    request: messages.FromLifeline,
    expected: type[Reply],
    timeout_s: float = REPLY_TIMEOUT_S,
) -> Reply:
    """Send a request and wait for its reply.

    Raises:
        DaemonUnavailableError: nobody answers on the socket.
        RefusedError: the daemon refuses; its reason says what to do.
        ProtocolError: the answer makes no sense.
    """
    channel = _connect(path)
    pid, _, _ = channel.peer()
    try:
        channel.send(request)
        received = channel.wait(timeout_s)
    except ChannelClosed:
        raise DaemonUnavailableError(
            f"the daemon on {path} closed the connection without an answer; see its log"
        ) from None
    finally:
        channel.close()
    if not received:
        raise DaemonUnavailableError(
            f"the daemon on {path} (pid {pid}) has not answered within {timeout_s:.0f} s: "
            f"{_excuse(pid)}. Engines serve on without a host tier meanwhile. If it stays so, "
            f"`kill -KILL {pid}` and start it again: its copiers end by themselves, and with "
            "--persist the pages are kept"
        )
    reply, fds = received[0]
    close_all(fds)
    if isinstance(reply, messages.Refused):
        raise RefusedError(reply.reason)
    if not isinstance(reply, expected):
        raise ProtocolError(f"the daemon on {path} answers with {type(reply).__name__}")
    return reply


def _connect(path: Path) -> Channel[ToLifeline]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(REPLY_TIMEOUT_S)
    try:
        sock.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise DaemonUnavailableError(
            f"no daemon answers on {path}; start one with `tierd serve --socket {path}`, "
            "or name its socket with --socket"
        ) from None
    except PermissionError:
        sock.close()
        raise DaemonUnavailableError(
            f"this user may not use {path}; run as the user that runs the daemon"
        ) from None
    except OSError as error:
        sock.close()
        raise DaemonUnavailableError(f"cannot connect to {path}: {error}") from None
    return Channel(sock, codec.TO_LIFELINE)


def _excuse(pid: int) -> str:
    """Why a process does not answer, as far as the kernel knows (proc(5), `State`)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "its process cannot be seen from here"
    state = next((line.split()[1] for line in status.splitlines() if line[:6] == "State:"), "?")
    if state in "Tt":
        return f"its process is stopped; `kill -CONT {pid}` lets it go on"
    if state == "D":
        return "its process waits for the kernel (memory or a disk)"
    if state in "RS":
        return "its process is alive, yet its loop does not go round; see its log"
    return f"its process is in state {state}; see its log"
