"""What takes in what others wrote, each as a target that can be fed any number of messages.

A target raises on the first thing that must not happen. What it is fed follows from its seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

import fuzz_ranks
import msgspec
import numpy as np
import torch
import zmq
from descriptors import open_descriptors, opened_since
from flushes import Row, columns
from fuzz_ranks import FuzzGroup, FuzzRank, HonestEngine, plain
from mutation import EDGES, TEXTS, Mutator, is_shallow
from one_process import Bounds, OneProcess
from tierd_client import DeviceBuffer, DevicePool, PoolPages, TierClient

import tierd
from tierd.channel import Channel, ChannelClosed, close_all
from tierd.config import parse_toml, resolve
from tierd.copier.plan import Direction, PlanError, PoolPlan
from tierd.memory.limits import Available
from tierd.memory.presence import SharedPresence
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ConfigError, ProtocolError
from tierd.wire.geometry import CHUNK_BYTES, check_pools, pool_layout
from tierd.wire.messages import Allocation, BufferSpec, PoolSpec

PACKAGE = str(Path(tierd.__file__).parent)
IMPATIENT = 0.05
"""Patience of a daemon whose deadlines pass often."""


class Target(Protocol):
    def feed(self, count: int) -> None:
        """So many messages. Raises: whatever shows a fault."""

    def close(self) -> None: ...


class Coverage:
    """Which lines of tierd have run: an input that reaches a new one is worth keeping."""

    def __init__(self) -> None:
        self.lines: set[tuple[CodeType, int]] = set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[bool]]:
        """Yields a list that has an element once a new line has run."""
        news: list[bool] = []

        def line(frame: FrameType, event: str, _: Any) -> Any:
            here = (frame.f_code, frame.f_lineno)
            if here not in self.lines:
                self.lines.add(here)
                news.append(True)
            return line

        def call(frame: FrameType, event: str, _: Any) -> Any:
            return line if frame.f_code.co_filename.startswith(PACKAGE) else None

        before = sys.gettrace()
        sys.settrace(call)
        try:
            yield news
        finally:
            sys.settrace(before)


# --- bytes to messages ------------------------------------------------------------------------


def examples() -> list[tuple[codec.Decoder[Any], Any]]:
    """At least one message of every conversation, as maps, with its decoder."""
    key, blob8 = bytes(range(32)), bytes(8)
    part = messages.Part(0, 1, 0)
    copy = messages.CopyPart(0, blob8, blob8, bytes(4))
    pool = fuzz_ranks.pools()
    register = messages.Register(
        protocol=limits.PROTOCOL_VERSION,
        software="x",
        instance="i",
        rank=0,
        world_size=2,
        namespace={"model": "m"},
        epoch="",
        device="host:0",
        pid=1,
        next_seq=0,
        allocations=[Allocation(size=4096, handle=bytes(64))],
        pools=pool,
    )
    host = messages.HostPool(block_slots=1, chunk_slots=2, data_offset=4096)
    lifeline = [
        register,
        messages.StatusRequest(protocol=1),
        messages.ClearRequest(protocol=1),
        messages.PauseRequest(protocol=1, paused=True),
    ]
    from_client = [
        messages.Flush(
            epoch="",
            ticket=1,
            fence=0,
            keys=2 * key,
            **columns([Row(0, [part], key), Row(1), Row(2, [part], b"")]),
        ),
        messages.Lookup(request=1, epoch="", rid="r", pools=[0], keys=key),
        messages.Restore(
            epoch="",
            number=1,
            entry=0,
            generation=1,
            ticket=1,
            fence=0,
            items=[messages.RestoreItem("r", [part])],
            keys=key,
        ),
        messages.Cancel(rid="r"),
        messages.Supply(epoch="", seq=1, ticket=1, fence=0, parts=[part], keys=key),
        messages.Reset(epoch="", next_seq=1),
    ]
    to_copier = [
        messages.AddChunk(chunk=1, size=4096),
        messages.Attach(
            session=1, allocations=register.allocations, pools=pool, host_pools=[host] * 2
        ),
        messages.BackupJob(job=1, session=1, tickets=[1], fence=0, consumed=1, parts=[copy]),
        messages.RestoreJob(
            job=1,
            session=1,
            ticket=1,
            fence=0,
            consumed=1,
            entry=0,
            generation=1,
            parts=[copy],
        ),
    ]
    to_lifeline = [
        messages.Welcome(protocol=1, software="", routing_id=bytes(16), lease_s=30.0),
        messages.Refused(reason="no", protocol=1),
        messages.Status(data={"a": [1]}),
        messages.Done(detail={"pages": 1}),
    ]
    to_client = [
        messages.Acks(first_seq=0, results=b"\1\0"),
        messages.Need(seq=0),
        messages.LookupReply(request=1, lengths=[1, 2], lease_s=30.0),
        messages.Error(reason="no"),
    ]
    from_copier = [
        messages.CopierReady(device="host:0", detail={}),
        messages.Attached(session=1, paths=["rows"]),
        messages.JobDone(job=1, ok=True, pages=1),
    ]
    groups = [
        (codec.FROM_LIFELINE, lifeline),
        (codec.FROM_CLIENT, from_client),
        (codec.TO_COPIER, to_copier),
        (codec.TO_LIFELINE, to_lifeline),
        (codec.TO_CLIENT, to_client),
        (codec.FROM_COPIER, from_copier),
    ]
    return [(decoder, plain(message)) for decoder, group in groups for message in group]


FLIPS = 16
"""Bytes that are flipped, one at a time, in each changed message."""


class Decoders:
    """Every decoder: a message that keeps its schema, or a ProtocolError."""

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self._rng, self._mutator = rng, Mutator(rng)
        self._examples = examples()
        self._donors = [template for _, template in self._examples]

    def feed(self, count: int) -> None:
        number = 0
        while number < count:
            decoder, template = self._rng.choice(self._examples)
            data = self._mutator.message(template, self._donors)
            self._one(decoder, data, number % 16 == 0)
            for _ in range(FLIPS):
                self._one(decoder, self._mutator.flip(data), False)
            number += 1 + FLIPS

    def _one(self, decoder: codec.Decoder[Any], data: bytes, whole: bool) -> None:
        try:
            message = decoder.decode(data)
        except ProtocolError:
            return
        if whole:
            data = codec.encode(message)
            assert codec.encode(decoder.decode(data)) == data

    def close(self) -> None:
        pass


class Framing:
    """A channel whose other end writes what it likes, with descriptors where it likes."""

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self._rng, self._mutator = rng, Mutator(rng)
        self._examples = [template for _, template in examples()]
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._before = open_descriptors()

    def feed(self, count: int) -> None:
        while count > 0:
            count -= self._conversation(min(count, 50))

    def _conversation(self, most: int) -> int:
        rng = self._rng
        ours, theirs = socket.socketpair()
        channel = Channel(ours, codec.FROM_LIFELINE)
        said = 0
        with theirs:
            theirs.setblocking(False)
            for _ in range(most):
                said += 1
                payload = self._mutator.message(rng.choice(self._examples), self._examples)
                fds = [self._null] * rng.choice((0, 0, 0, 1, 2, 200))
                claimed = rng.choice((len(fds), len(fds), 0, 1, 129, 2**32 - 1))
                length = len(payload) if rng.random() < 0.9 else rng.choice((0, 1, 2**24 + 1))
                data = struct.pack("<II", length, claimed) + payload
                try:
                    while data:
                        cut = rng.choice((len(data), 3, 8, 9))
                        socket.send_fds(theirs, [data[:cut]], fds)
                        data, fds = data[cut:], []
                except BlockingIOError:
                    pass
                try:
                    for _, got in channel.receive():
                        close_all(got)
                except (ProtocolError, ChannelClosed):
                    break
            channel.close()
        assert opened_since(self._before) == []
        return said

    def close(self) -> None:
        os.close(self._null)


class Config:
    """Config files: settings that make sense, or a ConfigError."""

    SAMPLE = (
        'socket = "/tmp/t/tierd.sock"\nmemory = "1GiB"\nmemory-check = true\ndevices = "host:2"\n'
        'log-level = "info"\npool = ["swa=20%", "kv=30%"]\npatience = 1.5\n'
    )
    PIECES = (
        *('"', "=", "[", "]", "%", "\n", "{", "}", "0", "-1", "1e400", "nan", "inf", "true"),
        *("pool", "host:99999999999999999999", "GPU-", "1TiB", "0x10", "1979-05-27", "\\u0000"),
    )

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self._rng = rng
        self._corpus = [self.SAMPLE]
        self._coverage = Coverage()

    def feed(self, count: int) -> None:
        rng = self._rng
        for number in range(count):
            text = rng.choice(self._corpus)
            for _ in range(rng.choice((1, 1, 2, 3))):
                at = rng.randrange(len(text) + 1)
                end = min(len(text), at + rng.choice((0, 0, 1, 5)))
                piece = rng.choice([*self.PIECES, *TEXTS[:4], chr(rng.randrange(1, 1000))])
                text = text[:at] + piece + text[end:]
            if number % 8:
                self._one(text)
                continue
            with self._coverage.watch() as news:
                self._one(text)
            if news and len(text) < 500:
                self._corpus.append(text)

    def _one(self, text: str) -> None:
        try:
            settings = resolve(
                parse_toml(text),
                available=lambda: Available(1 << 40, "the machine"),
                visible_gpus=lambda: [f"GPU-{n}" for n in range(2)],
                reserved=dict,
            )
        except ConfigError:
            return
        assert settings.memory_bytes >= CHUNK_BYTES * len(settings.devices)
        assert settings.memory_bytes % CHUNK_BYTES == 0
        assert 0 <= settings.pin_ahead_bytes <= settings.memory_bytes
        assert 0 < len(settings.devices) <= 64
        assert all(0 < share <= 1 for share in settings.pool_shares.values())
        assert 0 < settings.patience <= 100
        assert settings.socket.is_absolute()

    def close(self) -> None:
        pass


# --- what is planned --------------------------------------------------------------------------

LARGEST = 1 << 44
"""What a process can map; a larger allocation is refused where it would be mapped."""


class Geometry:
    """Registrations whose geometry is hostile: refused, or nothing outside is ever planned."""

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self._rng = rng
        self._np = np.random.default_rng(rng.randrange(2**32))
        self.accepted = 0

    def feed(self, count: int) -> None:
        for _ in range(count):
            allocations, pools = self._registration()
            try:
                encoded = msgspec.msgpack.encode([allocations, pools])
                allocations, pools = msgspec.msgpack.decode(
                    encoded, type=tuple[list[Allocation], list[PoolSpec]]
                )
                check_pools(allocations, pools)
            except (ProtocolError, msgspec.ValidationError, OverflowError):
                continue
            if sum(a.size for a in allocations) <= LARGEST:
                self.accepted += 1
                self._plan(allocations, pools)

    def _registration(self) -> tuple[list[Allocation], list[PoolSpec]]:
        rng = self._rng
        pages, row = rng.choice((1, 2, 7, 64)), rng.choice((1, 16, 256, 4096, 1 << 17))
        layers = rng.choice((1, 2, 5, 36))
        stride = row * rng.choice((1, 1, 2, layers * 2))
        extent = pages * stride
        count = rng.choice((1, 1, 2, layers))
        size = extent * 2 * layers + rng.choice((0, 0, 4096))
        allocations = [Allocation(size=size) for _ in range(count)]
        buffers = []
        for n in range(2 * layers):
            offset = n * row if stride == row * layers * 2 else n * extent
            buffers.append(
                BufferSpec(
                    allocation=n % count,
                    offset=offset,
                    page_stride=stride,
                    row_bytes=row,
                    layer=n % layers,
                )
            )
        pools = [PoolSpec(name="kv", num_pages=pages, page_tokens=1, buffers=buffers)]
        for _ in range(rng.choice((0, 1, 1, 2))):
            self._spoil(allocations, pools)
        return allocations, pools

    def _spoil(self, allocations: list[Allocation], pools: list[PoolSpec]) -> None:
        rng = self._rng
        pool = rng.choice(pools)
        at = rng.randrange(len(pool.buffers))
        buffer = pool.buffers[at]
        replace = msgspec.structs.replace
        near = rng.choice([*EDGES, buffer.offset + 1, buffer.row_bytes - 1, buffer.page_stride + 1])
        kind = rng.randrange(7)
        if kind < 4:
            field = ("offset", "page_stride", "row_bytes", "allocation")[kind]
            pool.buffers[at] = replace(buffer, **{field: near})
        elif kind == 4:
            pool.buffers.append(buffer)
        elif kind == 5:
            pools[0] = replace(pools[0], num_pages=near)
        else:
            number = rng.randrange(len(allocations))
            allocations[number] = replace(allocations[number], size=near)

    def _plan(self, allocations: list[Allocation], pools: list[PoolSpec]) -> None:
        """Have jobs planned in a made-up address space in which nothing is adjacent."""
        rng, np_rng = self._rng, self._np
        device, host = Bounds(), Bounds()
        addresses, at = [], 1 << 45
        for allocation in allocations:
            addresses.append(at)
            device.add(at, allocation.size)
            at += allocation.size + 4096
        for pool in pools:
            layout = pool_layout(pool)
            if layout.chunk_bytes > LARGEST or len(pool.buffers) > 200:
                continue
            chunk = 1 << 46
            host.add(chunk + layout.data_offset, layout.chunk_bytes - layout.data_offset)
            plan = PoolPlan(pool, addresses, layout)
            count = rng.randint(1, 8)
            pages = np_rng.integers(0, pool.num_pages, count, np.int64)
            slots = np_rng.permutation(min(layout.chunk_slots, 64))[:count].astype(np.uint64)
            pages = pages[: len(slots)]
            if rng.random() < 0.3:
                hostile = [pool.num_pages, -1, 2**62, -(2**63), 2**63 - 1]
                pages[rng.randrange(len(pages))] = rng.choice(hostile)
            chunks = np.full(len(pages), chunk, np.uint64)
            try:
                runs = plan.runs(pages, chunks, slots)
            except PlanError:
                assert pages.min() < 0 or pages.max() >= pool.num_pages
                continue
            moved = 0
            for direction in Direction:
                for batch in plan.pieces(plan.group(0, plan.layers), runs, direction):
                    for ops in (batch.boxes, batch.rows):
                        moved += int((ops["width"] * ops["depth"]).sum())
                        last = ops["depth"] - np.uint64(1)
                        for side, bounds in (("device", device), ("host", host)):
                            ends = ops[side] + last * ops[f"{side}_stride"] + ops["width"]
                            bounds.check(ops[side].tolist(), ends.tolist())
            assert moved == 2 * len(pages) * layout.slot_bytes

    def close(self) -> None:
        assert self.accepted


# --- the daemon -------------------------------------------------------------------------------


class Daemon:
    """A whole daemon, fed over its own sockets by three engines that do not always make sense,
    while a fourth one, which does, loses nothing."""

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self._rng, self._mutator = rng, Mutator(rng)
        self._daemon = OneProcess(directory, devices=2, patience=IMPATIENT)
        self._honest = HonestEngine(self._daemon)
        self._honest.round_trip()
        self._groups = [
            FuzzGroup(self._daemon, rng, f"fuzz{n}", world_size)
            for n, world_size in enumerate((2, 1, 1))
        ]
        self._coverage = Coverage()
        self._strangers = 0
        self._said = 0
        self._settled_at = 0
        self._tripped_at = 0

    def feed(self, count: int) -> None:
        rng = self._rng
        end = self._said + count
        while self._said < end:
            group = rng.choice(self._groups)
            if self._said % 64 < 2:
                with self._coverage.watch() as news:
                    said = group.step()
                    self._daemon.turn()
                    self._daemon.turn()
                if news:
                    self._learn(group, said)
            else:
                said = group.step()
                if rng.random() < 0.3:
                    self._daemon.turn()
            self._said += len(said)
            for each in self._groups:
                each.hear()
            if rng.random() < 0.01:
                self._said += self._stranger()
            if rng.random() < 0.0005:
                rng.choice(self._groups).register()
            if self._said - self._tripped_at >= 2000:
                self._tripped_at = self._said
                self._honest.round_trip()
            if self._said - self._settled_at >= 20000:
                self._settled_at = self._said
                self._daemon.settle()
                self._daemon.check()
        self._daemon.settle()
        self._daemon.check()
        self._honest.round_trip()

    def _learn(self, group: FuzzGroup, said: list[bytes]) -> None:
        for data in said:
            with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                value = msgspec.msgpack.decode(data)
                if isinstance(value, dict) and len(group.corpus) < 2000 and is_shallow(value):
                    group.corpus.append(value)

    def _stranger(self) -> int:
        """Somebody registers with what almost makes sense, or gives an order; the answer comes."""
        rng = self._rng
        self._strangers += 1
        stranger = FuzzRank(self._daemon, f"stranger{self._strangers % 3}", 0, 1)
        stranger.connect()
        assert stranger.channel is not None
        orders = [
            stranger.registration(),
            messages.StatusRequest(protocol=limits.PROTOCOL_VERSION),
            messages.ClearRequest(protocol=limits.PROTOCOL_VERSION),
        ]
        template = plain(rng.choices(orders, [10, 1, 1])[0])
        data = self._mutator.message(template, [template])
        fds = list(stranger.fds)
        if rng.random() < 0.1:
            rng.shuffle(fds)
            fds = fds[: rng.randrange(4)]
        said = 1
        frame = codec.frame(data, len(fds))
        with contextlib.suppress(OSError):
            socket.send_fds(_socket_of(stranger.channel), [frame], fds)
        with contextlib.suppress(ChannelClosed, ProtocolError):
            answer = stranger.answer()
            if isinstance(answer, messages.Welcome):
                group = FuzzGroup.__new__(FuzzGroup)
                group.__dict__.update(
                    _rng=rng,
                    _mutator=self._mutator,
                    _sayings=self._groups[0]._sayings,
                    corpus=[],
                    ranks=[stranger],
                )
                for _ in range(10):
                    said += len(group.step())
                    self._daemon.turn()
                    stranger.hear()
        stranger.close()
        self._daemon.turn()
        return said

    @property
    def lines(self) -> int:
        return len(self._coverage.lines)

    def close(self) -> None:
        for group in self._groups:
            group.close()
        self._honest.close()
        for _ in range(50):
            self._daemon.turn()
        assert not self._daemon.state.sessions
        assert self._daemon.operations
        self._daemon.close()


def _socket_of(channel: Channel[Any]) -> socket.socket:
    return socket.socket(fileno=os.dup(channel.fileno()))


# --- the client -------------------------------------------------------------------------------


class Client:
    """A client whose daemon does not make sense: every backup is acked once, in order, and no
    call raises."""

    TOKENS = 1

    def __init__(self, rng: random.Random, directory: Path) -> None:
        self._rng, self._mutator = rng, Mutator(rng)
        self._path = directory / "tierd.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._path))
        self._listener.listen(4)
        self._listener.setblocking(False)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{self._path}.zmq")
        self._presence = SharedPresence(1 << 30)
        self._lifeline: Channel[Any] | None = None
        self._identity = b""
        self._connections = 0
        tensor = torch.zeros(64, 16, dtype=torch.uint8)
        self._client = TierClient(
            self._path,
            [DevicePool("kv", self.TOKENS, [DeviceBuffer(tensor, 0)])],
            namespace={"model": "m"},
            instance="i",
            supplies=True,
            lookup_timeout_s=0.0005,
            retry_s=0.0,
        )
        self._acked = 0
        self._offered = 0
        self._replies = [plain(m) for m in self._messages()]

    def _messages(self) -> list[messages.Message]:
        first = max(0, self._offered - 3)
        return [
            messages.Acks(first_seq=first, results=b"\1\0\1"),
            messages.Acks(first_seq=self._acked, results=b"\1" * 5),
            messages.Need(seq=first),
            messages.LookupReply(request=1, lengths=[1, 2], lease_s=30.0),
            messages.Error(reason="no"),
        ]

    def feed(self, count: int) -> None:
        rng = self._rng
        for number in range(count):
            if not self._client.connected:
                self._accept()
            template = plain(rng.choice(self._messages()))
            data = msgspec.msgpack.encode(template)
            if rng.random() < 0.3:
                data = self._mutator.message(template, self._replies)
            self._router.send_multipart([self._identity, data])
            if rng.random() < 0.02 and self._lifeline is not None:
                self._say_on_the_lifeline()
            self._step(number)

    def _step(self, number: int) -> None:
        rng = self._rng
        keys = bytes([number % 256]) * 32
        if rng.random() < 0.5:
            page = rng.randrange(64)
            self._client.backup([PoolPages("kv", keys, torch.tensor([page]))], parent=b"")
            self._offered += 1
        self._client.flush()
        for need in self._client.needs():
            self._client.supply(need.seq, [])
        for ack in self._client.acks():
            assert ack.seq == self._acked, "each once, in order"
            self._acked += 1
        if rng.random() < 0.001:
            self._client.lookup("r", keys)
        while self._router.poll(0):
            self._router.recv_multipart()

    def _accept(self) -> None:
        """Let the client in (again)."""
        for _ in range(10000):
            self._client.flush()
            for ack in self._client.acks():
                assert ack.seq == self._acked, "each once, in order"
                self._acked += 1
            if self._client.connected:
                return
            with contextlib.suppress(BlockingIOError):
                sock, _ = self._listener.accept()
                if self._lifeline is not None:
                    self._lifeline.close()
                self._lifeline = Channel(sock, codec.FROM_LIFELINE)
                for _, fds in self._lifeline.wait(5.0):
                    close_all(fds)
                self._connections += 1
                self._identity = struct.pack("<QQ", self._connections, 1)
                me = os.pidfd_open(os.getpid())
                welcome = messages.Welcome(
                    protocol=1, software="", routing_id=self._identity, lease_s=30.0
                )
                self._lifeline.send(welcome, [me, me, self._presence.fd])
                os.close(me)
        raise AssertionError("the client does not connect again")

    def _say_on_the_lifeline(self) -> None:
        assert self._lifeline is not None
        replies = [
            messages.CopierReplaced(),
            messages.Refused(reason="no", protocol=1),
            messages.Done(detail={}),
        ]
        data = self._mutator.message(plain(self._rng.choice(replies)))
        with contextlib.suppress(OSError), _socket_of(self._lifeline) as sock:
            sock.send(codec.frame(data, 0), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        self._client.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._listener.close()
        self._context.destroy(linger=0)
        self._presence.close()


TARGETS: dict[str, tuple[type[Any], int, float]] = {
    "decoders": (Decoders, 10_000, 0.70),
    "framing": (Framing, 500, 0.05),
    "config": (Config, 300, 0.02),
    "geometry": (Geometry, 300, 0.08),
    "client": (Client, 500, 0.05),
    "daemon": (Daemon, 2_000, 0.10),
}
"""By name: the target, messages of a short run, and its part of a long one."""
