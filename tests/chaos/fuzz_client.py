"""A client that is told what no daemon would say, as a target (`fuzz_targets`)."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from fuzz_ranks import PATIENCE_S, plain, socket_of
from mutation import Mutator
from tierd_client import DeviceBuffer, DevicePool, PoolPages, TierClient

from tierd.channel import Channel, close_all
from tierd.memory.presence import SharedPresence
from tierd.wire import codec, messages


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
        self._lookups = 0
        self._offered = 0
        self._replies = [plain(m) for m in self._messages()]

    def _messages(self) -> list[messages.Message]:
        first = max(0, self._offered - 3)
        return [
            messages.Acks(first_seq=first, results=b"\1\0\1"),
            messages.Acks(first_seq=self._acked, results=b"\1" * 5),
            messages.Need(seq=first),
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
            if rng.random() < 0.1 and self._lifeline is not None:
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
            self._lookups += 1
            self._client.lookup("r", keys)
            self._client.cancel("r")
        while self._router.poll(0):
            self._router.recv_multipart()

    def _accept(self) -> None:
        """Let the client in (again)."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
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
            messages.LookupReply(request=self._lookups + 1, lengths=[1, 2], lease_s=30.0),
            messages.Error(reason="no"),
            messages.CopierReplaced(),
            messages.Refused(reason="no", protocol=1),
            messages.Done(detail={}),
        ]
        data = msgspec.msgpack.encode(plain(self._rng.choice(replies[:2])))
        if self._rng.random() < 0.2:
            data = self._mutator.message(plain(self._rng.choice(replies)))
        with contextlib.suppress(OSError), socket_of(self._lifeline) as sock:
            sock.send(codec.frame(data, 0), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        self._client.close()
        if self._lifeline is not None:
            self._lifeline.close()
        self._listener.close()
        self._context.destroy(linger=0)
        self._presence.close()
