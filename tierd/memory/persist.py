"""A directory of chunk files that outlive the daemon.

Two locks tell who is alive. The directory itself is locked by control alone: whoever gets that
lock is the only daemon here. The other one is its copiers' (`takeover`): who has it knows that
nobody writes to the chunks any more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tierd.memory.filesystems import huge_page_bytes, in_memory, page_bytes
from tierd.memory.limits import format_size
from tierd.memory.source import ChunkFile
from tierd.memory.takeover import COPIERS_LOCK, DEATH_S, locked, wait_until_alone
from tierd.wire.errors import ConfigError
from tierd.wire.geometry import CHUNK_BYTES
from tierd.wire.limits import MAX_MESSAGE_BYTES

MAX_RECORD_BYTES = MAX_MESSAGE_BYTES
"""A namespace's record says less than the registration that it is made of."""
SPARE_RECORDS = 4
"""Namespaces whose records there is to be room for beside the chunks: on a hugetlbfs each takes a
whole page, and one that cannot be kept costs the cache at the next start."""
_LENGTH = struct.Struct("<Q")
_CHUNK = re.compile(r"[0-9a-f]{16}\.chunk")
_NAMESPACE = re.compile(r"[0-9a-f]{64}\.namespace")


@dataclass(frozen=True)
class FoundChunk:
    """A chunk file that an earlier daemon has left. `fd` is the holder's to close."""

    name: str
    fd: int
    size: int


class PersistDirectory:
    """The directory of `tierd serve --persist`, ours alone until `close`.

    Every file in it is reached through the directory's own descriptor, is of mode 0600, and is a
    plain file of this user's; anything else in there is left alone.

    Raises: ConfigError: not memory, not this user's alone, or another daemon's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _make(path)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags)
        except OSError as error:
            raise ConfigError(f"--persist {path}: cannot be opened: {error.strerror}") from None
        self._lock = -1
        self._files: dict[int, str] = {}
        try:
            self._check()
            self.page_bytes = page_bytes(self._fd)
            """The unit of a file's size: huge pages on hugetlbfs."""
            if self.page_bytes > CHUNK_BYTES:
                raise ConfigError(
                    f"--persist {path}: its huge pages are of {format_size(self.page_bytes)}; "
                    f"mount a hugetlbfs with pages of {format_size(CHUNK_BYTES)} at most"
                )
            if not locked(self._fd):
                raise ConfigError(
                    f"--persist {path}: another daemon keeps its pages there; stop it, or choose "
                    "another directory"
                )
        except BaseException:
            self.close()
            raise

    def take_over(self, patience_s: float, death_s: float = DEATH_S) -> bool:
        """Wait until no copier of an earlier daemon can write to the chunks, and let those of this
        one hold `copiers_lock`.

        They let their copies retire and unpin their chunks once their control is gone. Who has not
        ended in `patience_s` is killed, and has `death_s` to die.

        Returns: False: one could not be ended. Its chunks are no longer in the directory, and their
            memory is freed when it ends.
        """
        self._lock = self._open_lock()
        if wait_until_alone(self._lock, patience_s, death_s):
            return True
        self.clear()
        os.unlink(COPIERS_LOCK, dir_fd=self._fd)
        os.close(self._lock)
        self._lock = self._open_lock()
        locked(self._lock)  # a new file: nobody else has it
        return False

    @property
    def copiers_lock(self) -> int:
        """The descriptor that every copier inherits, and closes by ending."""
        return self._lock

    def check_space(self, wanted_bytes: int) -> None:
        """Raises: ConfigError: the file system is too small, which would kill who writes to it."""
        fs = os.fstatvfs(self._fd)
        if not fs.f_blocks:
            return  # a hugetlbfs without `size=`: a chunk that does not fit is refused when made
        room = fs.f_bavail * fs.f_frsize + used_bytes(self.path) - record_bytes(self.path)
        if room < wanted_bytes:
            raise ConfigError(
                f"--persist {self.path}: the file system has room for {format_size(room)}, "
                f"--memory is {format_size(wanted_bytes)}; mount it with a larger `size=`, or ask "
                "for less"
            )

    # --- chunks -------------------------------------------------------------------------------

    def create(self, number: int, size: int) -> ChunkFile:
        """The file of a new chunk (see `tierd.memory.source.ChunkSource`).

        Raises: OSError: no room.
        """
        name = f"{secrets.token_hex(8)}.chunk"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            os.ftruncate(fd, size)
            # A mapping reserves huge pages for as long as the file lives; without one, whoever
            # touches a page that is not there is killed.
            mmap.mmap(fd, size).close()
        except BaseException:
            os.close(fd)
            self._remove(name)
            raise
        self._files[number] = name
        return ChunkFile(fd, self.page_bytes)

    def discard(self, number: int) -> None:
        """A chunk is of no use any more; its memory goes once nobody maps it."""
        self._remove(self._files.pop(number))

    def adopt(self, found: FoundChunk, number: int) -> ChunkFile:
        """A chunk that was found has a number from now on."""
        self._files[number] = found.name
        return ChunkFile(found.fd, self.page_bytes)

    def reject(self, found: FoundChunk) -> None:
        """A chunk that was found is of no use."""
        os.close(found.fd)
        self._remove(found.name)

    def found(self) -> list[FoundChunk]:
        """The chunk files that are there, opened: each to be adopted or rejected."""
        chunks = []
        for name in self._names(_CHUNK):
            fd = self._open(name, os.O_RDWR)
            if fd >= 0:
                chunks.append(FoundChunk(name, fd, os.fstat(fd).st_size))
        return chunks

    # --- namespaces ---------------------------------------------------------------------------

    def describe(self, digest: bytes, record: bytes) -> None:
        """Keep what a namespace is beside its chunks (see `geometry.namespace_record`).

        Raises: OSError: no room.
        """
        if self.record(digest) == record:
            return
        # One that was cut short does not fit its digest, and is written again.
        name = f"{digest.hex()}.namespace"
        self._remove(name)
        size = -(-(_LENGTH.size + len(record)) // self.page_bytes) * self.page_bytes
        fd = os.open(
            name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd
        )
        try:
            os.posix_fallocate(fd, 0, size)
            # hugetlbfs knows no write().
            with mmap.mmap(fd, size) as memory:
                memory[: _LENGTH.size + len(record)] = _LENGTH.pack(len(record)) + record
        finally:
            os.close(fd)

    def record(self, digest: bytes) -> bytes | None:
        """What `describe` has kept, unchecked. None: nothing."""
        fd = self._open(f"{digest.hex()}.namespace", os.O_RDONLY)
        if fd < 0:
            return None
        try:
            size = os.fstat(fd).st_size
            if size < _LENGTH.size or size % self.page_bytes:
                return None
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
                (length,) = _LENGTH.unpack(memory[: _LENGTH.size])
                return memory[_LENGTH.size : _LENGTH.size + min(length, MAX_RECORD_BYTES)]
        finally:
            os.close(fd)

    def forget_others(self, digests: Iterable[bytes]) -> None:
        """Remove what is kept of namespaces that are not among these."""
        kept = {f"{digest.hex()}.namespace" for digest in digests}
        for name in self._names(_NAMESPACE):
            if name not in kept:
                self._remove(name)

    def clear(self) -> None:
        """Remove every chunk and every namespace."""
        for pattern in (_CHUNK, _NAMESPACE):
            for name in self._names(pattern):
                self._remove(name)

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        for fd in (self._lock, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock = self._fd = -1

    # --- inside -------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises: ConfigError: others can reach into the directory, or it is not memory."""
        status = os.fstat(self._fd)
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"--persist {self.path}: it belongs to another user (uid {status.st_uid}); choose "
                "a directory of your own"
            )
        if status.st_mode & 0o077:
            raise ConfigError(
                f"--persist {self.path}: other users can enter it; `chmod 700 {self.path}`, once "
                "you know what lies in it, or choose another"
            )
        if not in_memory(self._fd):
            raise ConfigError(
                f"--persist {self.path}: it lies on a disk; pages can be kept on a tmpfs, such as "
                "/dev/shm, or on a hugetlbfs"
            )

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(COPIERS_LOCK, flags, 0o600, dir_fd=self._fd)

    def _names(self, pattern: re.Pattern[str]) -> list[str]:
        return sorted(name for name in os.listdir(self._fd) if pattern.fullmatch(name))

    def _open(self, name: str, mode: int) -> int:
        """A plain file of ours, or -1."""
        try:
            flags = mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError:
            return -1
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return fd
        os.close(fd)
        return -1


def used_bytes(path: Path) -> int:
    """Memory that is in a directory before anybody has opened it; 0 if there is none. A daemon
    that is about to take it over may claim it.

    On a hugetlbfs a file has all its pages set aside from the start, touched or not.
    """
    total = 0
    with contextlib.suppress(OSError):
        huge = huge_page_bytes(path) > 0
        for entry in os.scandir(path):
            if _CHUNK.fullmatch(entry.name) or _NAMESPACE.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                total += status.st_size if huge else status.st_blocks * 512
    return total


def record_bytes(path: Path) -> int:
    """What the records of a few namespaces will take beside the chunks, where that is much."""
    return SPARE_RECORDS * huge_page_bytes(path)


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--persist {path}: cannot be created: {error.strerror}") from None
