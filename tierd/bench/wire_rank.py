"""A rank that speaks the wire and nothing else: it offers pages and looks chains up as it is told,
with no engine behind it. What `tierd bench control` loads a daemon with."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import time
from pathlib import Path

import numpy as np
import zmq

from tierd.channel import Channel, close_all
from tierd.wire import codec, limits, messages
from tierd.wire.errors import TierdError
from tierd.wire.layout import TICKETS, Segment, SegmentSpec

PAGES = 1 << 14
"""Device pages of a rank. Backups name them round and round."""
ROW_BYTES = 1024
RING = 1 << 20
REGISTER_TIMEOUT_S = 60.0
REPLY_TIMEOUT_S = 30.0


class WireRankError(TierdError):
    """The daemon refused a rank of the measurement, or did not answer it."""


class WireRank:
    """One rank of the host backend, with one pool of one-token pages of ROW_BYTES.

    Raises: WireRankError: the daemon does not take it.
    """

    def __init__(self, path: Path, instance: str, rank: int, world_size: int) -> None:
        self.acked = self.kept = self.sent = 0
        """Pages, of backups in sequence order."""
        self._sizes: list[int] = []
        self._settled = 0
        self._ticket = 0
        self._request = 0
        self._spec = SegmentSpec(backup_ring=RING, restore_ring=1, max_layers=1)
        self._fds = [
            _memfd(self._spec.nbytes),
            os.pidfd_open(os.getpid()),
            _memfd(PAGES * ROW_BYTES),
        ]
        self._memory = mmap.mmap(self._fds[0], self._spec.nbytes)
        self._segment = Segment(self._memory, self._spec)
        self._segment.format()
        self._segment.backup_ring[:] = np.arange(RING) % PAGES
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(path))
        self.lifeline = Channel(sock, codec.TO_LIFELINE)
        self.lifeline.send(
            messages.Register(
                protocol=limits.PROTOCOL_VERSION,
                software="tierd bench control",
                instance=instance,
                rank=rank,
                world_size=world_size,
                namespace={"model": "none"},
                epoch="",
                device=f"host:{rank}",
                pid=os.getpid(),
                next_seq=0,
                allocations=[messages.Allocation(size=PAGES * ROW_BYTES)],
                pools=[
                    messages.PoolSpec(
                        name="kv",
                        num_pages=PAGES,
                        page_tokens=1,
                        buffers=[
                            messages.BufferSpec(
                                allocation=0,
                                offset=0,
                                page_stride=ROW_BYTES,
                                row_bytes=ROW_BYTES,
                                layer=0,
                            )
                        ],
                    )
                ],
            ),
            self._fds,
        )
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._path = path

    def welcome(self) -> None:
        """Wait until the daemon has mapped this rank's memory.

        Raises: WireRankError.
        """
        for message, fds in self.lifeline.wait(REGISTER_TIMEOUT_S):
            for fd in fds:
                os.close(fd)
            if isinstance(message, messages.Welcome):
                self._dealer.setsockopt(zmq.IDENTITY, message.routing_id)
                self._dealer.connect(f"ipc://{self._path}.zmq")
                return
            raise WireRankError(f"the daemon does not take a rank: {message}")
        raise WireRankError("the daemon did not answer a registration")

    @property
    def in_flight(self) -> int:
        """Pages that have been offered and not acked."""
        return self.sent - self.acked

    def back_up(self, keys: bytes, item_pages: int) -> None:
        """Offer chains of `item_pages` pages each, as one step."""
        count = len(keys) // limits.KEY_BYTES // item_pages
        pages, first = [item_pages] * count, [item_pages * i for i in range(count)]
        seqs = list(range(len(self._sizes), len(self._sizes) + count))
        self._ticket += 1
        self._segment.ready[self._ticket % TICKETS] = self._ticket
        message = messages.Flush(
            epoch="",
            ticket=self._ticket,
            fence=0,
            seqs=seqs,
            parts=[1] * count,
            parents=[b""] * count,
            pools=[0] * count,
            pages=pages,
            ring=[self.sent + at for at in first],
            first=first,
            keys=b"",
            digits=keys.hex(),  # which is what SGLang has
        )
        self._sizes += pages
        self.sent += sum(pages)
        self._say(message)

    def look_up(self, rid: str, keys: bytes) -> tuple[float, int]:
        """Look a chain up and let it go: how many seconds the answer took, and its longest count.

        Raises: WireRankError: no answer.
        """
        started = time.perf_counter()
        self.ask(rid, keys)
        reply = self.answer(REPLY_TIMEOUT_S)
        took_s = time.perf_counter() - started
        if reply is None:
            raise WireRankError("no answer to a lookup")
        self.lifeline.send(messages.Cancel(rid=rid))
        return took_s, max(reply.lengths, default=0)

    def ask(self, rid: str, keys: bytes) -> None:
        """Send a lookup."""
        self._request += 1
        self.lifeline.send(
            messages.Lookup(request=self._request, epoch="", rid=rid, pools=[0], keys=keys)
        )

    def answer(self, timeout_s: float) -> messages.LookupReply | None:
        """The answer to a lookup; None: it has not come."""
        for message, fds in self.lifeline.wait(timeout_s):
            close_all(fds)
            if isinstance(message, messages.LookupReply):
                return message
            if isinstance(message, messages.Error):
                raise WireRankError(f"the daemon did not understand: {message.reason}")
        return None

    def read(self, timeout_s: float) -> None:
        """Take the acks that are there; wait for the first one if there are none."""
        message = self._next(timeout_s)
        while message is not None:
            self._take(message)
            message = self._next(0.0)

    def close(self) -> None:
        """Leave the daemon."""
        self.lifeline.close()
        self._context.destroy(linger=0)
        for fd in self._fds:
            os.close(fd)

    def _take(self, message: messages.ToClient) -> None:
        if isinstance(message, messages.Error):
            raise WireRankError(f"the daemon did not understand: {message.reason}")
        if isinstance(message, messages.Acks):
            for kept in message.results:
                pages = self._sizes[self._settled]
                self._settled += 1
                self.acked += pages
                self.kept += pages * kept

    def _say(self, message: messages.Message) -> None:
        self._dealer.send(codec.encode(message))

    def _next(self, timeout_s: float) -> messages.ToClient | None:
        if not self._dealer.poll(int(timeout_s * 1000)):
            return None
        return codec.TO_CLIENT.decode(self._dealer.recv())


def connect(path: Path, instance: str, world_size: int) -> list[WireRank]:
    """All ranks of an engine.

    Raises: WireRankError.
    """
    ranks = [WireRank(path, instance, rank, world_size) for rank in range(world_size)]
    for rank in ranks:
        rank.welcome()
    return ranks


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("tierd-bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def answer_lookups(path: Path, world_size: int, pages: int, pause_s: float) -> None:
    """A process of its own: look one chain up again and again until standard input ends, and print
    a line "seconds longest" for each; "ready" comes first."""
    ranks = connect(path, f"asker {os.getpid()}", world_size)
    keys = os.urandom(pages * limits.KEY_BYTES)
    for rank in ranks:
        rank.back_up(keys, pages)
    while any(rank.in_flight for rank in ranks):
        for rank in ranks:
            rank.read(REPLY_TIMEOUT_S)
    print("ready", flush=True)
    stop = select.poll()
    stop.register(0, select.POLLIN | select.POLLHUP)
    number = 0
    while not stop.poll(pause_s * 1000):
        number += 1
        took_s, longest = ranks[0].look_up(f"r{number}", keys)
        print(took_s, longest, flush=True)
    for rank in ranks:
        rank.close()


if __name__ == "__main__":
    import sys

    answer_lookups(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
