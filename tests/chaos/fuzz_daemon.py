"""A daemon that is told what no client would say, as a target (`fuzz_targets`). What reaches a new
line of it is kept."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import msgspec
from fuzz_ranks import FuzzGroup, FuzzRank, HonestEngine, plain, socket_of
from mutation import Mutator, is_shallow
from one_process import OneProcess
from reached import Coverage

from tierd.channel import ChannelClosed
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ProtocolError

IMPATIENT = 0.05
"""Patience of a daemon whose deadlines pass often."""


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
                self._honest.round_trip(meanwhile=self._go_on)
            if self._said - self._settled_at >= 20000:
                self._settled_at = self._said
                self._daemon.settle()
                self._daemon.check()
        self._daemon.settle()
        self._daemon.check()
        self._honest.round_trip()

    def _go_on(self) -> None:
        """Those who do not always make sense say more, while one that does waits."""
        for group in self._groups:
            self._said += len(group.step())
            group.hear()

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
        with contextlib.suppress(OSError), socket_of(stranger.channel) as sock:
            socket.send_fds(sock, [frame], fds)
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
