"""Ranks that say almost what a rank would say, and one engine that says exactly that and checks
that nobody else's nonsense reaches it."""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq
from flushes import Row, columns
from mutation import Mutator
from one_process import DEADLINE_S, OneProcess, memfd
from tierd_client.segment import create_segment

from tierd.channel import Channel, ChannelClosed, close_all
from tierd.control.keys import Keys
from tierd.control.sheds import Shed
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ProtocolError
from tierd.wire.layout import SegmentSpec
from tierd.wire.messages import Allocation, BufferSpec, Part, PoolSpec, RestoreItem

SPEC = SegmentSpec(backup_ring=256, restore_ring=256, max_layers=4)
PAGES, ROW, GAP, WINDOW = 32, 64 << 10, 512, 4
"""Rows so wide that a chunk holds some 500 pages: the tier evicts."""
STRIDE = ROW + GAP
SIZE = 2 * PAGES * STRIDE
CANARY = 0xA5
TICKET = 1
CHAINS = 60
PATIENCE_S = 120.0
EXCUSES = (Shed.NO_ROOM.value, Shed.LATE_ROOM.value, Shed.COPIER.value)
"""Why a backup that makes sense may be decided against in a full tier; the last one is a copier
that was not heard of for a moment."""


def key(chain: int, page: int) -> bytes:
    return hashlib.sha256(f"{chain} {page}".encode()).digest()


def pools() -> list[PoolSpec]:
    """A pool that needs all its pages and one with a window, side by side with gaps."""
    return [
        PoolSpec(
            name=name,
            num_pages=PAGES,
            page_tokens=1,
            window=window,
            buffers=[
                BufferSpec(
                    allocation=0,
                    offset=half * PAGES * STRIDE,
                    page_stride=STRIDE,
                    row_bytes=ROW,
                    layer=half,
                )
            ],
        )
        for half, (name, window) in enumerate([("kv", 0), ("swa", WINDOW)])
    ]


def plain(message: Any) -> Any:
    """A message as maps, lists and blobs, ready to be changed."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


class FuzzRank:
    """One rank's memory, segment and connections."""

    def __init__(self, daemon: OneProcess, instance: str, rank: int, world_size: int) -> None:
        self._daemon = daemon
        self.instance, self.rank, self.world_size = instance, rank, world_size
        self.shared = create_segment(SPEC)
        self.segment = self.shared.fields
        self.segment.ready[TICKET] = TICKET
        self.fd = memfd(SIZE)
        self.pidfd = os.pidfd_open(os.getpid())
        self._context = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self.channel: Channel[messages.ToLifeline] | None = None
        self._sock: socket.socket | None = None
        with os.fdopen(os.dup(self.fd), "r+b") as file:
            self.bytes = np.memmap(file, np.uint8, "r+", 0, (SIZE,))
        self.rows = self.bytes.reshape(2, PAGES, STRIDE)
        self.rows[:, :, ROW:] = CANARY
        self.replies: list[messages.ToClient] = []
        self.seq = 0

    def registration(self) -> messages.Register:
        return messages.Register(
            protocol=limits.PROTOCOL_VERSION,
            software="a rank",
            instance=self.instance,
            rank=self.rank,
            world_size=self.world_size,
            namespace={"model": self.instance.rstrip("0123456789")},
            epoch="",
            device=f"host:{self.rank}",
            pid=os.getpid(),
            next_seq=self.seq,
            allocations=[Allocation(size=SIZE)],
            pools=pools(),
            supplies=True,
        )

    @property
    def fds(self) -> list[int]:
        return [self.shared.fd, self.pidfd, self.fd]

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(self._daemon.state.endpoint.path))
        self.channel, self._sock = Channel(sock, codec.TO_LIFELINE), sock

    def register(self, message: messages.Register | None = None) -> messages.ToLifeline | None:
        """Say this, or what makes sense; the answer. None: the daemon hung up."""
        if self.channel is None or self.channel.closed:
            self.connect()
        assert self.channel is not None
        try:
            self.channel.send(message or self.registration(), self.fds)
            return self.answer()
        except (ChannelClosed, ProtocolError):
            return None

    def answer(self, turns: int = 2000) -> messages.ToLifeline | None:
        assert self.channel is not None
        for _ in range(turns):
            self._daemon.turn()
            for answer, fds in self.channel.receive():
                close_all(fds)
                if isinstance(answer, messages.Welcome):
                    self.open(answer.routing_id)
                return answer
        raise AssertionError("a registration without an answer")

    def open(self, identity: bytes) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, identity)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.connect(f"ipc://{self._daemon.state.endpoint.path}.zmq")

    def say(self, data: bytes) -> None:
        assert self._dealer is not None
        with suppress(zmq.Again):
            self._dealer.send(data, zmq.NOBLOCK)

    def ask(self, data: bytes) -> None:
        """Say something on the lifeline, which the daemon reads before it is full."""
        assert self._sock is not None
        left = memoryview(codec.frame(data))
        while left:
            try:
                left = left[self._sock.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._daemon.turn()

    def hear(self) -> list[messages.ToClient | messages.ToLifeline]:
        """What has come; each of it must make sense."""
        heard: list[messages.ToClient | messages.ToLifeline] = []
        if self.channel is not None and not self.channel.closed:
            with suppress(ChannelClosed):
                for message, fds in self.channel.receive():
                    close_all(fds)
                    heard.append(message)
        if self._dealer is not None:
            with suppress(zmq.Again):
                while True:
                    heard.append(codec.TO_CLIENT.decode(self._dealer.recv(zmq.NOBLOCK)))
        return heard

    def await_reply(self, kind: type[Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._daemon.turn()
            for reply in self.hear():
                assert not isinstance(reply, messages.Error), reply.reason
                if isinstance(reply, kind):
                    return reply
        raise AssertionError(f"no {kind.__name__} came; {self._daemon.describe()}")

    def canaries_sing(self) -> bool:
        """Is everything between the rows as it was?"""
        return bool((self.rows[:, :, ROW:] == CANARY).all())

    def leave(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None

    def close(self) -> None:
        self.leave()
        self._context.destroy(linger=0)
        self.shared.close()
        os.close(self.fd)
        os.close(self.pidfd)


class Sayings:
    """What a rank might say next, as messages that make sense."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._step = 0

    def flush(self, rank: FuzzRank) -> messages.Message:
        rng = self._rng
        rows, keys = [], b""
        at = 0
        for _ in range(rng.choice((1, 1, 3))):
            chain, first, count = rng.randrange(CHAINS), rng.choice((0, 0, 2, 8)), rng.randint(1, 6)
            names = b"".join(key(chain, first + i) for i in range(count))
            parts = [Part(0, count, at), Part(1, count, at + count)]
            if rng.random() < 0.3:
                parts = parts[:1]
            parent = key(chain, first - 1) if first else b""
            shed = rng.random() < 0.05
            rows.append(Row(rank.seq, [] if shed else parts, None if shed else parent))
            keys += b"" if shed else names * len(parts)
            at += 2 * count
            rank.seq += 1
        named = rng.choice(({"keys": keys}, {"keys": b"", "digits": keys.hex()}))
        return messages.Flush(epoch="", ticket=TICKET, fence=0, **named, **columns(rows))

    def lookup(self, rank: FuzzRank) -> messages.Message:
        rng = self._rng
        chain, count = rng.randrange(CHAINS), rng.randint(1, 16)
        self._step += 1
        return messages.Lookup(
            request=self._step,
            epoch="",
            rid=f"r{rng.randrange(20)}",
            pools=rng.choice([[0, 1], [0]]),
            keys=b"".join(key(chain, i) for i in range(count)),
        )

    def restore(self, rank: FuzzRank) -> messages.Message:
        rng = self._rng
        chain, count = rng.randrange(CHAINS), rng.randint(1, 6)
        self._step += 1
        names = b"".join(key(chain, i) for i in range(count))
        parts = [Part(0, count, 0), Part(1, min(count, WINDOW), count)]
        parts = parts[: rng.choice((1, 2))]
        keys = names + (names[-32 * min(count, WINDOW) :] if len(parts) == 2 else b"")
        entry = rng.randrange(8)
        rank.segment.awaited[entry] = self._step % 2**32
        return messages.Restore(
            epoch="",
            number=self._step,
            entry=entry,
            generation=self._step % 2**32,
            ticket=TICKET,
            fence=0,
            items=[RestoreItem(f"r{rng.randrange(20)}", parts)],
            keys=keys,
        )

    def cancel(self, rank: FuzzRank) -> messages.Message:
        return messages.Cancel(rid=f"r{self._rng.randrange(20)}")

    def supply(self, rank: FuzzRank) -> messages.Message:
        rng = self._rng
        chain, count = rng.randrange(CHAINS), rng.randint(1, 8)
        return messages.Supply(
            epoch="",
            seq=max(0, rank.seq - rng.randint(1, 4)),
            ticket=TICKET,
            fence=0,
            parts=[Part(0, count, 100)],
            keys=b"".join(key(chain, i) for i in range(count)),
        )

    def reset(self, rank: FuzzRank) -> messages.Message:
        epoch = self._rng.choice(["", "", f"{rank.instance}:{self._rng.randrange(3)}"])
        return messages.Reset(epoch=epoch, next_seq=rank.seq)

    def any(self, rank: FuzzRank) -> messages.Message:
        kinds = [self.flush, self.lookup, self.restore, self.cancel, self.supply, self.reset]
        return self._rng.choices(kinds, [8, 6, 5, 1, 3, 0.1])[0](rank)


class FuzzGroup:
    """The ranks of one engine, of whose messages some are changed on the way."""

    def __init__(
        self, daemon: OneProcess, rng: random.Random, instance: str, world_size: int
    ) -> None:
        self._rng = rng
        self._mutator = Mutator(rng)
        self._sayings = Sayings(rng)
        self.corpus: list[Any] = []
        """Changed messages that led somewhere new."""
        self.ranks = [FuzzRank(daemon, instance, rank, world_size) for rank in range(world_size)]
        self.register()

    def register(self) -> None:
        for rank in self.ranks:
            rank.leave()
        for rank in self.ranks:
            answer = rank.register()
            assert isinstance(answer, messages.Welcome), answer
        # From here on, one numbering.
        first = max(rank.seq for rank in self.ranks)
        for rank in self.ranks:
            rank.seq = first

    def step(self) -> list[bytes]:
        """Every rank says the next thing; returns what was said."""
        rng = self._rng
        said = []
        state = rng.getstate()
        step = self._sayings._step
        for rank in self.ranks:
            rng.setstate(state)  # all ranks mean the same ...
            self._sayings._step = step
            meant = self._sayings.any(rank)
            rng.seed(rng.random() + rank.rank)
            data = msgspec.msgpack.encode(meant)
            if rng.random() < 0.4:  # ... and do not always say it
                template = plain(meant)
                if self.corpus and rng.random() < 0.3:
                    template = rng.choice(self.corpus)
                data = self._mutator.message(template, self.corpus)
            self._scribble(rank)
            asks = isinstance(meant, messages.FromRank)
            if isinstance(meant, messages.Restore):  # may come on either way
                asks = rng.random() < 0.5
            (rank.ask if asks else rank.say)(data)
            said.append(data)
        rank = rng.choice(self.ranks)
        if rng.random() < 0.01:
            rank.segment.fence[0] = rng.randrange(3)
        else:
            rank.segment.fence[0] = 0
        return said

    def _scribble(self, rank: FuzzRank) -> None:
        """Page numbers; now and then such as no pool has."""
        rng = self._rng
        ring = rng.choice([rank.segment.backup_ring, rank.segment.restore_ring])
        at = rng.randrange(len(ring))
        hostile = rng.random() < 0.1
        ring[at] = rng.choice([PAGES, -1, 2**40, -(2**63), 2**63 - 1] if hostile else range(PAGES))

    def hear(self) -> None:
        for rank in self.ranks:
            rank.hear()

    def close(self) -> None:
        for rank in self.ranks:
            assert rank.canaries_sing(), "a copy left the rows of its pool"
            rank.close()


class HonestEngine:
    """One rank that makes sense and expects the same of the daemon."""

    def __init__(self, daemon: OneProcess) -> None:
        self._daemon = daemon
        self._rank = FuzzRank(daemon, "honest", 0, 1)
        self._rounds = 0
        self.refused = Counter[str]()
        """Why it got nothing kept or nothing back, and how often."""
        answer = self._rank.register()
        assert isinstance(answer, messages.Welcome)

    def round_trip(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Back pages up, overwrite them, and have them restored elsewhere, byte for byte.

        There may be no room for them while others use some of every chunk, or pages of others may
        have taken it before they are back; but not for ever, though the others go on: what is
        granted to them ends, and then it is its turn. For anything else nothing is refused.

        Args: `meanwhile`: what others say after each refusal.
        """
        until = time.monotonic() + DEADLINE_S
        before = self.refused.copy()
        while time.monotonic() < until:
            self._rounds += 1
            if self._backed_up() and self._restored():
                return
            meanwhile()
        raise AssertionError(
            f"nobody else lets an engine that makes sense be served: {self.refused - before}; "
            f"{self._daemon.describe()}; {self._daemon.describe_room()}"
        )

    def _content(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self._rounds).integers(0, 256, (2, 4, ROW), np.uint8)

    def _keys(self) -> bytes:
        return b"".join(
            hashlib.sha256(f"honest {self._rounds} {i}".encode()).digest() for i in range(4)
        )

    def _backed_up(self) -> bool:
        rank = self._rank
        rank.rows[:, :4, :ROW] = self._content()
        rank.segment.backup_ring[:4] = range(4)
        row = Row(rank.seq, [Part(0, 4, 0), Part(1, 4, 0)], b"")
        message = messages.Flush(
            epoch="", ticket=TICKET, fence=0, keys=self._keys() * 2, **columns([row])
        )
        sheds = self._daemon.state.sheds.counts()
        rank.say(msgspec.msgpack.encode(message))
        acks = rank.await_reply(messages.Acks)
        assert acks.first_seq == rank.seq
        rank.seq += 1
        if acks.results == b"\1":
            return True
        after = self._daemon.state.sheds.counts()
        why = [name for name in EXCUSES if after[name] > sheds[name]]
        assert why, f"a backup is not kept, and not for want of room: {sheds}, then {after}"
        self.refused.update(why)
        return False

    def _restored(self) -> bool:
        rank = self._rank
        rank.rows[:, :8, :ROW] = 0xEE
        rank.segment.restore_ring[:4] = range(4, 8)
        rank.segment.awaited[0] = self._rounds
        message = messages.Restore(
            epoch="",
            number=self._rounds,
            entry=0,
            generation=self._rounds,
            ticket=TICKET,
            fence=0,
            items=[RestoreItem("r", [Part(0, 4, 0), Part(1, 4, 0)])],
            keys=self._keys() * 2,
        )
        way = rank.ask if self._rounds % 2 else rank.say
        way(msgspec.msgpack.encode(message))
        served = self._can_be_served()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self._daemon.turn()
            verdict = rank.segment.get_verdict(0, self._rounds)
            served = served and self._can_be_served()
            if verdict:
                break
        assert verdict, "a restore without a verdict"
        assert rank.canaries_sing()
        if verdict == 1:
            assert (rank.rows[:, 4:8, :ROW] == self._content()).all()
            return True
        assert not served, "pages that are all here are not restored"
        self.refused["gone"] += 1
        return False

    def _can_be_served(self) -> bool:
        """Are the round's pages all here, and is its copier heard of?"""
        group, keys = self._daemon.state.groups["honest"], Keys(self._keys())
        (catalog,) = group.catalogs.values()
        here = all((pool.present(keys) >= 0).all() for pool in catalog.pools.values())
        return here and group.serving

    def close(self) -> None:
        self._rank.close()


def socket_of(channel: Channel[Any]) -> socket.socket:
    """A channel's socket, to say what the channel would not."""
    return socket.socket(fileno=os.dup(channel.fileno()))
