"""Releases the engine's waiting streams when control and the rank's copier have both died.

While control lives it releases what will never be restored, and ends a copier that hangs. When it
is gone, the engine's scheduler thread may sit inside a synchronising CUDA call behind a stream that
waits for a layer word, so only another process can do both: this one. It costs the engine no thread
and no GIL, imports no torch, and goes when the engine goes.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import logging
import math
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time

from tierd.wire.layout import RESTORE_ENTRIES, Segment, read_segment_spec

log = logging.getLogger("tierd_client")

RELEASE_INTERVAL_S = 0.05
"""How often waits are released while both are dead: one may be enqueued after their death."""
COPIER_GRACE_S = 20.0
"""A copier whose control is dead exits by itself, after the copies on the wire; one that has not by
then hangs, and is killed: before its death nothing may be released."""
_EXIT_S = 2.0
RETRY_S = 1.0
_SERIAL = struct.Struct("<I")


class Watchdog:
    """The engine's end: starts the process, tells it whom to watch, ends it.

    No method blocks, except `close` for the moment in which the process exits. Where there is no
    process, nothing is armed.

    Args:
        segment_fd: The rank's segment; duplicated, so the caller keeps its own.
        copier_grace_s: How long a copier may outlive its control.

    Raises: OSError: no process or no descriptor left.
    """

    def __init__(self, segment_fd: int, *, copier_grace_s: float = COPIER_GRACE_S) -> None:
        self._segment_fd = os.dup(segment_fd)
        self._copier_grace_s = copier_grace_s
        self._serial = 0
        self._armed_serial = 0
        self._retry_at = 0.0
        try:
            self._start()
        except BaseException:
            os.close(self._segment_fd)
            raise

    def watch(self, control_pidfd: int, copier_pidfd: int) -> bool:
        """Watch these two processes from now on, instead of the ones before them.

        Starts a new process if the last one was killed. The descriptors stay the caller's.

        Returns: False: there is none, and none can be started now; ask again.
        """
        if self.is_dead() and not self._start_again():
            return False
        self._serial += 1
        pidfds = array.array("i", [control_pidfd, copier_pidfd])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, pidfds)]
        # A process that has died since `poll`, or is too slow to read, never says that it is
        # armed, which is what the caller goes by.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, BlockingIOError):
            self._socket.sendmsg([_SERIAL.pack(self._serial)], rights, socket.MSG_NOSIGNAL)
        return True

    def is_dead(self) -> bool:
        """Was the process killed?"""
        return self._process.poll() is not None

    def armed(self) -> bool:
        """Whether the process lives and watches what the last `watch` named.

        No restore may be started before: until then it could still be releasing waits on account
        of the processes before, and would let a stream read a layer that has not landed.
        """
        if self._armed_serial == self._serial > 0 and not self._news.poll(0):
            return True  # its end of the socket, which dies with it, has said nothing since
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while answer := self._socket.recv(_SERIAL.size):
                (self._armed_serial,) = _SERIAL.unpack(answer)
        alive = self._process.poll() is None
        return alive and self._serial > 0 and self._armed_serial == self._serial

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._segment_fd < 0:
            return
        os.close(self._segment_fd)
        self._segment_fd = -1
        self._socket.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Of the process that runs now, or has run last."""
        return self._process.pid

    def _start_again(self) -> bool:
        """Not more often than every RETRY_S: to try costs the scheduler's thread a millisecond."""
        now = time.monotonic()
        if now < self._retry_at:
            return False
        self._retry_at = now + RETRY_S
        last = self._socket
        try:
            self._start()
        except OSError as error:
            log.warning(
                "no watchdog process can be started (%s): nothing is restored until one can, tried "
                "again every %.0f s",
                error,
                RETRY_S,
            )
            return False
        last.close()
        return True

    def _start(self) -> None:
        """Raises: OSError: no process or no descriptor left; all is as it was."""
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with theirs:
                self._process = self._launch(theirs)
            undo.pop_all()
        ours.setblocking(False)
        self._socket = ours
        self._news = select.poll()
        self._news.register(ours, select.POLLIN)

    def _launch(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        engine = os.pidfd_open(os.getpid())
        fds = (self._segment_fd, theirs.fileno(), engine)
        try:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "tierd_client.watchdog"),
                    *(str(argument) for argument in (*fds, self._copier_grace_s)),
                ],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                # Ctrl-C in the engine's terminal must not end it while the engine shuts down.
                start_new_session=True,
                # numpy's BLAS would start a thread a core.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        finally:
            os.close(engine)


def run(
    segment_fd: int, conversation: socket.socket, engine_pidfd: int, copier_grace_s: float
) -> None:
    """Watch until the engine is gone or closes its end of the conversation.

    Raises: ProtocolError: the descriptor is not a segment.
    """
    memory = mmap.mmap(segment_fd, os.fstat(segment_fd).st_size)
    segment = Segment(memory, read_segment_spec(memory))
    poller = select.poll()
    poller.register(conversation, select.POLLIN)
    poller.register(engine_pidfd, select.POLLIN)
    control = copier = -1
    living: set[int] = set()
    kill_at = math.inf
    while True:
        patience_s = None
        if copier >= 0 and not living:
            for entry in range(RESTORE_ENTRIES):
                segment.release(entry)
            patience_s = RELEASE_INTERVAL_S
        elif copier in living and kill_at < math.inf:
            patience_s = max(0.0, kill_at - time.monotonic())
        ready = {fd for fd, _ in poller.poll(None if patience_s is None else patience_s * 1000)}
        if engine_pidfd in ready:
            return
        for fd in ready & living:  # a pidfd is readable once its process is dead
            poller.unregister(fd)
            living.remove(fd)
            if fd == control:
                kill_at = time.monotonic() + copier_grace_s
        if conversation.fileno() in ready:
            serial, fds, _, _ = socket.recv_fds(conversation, _SERIAL.size, 2)
            if not serial:
                return
            for fd in living:
                poller.unregister(fd)
            for fd in (control, copier):
                if fd >= 0:
                    os.close(fd)
            control, copier = fds
            living, kill_at = set(fds), math.inf
            for fd in fds:
                poller.register(fd, select.POLLIN)
            conversation.send(serial, socket.MSG_NOSIGNAL)
        elif copier in living and time.monotonic() >= kill_at:
            kill_at = math.inf
            # Its death, not this, lets go on whoever waits: another user's cannot be killed.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(copier, signal.SIGKILL)


def main() -> None:
    """The watchdog's own process: its arguments are descriptors that it inherits."""
    parser = argparse.ArgumentParser(prog="python -m tierd_client.watchdog", description=__doc__)
    for name in ("segment_fd", "socket_fd", "engine_pidfd"):
        parser.add_argument(name, type=int)
    parser.add_argument("copier_grace_s", type=float)
    args = parser.parse_args()
    # A service manager signals every process of the service at once; this one must outlast the
    # engine, and ends with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        socket.socket(fileno=args.socket_fd) as conversation,
        contextlib.suppress(ConnectionError),  # the engine closed its end between two messages
    ):
        conversation.setblocking(False)
        run(args.segment_fd, conversation, args.engine_pidfd, args.copier_grace_s)


if __name__ == "__main__":
    main()
