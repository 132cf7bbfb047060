"""The end of an earlier daemon's copiers: waited for, brought about if need be, and proven.

`copiers.lock` is locked through one open file that control shares with its copiers, so it stays
locked until the last of them has ended, however control ended. A copier that is stopped keeps it,
too: that one is killed, or nothing that it maps is used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import time

log = logging.getLogger("tierd.memory")

COPIERS_LOCK = "copiers.lock"
"""The file's name in a daemon's directory."""
DEATH_S = 120.0
"""A killed process is gone once the driver has unpinned all that it had. That is worth the wait:
without its end nothing of the cache can be used."""
LOOK_MS = 20
"""Between two looks at the lock."""


def locked(fd: int) -> bool:
    """Lock an open file or directory. False: another open file of it has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_until_alone(lock: int, patience_s: float, death_s: float) -> bool:
    """Lock a file once everybody who had it open has ended; kill who does not in time.

    A process drops its locks shortly before it is gone, and a device may still write for it then:
    those that are seen are waited for by their pidfds, too.

    Args:
        lock: An open COPIERS_LOCK.
        patience_s: What they have to end by themselves.
        death_s: What they have to die once they are killed.

    Returns: False: one has not ended. The log says what that means.
    """
    holders = _holders(lock)
    try:
        if holders:
            log.info(
                "waiting up to %.0f s for the copiers of the last daemon to finish (pids %s); "
                "after that they are killed",
                patience_s,
                ", ".join(map(str, holders)),
            )
        if _all_ended(lock, holders, patience_s):
            return True
        for pid, pidfd in _holders(lock).items():
            log.warning(
                "copier of the last daemon (pid %d) does not end; killing it, so that nothing is "
                "written late. Cached pages stay",
                pid,
            )
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        if _all_ended(lock, holders, death_s):
            return True
    finally:
        for pidfd in holders.values():
            os.close(pidfd)
    log.error(
        "a copier of the last daemon still holds its chunks and cannot be killed (another PID "
        "namespace, or a driver call that does not return); starting empty, on new chunks. The old "
        "ones are given back when it ends"
    )
    return False


def _all_ended(lock: int, holders: dict[int, int], timeout_s: float) -> bool:
    """Lock the file when these processes have ended, within a time."""
    until = time.monotonic() + timeout_s
    left = select.poll()
    for pidfd in holders.values():
        left.register(pidfd, select.POLLIN)
    ended: set[int] = set()
    while True:
        for pidfd, _ in left.poll(0):
            left.unregister(pidfd)
            ended.add(pidfd)
        if len(ended) == len(holders) and locked(lock):
            return True
        if time.monotonic() >= until:
            return False
        # The lock's end cannot be waited for with a time-out.
        left.poll(LOOK_MS)


def _holders(lock: int) -> dict[int, int]:
    """Other processes that have a file open, as far as this one can see: pid -> pidfd."""
    wanted = os.fstat(lock)
    holders = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(name))
        except OSError:
            continue
        # After the pidfd: should the pid be another process's by now, it is that one's files.
        if _has_open(name, wanted):
            holders[int(name)] = pidfd
        else:
            os.close(pidfd)
    return holders


def _has_open(pid: str, wanted: os.stat_result) -> bool:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            file = f"/proc/{pid}/fd/{number}"
            with contextlib.suppress(OSError):
                # By name first: to look at any file of anybody's could hang, on a network's.
                if COPIERS_LOCK in os.readlink(file) and os.path.samestat(os.stat(file), wanted):
                    return True
    return False
