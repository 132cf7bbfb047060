"""Bytes that become messages, frames or settings, each kind as a target (`fuzz_targets`)."""

from __future__ import annotations

import os
import random
import socket
import struct
from pathlib import Path
from typing import Any

import fuzz_ranks
from descriptors import open_descriptors, opened_since
from flushes import Row, columns
from fuzz_ranks import plain
from mutation import TEXTS, Mutator
from reached import Coverage

from tierd.channel import Channel, ChannelClosed, close_all
from tierd.config import parse_toml, resolve
from tierd.memory.limits import Available
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ConfigError, ProtocolError
from tierd.wire.geometry import CHUNK_BYTES
from tierd.wire.messages import Allocation


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
    restore = messages.Restore(
        epoch="",
        number=1,
        entry=0,
        generation=1,
        ticket=1,
        fence=0,
        items=[messages.RestoreItem("r", [part])],
        keys=key,
    )
    lifeline = [
        register,
        messages.StatusRequest(protocol=1),
        messages.ClearRequest(protocol=1),
        messages.PauseRequest(protocol=1, paused=True),
        messages.Lookup(request=1, epoch="", rid="r", pools=[0], keys=key),
        messages.Cancel(rid="r"),
        restore,
    ]
    from_client = [
        messages.Flush(
            epoch="",
            ticket=1,
            fence=0,
            keys=2 * key,
            **columns([Row(0, [part], key), Row(1), Row(2, [part], b"")]),
        ),
        restore,
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
        messages.LookupReply(request=1, lengths=[1, 2], lease_s=30.0),
        messages.Error(reason="no"),
    ]
    to_client = [
        messages.Acks(first_seq=0, results=b"\1\0"),
        messages.Need(seq=0),
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
