"""Lifelines: who comes in, what is said there (registrations, lookups, restores, admin commands),
and who is gone."""

from __future__ import annotations

import contextlib
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tierd.channel import Channel, ChannelClosed, close_all
from tierd.control.backups import STEP_PAGES
from tierd.control.groups import Session
from tierd.control.members import Members, refused
from tierd.control.restore_desk import RestoreDesk
from tierd.control.state import State
from tierd.wire import messages
from tierd.wire.errors import OutOfStepError, ProtocolError, TierdError

log = logging.getLogger("tierd.control")


MESSAGES_A_TURN, MESSAGES_A_LOOK = 64, 16
"""Of one lifeline, that are handled before anything else gets a turn."""


@dataclass(eq=False)
class Connection:
    """One accepted lifeline: an admin command, or a rank.

    `since`: when it came. `known`: it has said something whole.
    """

    channel: Channel[messages.FromLifeline]
    fd: int
    since: float
    session: Session | None = None
    known: bool = False


class LifelineDesk:
    """All lifelines of one daemon.

    Args:
        snapshot: What `tierd status` is answered with, at a time.
    """

    def __init__(
        self,
        state: State,
        members: Members,
        restores: RestoreDesk,
        snapshot: Callable[[float], dict[str, Any]],
    ) -> None:
        self._state = state
        self._members = members
        self._restores = restores
        self._snapshot = snapshot
        self._connections: list[Connection] = []
        # All of them in one: between two steps of other work a look at each would be too dear.
        self._arrivals = select.epoll()
        self._by_fd: dict[int, Connection] = {}
        # Those that have said more than they have had a turn for.
        self._unfinished: dict[Connection, None] = {}
        # Long work that may take its time: a step of the first one a turn.
        self._chores: deque[Iterator[None]] = deque()

    def fileno(self) -> int:
        """Readable while a lifeline has something to read."""
        return self._arrivals.fileno()

    @property
    def unsent(self) -> list[int]:
        """The descriptors of those that have not taken all that they are told."""
        return [c.fd for c in self._connections if c.channel.wants_write]

    @property
    def waiting(self) -> bool:
        """Is there something for `receive` that no descriptor tells of?"""
        return bool(self._unfinished) or any(c.channel.closed for c in self._connections)

    def accept(self, now: float) -> None:
        """Let in whoever has connected."""
        for channel in self._state.endpoint.accept():
            fd = channel.fileno()
            connection = self._by_fd[fd] = Connection(channel, fd, now)
            self._connections.append(connection)
            self._arrivals.register(fd, select.EPOLLIN)

    def receive(self, ready: set[Any], now: float) -> None:
        """Take in what has been said, and who is gone.

        Args: `ready`: descriptors that there is something to read from, or room to write to.
        """
        for connection in self._heard() if self.fileno() in ready or self._unfinished else ():
            self._receive(connection, MESSAGES_A_TURN, now)
            if connection.channel.closed:
                self._drop(connection, now)  # before anybody else comes, who may take its place
        for connection in list(self._connections):
            if connection.fd in ready:
                with contextlib.suppress(ChannelClosed):
                    connection.channel.flush()
            if connection.channel.closed:
                self._drop(connection, now)

    def look(self, now: float) -> None:
        """Between two steps of other work: answer what ranks have asked. Nobody comes or goes."""
        for connection in self._heard():
            if connection.session is not None:
                self._receive(connection, MESSAGES_A_LOOK, now)

    def _heard(self) -> list[Connection]:
        """Those that have said something."""
        known, arrived = self._by_fd, self._arrivals.poll(0)
        if len(arrived) > 1:  # deaths come first
            arrived.sort(key=lambda arrival: arrival[1] & select.EPOLLHUP, reverse=True)
        # One that is not known has ended, and a process that is just being started still has it.
        heard = dict.fromkeys(known[fd] for fd, _ in arrived if fd in known)
        return list(heard | self._unfinished)

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
        self._by_fd.clear()
        self._unfinished.clear()
        self._arrivals.close()

    def _receive(self, connection: Connection, most: int, now: float) -> None:
        """Handle so many messages. A connection that ends is closed, and dropped by `receive`."""
        channel = connection.channel
        self._unfinished.pop(connection, None)
        try:
            for _ in range(most):
                self._receive_one(connection, now)
                if not channel.has_message:
                    return
            self._unfinished[connection] = None
        except ChannelClosed:
            pass

    def _receive_one(self, connection: Connection, now: float) -> None:
        """Raises: ChannelClosed."""
        channel, session = connection.channel, connection.session
        try:
            received = channel.next()
            if received is None:
                return
            connection.known = True
            message, fds = received
            if isinstance(message, messages.FromRank):
                close_all(fds)
                self._answer(session, message, now)
                return
            try:
                self._handle(connection, message, fds, now)
            except TierdError as error:
                close_all(fds)
                self._state.counters["errors"] += 1
                log.warning("refused: %s", error)
                channel.send(refused(error))
        except ProtocolError as error:
            if session is not None and session.welcomed and not isinstance(error, OutOfStepError):
                channel.send(self._state.complaint(session, error))
                return
            self._state.counters["errors"] += 1
            log.warning("closing a connection, whose other end is told why: %s", error)
            channel.send(refused(error))
            channel.close()

    def _answer(self, session: Session | None, message: messages.FromRank, now: float) -> None:
        """Raises: ProtocolError: naming the field, or a stranger. ChannelClosed."""
        if session is None or not session.welcomed:
            raise ProtocolError("this connection is not registered: there is nothing for it here")
        self._state.counters["messages"] += 1
        if isinstance(message, messages.Lookup):
            self._restores.lookup(session, message, now)
        elif isinstance(message, messages.Restore):
            self._restores.restore(session, message, now)
        else:
            session.group.leases.cancel(message.rid)
        self._state.presence.table.beat(time.monotonic())

    def _drop(self, connection: Connection, now: float) -> None:
        """A connection is over, and the rank behind it gone."""
        connection.channel.close()
        self._connections.remove(connection)
        self._unfinished.pop(connection, None)
        if self._by_fd.get(connection.fd) is connection:
            del self._by_fd[connection.fd]
        if connection.session is not None:
            self._members.leave(connection.session, now)

    def _handle(
        self,
        connection: Connection,
        message: messages.Register | messages.AdminRequest,
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
