"""A copier's host chunks: mapped, pinned and let go by a few threads, so that copies go on.

Everything but that happens in the copier's own thread, which `fileno` wakes when a thread is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from tierd.channel import close_all
from tierd.copier.backend import Backend, BackendError, Chunk
from tierd.copier.verify import Verifier
from tierd.memory.placement import joined_bytes
from tierd.wire import messages
from tierd.wire.geometry import placed_layout

_ERROR_CHARS = 4096


class _Pinned(NamedTuple):
    """A chunk, and what `messages.ChunkReady` says of it."""

    chunk: Chunk
    corrupt: bytes
    joined_bytes: int


class Pinner:
    """The chunks of one copier.

    Args:
        say: Tells control what has become of a chunk.
        threads: How many chunks are worked on at a time.

    `chunks`: those that copies may use, by number.
    """

    def __init__(
        self,
        backend: Backend,
        verifier: Verifier,
        say: Callable[[messages.FromCopier], None],
        threads: int,
    ) -> None:
        self.chunks: dict[int, Chunk] = {}
        self._backend = backend
        self._verifier = verifier
        self._say = say
        self._users: dict[int, int] = {}
        self._pinning: dict[int, Future[_Pinned]] = {}
        self._closing: dict[int, Future[None]] = {}
        self._unwanted: set[int] = set()
        self._threads = ThreadPoolExecutor(threads, "pin")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable when `poll` has something to do, until `awake`."""
        return self._wake

    def awake(self) -> None:
        """The wake-up was heard. `poll` must follow: what is done later wakes again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def add(self, message: messages.AddChunk, fds: list[int]) -> None:
        """Map and pin a chunk. Takes over the descriptors."""
        number = message.chunk
        error = ""
        if number in self.chunks or number in self._pinning or number in self._closing:
            error = f"chunk {number} is mapped already"
        elif len(fds) != 1:
            error = f"{len(fds)} descriptors came with chunk {number}"
        if error:
            close_all(fds)
            self._say(messages.ChunkReady(chunk=number, error=error))
            return

        def pin() -> _Pinned:
            try:
                chunk = self._backend.map_chunk(fds[0], message.size, message.touch)
            finally:
                close_all(fds)
            corrupt: list[int] = []
            if message.verify is not None:
                host = placed_layout(message.verify.rows, message.verify)
                corrupt = self._verifier.check_chunk(chunk.address, host)
            joined = joined_bytes(chunk.address, message.size)
            return _Pinned(chunk, np.array(corrupt, "<u4").tobytes(), joined)

        self._pinning[number] = self._threads.submit(pin)
        self._pinning[number].add_done_callback(self._notify)

    def drop(self, number: int) -> None:
        """Let go of a chunk as soon as nobody uses it."""
        if number in self._pinning or self._users.get(number):
            self._unwanted.add(number)
            return
        self._unwanted.discard(number)
        chunk = self.chunks.pop(number, None)
        if chunk is None:
            self._say(messages.ChunkDropped(chunk=number))
            return
        self._closing[number] = self._threads.submit(chunk.close)
        self._closing[number].add_done_callback(self._notify)

    def use(self, numbers: Iterable[int]) -> None:
        """Copies of a job name these chunks: they stay until it is over."""
        for number in numbers:
            self._users[number] = self._users.get(number, 0) + 1

    def release(self, numbers: Iterable[int]) -> None:
        """That job is over."""
        for number in numbers:
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number]
                if number in self._unwanted:
                    self.drop(number)

    def poll(self) -> bool:
        """Take over what the threads have done since the last look. False: nothing.

        Raises: DeviceLostError: a chunk cannot be let go, or the device is unusable.
        """
        pinned = [number for number, future in self._pinning.items() if future.done()]
        closed = [number for number, future in self._closing.items() if future.done()]
        for number in pinned:
            try:
                self.chunks[number], corrupt, joined = self._pinning.pop(number).result()
                ready = messages.ChunkReady(chunk=number, corrupt=corrupt, joined_bytes=joined)
            except BackendError as failure:
                ready = messages.ChunkReady(chunk=number, error=str(failure)[:_ERROR_CHARS])
            if number in self._unwanted:
                self.drop(number)
            else:
                self._say(ready)
        for number in closed:
            self._closing.pop(number).result()
            self._say(messages.ChunkDropped(chunk=number))
        return bool(pinned or closed)

    def close(self) -> None:
        """Let go of every chunk. No copy may be on the wire. Idempotent.

        Raises: DeviceLostError: as `poll`.
        """
        if self._wake < 0:
            return
        for future in self._pinning.values():
            future.cancel()
        pinned = [
            f.result().chunk
            for f in self._pinning.values()
            if not f.cancelled() and not f.exception()
        ]
        for _ in self._threads.map(Chunk.close, [*pinned, *self.chunks.values()]):
            pass  # unpinning takes as long as pinning does
        self._threads.shutdown()
        for closing in self._closing.values():
            closing.result()
        self.chunks.clear()
        os.close(self._wake)
        self._wake = -1

    def _notify(self, _: Future[_Pinned] | Future[None]) -> None:
        os.eventfd_write(self._wake, 1)
