"""Lifelines: who comes in, what is said there (registrations, admin commands), and who is gone."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tierd.channel import Channel, ChannelClosed, close_all
from tierd.control.backups import STEP_PAGES
from tierd.control.groups import Session
from tierd.control.members import Members, refused
from tierd.control.state import State
from tierd.wire import messages
from tierd.wire.errors import ProtocolError, TierdError

log = logging.getLogger("tierd.control")


@dataclass(eq=False)
class Connection:
    """One accepted lifeline: an admin command, or a rank.

    `since`: when it came. `known`: it has said something whole.
    """

    channel: Channel[messages.FromLifeline]
    since: float
    session: Session | None = None
    known: bool = False


class LifelineDesk:
    """All lifelines of one daemon.

    Args:
        snapshot: What `tierd status` is answered with, at a time.
    """

    def __init__(
        self, state: State, members: Members, snapshot: Callable[[float], dict[str, Any]]
    ) -> None:
        self._state = state
        self._members = members
        self._snapshot = snapshot
        self._connections: list[Connection] = []
        # Long work that may take its time: a step of the first one a turn.
        self._chores: deque[Iterator[None]] = deque()

    @property
    def channels(self) -> list[Channel[messages.FromLifeline]]:
        """Those that are open."""
        return [c.channel for c in self._connections if not c.channel.closed]

    @property
    def closed(self) -> bool:
        """Has a connection ended that `receive` has not taken note of?"""
        return any(connection.channel.closed for connection in self._connections)

    def accept(self, now: float) -> None:
        """Let in whoever has connected."""
        for channel in self._state.endpoint.accept():
            self._connections.append(Connection(channel, now))

    def receive(self, ready: set[Any], now: float) -> None:
        """Take in what has been said, and who is gone.

        Args: `ready`: descriptors that there is something to read from, or room to write to.
        """
        for connection in list(self._connections):
            if connection.channel.closed or connection.channel.fileno() in ready:
                self._receive(connection, now)

    def work(self) -> bool:
        """Do a step of what takes long. Returns: whether there is more to do."""
        if self._chores and next(self._chores[0], self) is self:
            self._chores.popleft()
        return bool(self._chores)

    def drop_strangers(self, now: float) -> None:
        """Who connects and says nothing must not hold a descriptor for ever."""
        oldest = now - self._state.deadlines.stranger_s
        for connection in list(self._connections):
            if connection.known or connection.channel.closed or connection.since > oldest:
                continue
            log.warning(
                "closing a connection (pid %d) that has said nothing for %.0f s; whoever it is may "
                "come again",
                connection.channel.peer()[0],
                now - connection.since,
            )
            self._drop(connection, now)

    def close(self) -> None:
        """End all of them: that is how ranks learn that the daemon is gone."""
        for connection in self._connections:
            connection.channel.close()
        self._connections.clear()

    def _receive(self, connection: Connection, now: float) -> None:
        channel = connection.channel
        try:
            channel.flush()
            for message, fds in channel.receive():
                connection.known = True
                try:
                    self._handle(connection, message, fds, now)
                except TierdError as error:
                    close_all(fds)
                    self._state.counters["errors"] += 1
                    log.warning("refused: %s", error)
                    channel.send(refused(error))
        except ProtocolError as error:
            self._state.counters["errors"] += 1
            log.warning("closing a connection, whose other end is told why: %s", error)
            with contextlib.suppress(ChannelClosed):
                channel.send(refused(error))
            self._drop(connection, now)
        except ChannelClosed:
            self._drop(connection, now)

    def _drop(self, connection: Connection, now: float) -> None:
        """A connection is over, and the rank behind it gone."""
        connection.channel.close()
        self._connections.remove(connection)
        if connection.session is not None:
            self._members.leave(connection.session, now)

    def _handle(
        self,
        connection: Connection,
        message: messages.FromLifeline,
        fds: list[int],
        now: float,
    ) -> None:
        """Raises: ProtocolError: it cannot be served; the descriptors stay the caller's."""
        channel = connection.channel
        if isinstance(message, messages.Register):
            if connection.session is not None:
                raise ProtocolError("this connection is registered already")
            connection.session = self._members.register(channel, message, fds, now)
            return
        close_all(fds)
        fds.clear()  # whoever handles an error of what follows closes what is in there
        if isinstance(message, messages.StatusRequest):
            channel.send(messages.Status(data=self._snapshot(now)))
        elif isinstance(message, messages.ClearRequest):
            self._chores.append(self._clear(channel))
        else:
            self._state.paused = message.paused
            log.info(
                "paused: lookups miss and backups are shed until `tierd resume`"
                if message.paused
                else "resumed"
            )
            channel.send(messages.Done(detail={"paused": int(message.paused)}))

    def _clear(self, channel: Channel[messages.FromLifeline]) -> Iterator[None]:
        """Drop every page that nobody is loading, some at a time, and say how many there were."""
        dropped = 0
        pools = [pool for c in self._state.catalogs.values() for pool in c.pools.values()]
        for pool in pools:
            left = pool.pages  # more may come meanwhile
            while left > 0 and (gone := pool.evict(min(left, STEP_PAGES))):
                dropped += gone
                left -= gone
                yield
        log.info("cleared %d pages", dropped)
        with contextlib.suppress(ChannelClosed):
            channel.send(messages.Done(detail={"pages": dropped}))
