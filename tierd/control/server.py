"""The control process: one event loop that receives, lets the pure parts decide, and carries out.

What arrives is handled in this order: deaths, leases and restores, then backups, which are only
queued on arrival and worked on in steps, with a look for leases and restores after each: one long
message of one engine holds nobody back.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from tierd.config import ServeConfig
from tierd.control import status
from tierd.control.backup_desk import BackupDesk
from tierd.control.copier_desk import CopierDesk
from tierd.control.copiers import Copier, CopierState
from tierd.control.deadlines import Deadlines
from tierd.control.drain import Drain
from tierd.control.endpoint import Endpoint
from tierd.control.lifeline_desk import LifelineDesk
from tierd.control.members import Members
from tierd.control.recovery import recover
from tierd.control.restore_desk import RestoreDesk
from tierd.control.state import State
from tierd.memory.limits import format_size
from tierd.memory.persist import PersistDirectory
from tierd.wire import codec, messages
from tierd.wire.errors import ConfigError, ProtocolError

log = logging.getLogger("tierd.control")

TICK_S = 0.02
UNPINNED_BYTES_PER_S = 4 << 30
"""How fast a copier lets go of its chunks at least: a third of what was measured. The kernel, where
it has to end the process, needs longer."""
IDLE_S = 1.0
MESSAGES_A_TURN, MESSAGES_A_STEP = 256, 16
"""Of clients, that are handled before anything else gets a turn: at a turn's beginning, and after
each step of the work on backups."""
NOTIFY_S = 1.0
SLOW_S = 1.0
"""A turn of the loop that takes longer is worth a word: clients give up on a lookup by then."""
LAST_ACKS_S = 0.5
"""How long the end waits for clients to take their last acks."""
SPARE_DESCRIPTORS = 512
"""What control needs beside one descriptor a chunk: a few a rank, and its own."""
EXIT_DONE, EXIT_FAILED, EXIT_UNFINISHED = 0, 1, 4


def serve(config: ServeConfig, on_ready: Callable[[], None], notify: Callable[[str], None]) -> int:
    """Run a daemon until SIGTERM or Ctrl-C, and then until what it has accepted is finished; a
    second signal ends it at once. Call from the main thread.

    Args:
        config: Checked by `tierd.config`.
        on_ready: Called once, when engines can register.
        notify: Told that the daemon lives, and that it ends, in the words of sd_notify(3).

    Returns: the exit status: EXIT_DONE, EXIT_FAILED (a copier cannot start), EXIT_UNFINISHED.
    Raises: ConfigError: the socket, or enough descriptors, cannot be had; the text says why and
        what to do.
    """
    _raise_descriptor_limit(config)
    with contextlib.ExitStack() as stack:
        directory = None
        if config.persist is not None:
            directory = PersistDirectory(config.persist)
            stack.callback(directory.close)
            directory.check_space(config.memory_bytes)
        endpoint = Endpoint(config.socket, config.group)
        stack.callback(endpoint.close)
        patience_s = Deadlines().times(config.patience).last_s
        usable = directory is not None and directory.take_over(patience_s)
        state = State(endpoint, config, directory)
        control = Control(state, notify)
        stack.callback(control.close)
        if directory is not None and usable:
            recover(state, directory)
        return control.run(on_ready)


def _raise_descriptor_limit(config: ServeConfig) -> None:
    """A chunk costs a descriptor, and the usual soft limit of 1,024 ends at 64 GiB.

    Raises: ConfigError: the hard limit does not do either: the daemon would have none left for
        ranks once its memory is in use.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = config.memory_bytes // config.pages.chunk_bytes + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < needed:
        chunk = format_size(config.pages.chunk_bytes)
        raise ConfigError(
            f"--memory {format_size(config.memory_bytes)} takes {needed:,} file descriptors, one "
            f"for each {chunk}, and this process may have {hard:,}: raise the hard limit "
            "(`ulimit -Hn`, LimitNOFILE= in a unit, --ulimit nofile= of a container), take huge "
            "pages of 1GiB, or ask for less"
        )


class Control:
    """One daemon. Not thread-safe: everything happens in `run`, or in whoever calls `turn`.

    Args:
        state: With an endpoint that is open; control closes it.
        notify: As of `serve`.
    """

    def __init__(self, state: State, notify: Callable[[str], None] = lambda _: None) -> None:
        self._started = time.monotonic()
        self._state = state
        self._notify = notify
        self._announced = False
        self._next_notice = 0.0
        self._longest_turn_s = 0.0
        self._signals: list[str] = []
        self._pidfd = os.pidfd_open(os.getpid())
        self._members = Members(self._state, self._pidfd)
        self._backups = BackupDesk(self._state)
        self._restores = RestoreDesk(self._state)
        self._copiers = CopierDesk(self._state, self._members, self._restores)
        self._lifelines = LifelineDesk(self._state, self._members, self._restores, self._status)
        self._next_tick = 0.0
        self._wake_out, self._wake_in = socket.socketpair()

    # --- life ---------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[], None]) -> int:
        """Start the copiers and serve until told to stop; arguments and result as of `serve`."""
        with self._signal_handlers():
            for copier in self._state.copiers.values():
                copier.start(time.monotonic())
            more = False
            while True:
                ready = self._wait(0.0 if more else TICK_S if self._is_busy() else IDLE_S)
                now = time.monotonic()
                ended = self._drain(now)
                if ended is not None:
                    return ended
                more = self.turn(now, ready)
                if not self._announced:
                    dead = [c for c in self._state.copiers.values() if c.state is CopierState.DEAD]
                    if dead:
                        log.error(
                            "copier %s cannot start; its own log lines above say why",
                            dead[0].device,
                        )
                        return EXIT_FAILED
                    if not self._state.room.store.budget_bytes:
                        log.error("no host memory can be pinned; see above, and `ulimit -l`")
                        return EXIT_FAILED
                    if all(self._can_serve(copier) for copier in self._state.copiers.values()):
                        on_ready()
                        self._announced = True
                        # What has been made so far stays: a full collection would look at all
                        # of it, and hold lookups up for ten milliseconds.
                        gc.freeze()

    def _drain(self, now: float) -> int | None:
        """After a signal, the exit status once there is nothing left to wait for."""
        if not self._signals:
            return None
        if self._state.drain is None:
            limits = self._state.deadlines
            self._state.drain = Drain(now + limits.loads_s, now + limits.drain_s)
            self._notify("STOPPING=1")
            log.info(
                "%s: lookups miss from now on; finishing what is under way (%s), for %.0f s at "
                "most. Another signal ends the daemon at once",
                self._signals[0],
                self._state.drain.left(self._state.groups.values(), now) or "nothing",
                limits.drain_s,
            )
        left = self._state.drain.left(self._state.groups.values(), now)
        if not left:
            log.info("all is finished; ending")
            return EXIT_DONE
        if len(self._signals) > 1 or now >= self._state.drain.until:
            log.warning(
                "ending before all is finished (%s): engines see those as failed, and go on "
                "without a host tier",
                left,
            )
            return EXIT_UNFINISHED
        return None

    def turn(self, now: float, ready: set[Any] | None = None) -> bool:
        """Take what has arrived, work for a slice, do what is due. Never waits.

        Args: `ready`: what there is to read, as `_wait` has it; None: see for yourself.
        Returns: whether there is more to do at once.
        """
        self._state.presence.table.beat(now)
        self._receive(self._wait(0.0) if ready is None else ready, now)
        more = self._backups.work(now, lambda: self._look(now))
        self._backups.send_acks()
        more = self._lifelines.work() or more
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._housekeep(now)
        took_s = time.monotonic() - now
        self._longest_turn_s = max(self._longest_turn_s, took_s)
        if took_s > SLOW_S:
            log.warning(
                "control did not answer for %.1f s, busy or stopped: lookups missed meanwhile, "
                "nothing is lost. If this comes back, give the daemon more CPU",
                took_s,
            )
        return more

    def _can_serve(self, copier: Copier) -> bool:
        return copier.state is CopierState.READY and self._state.room.stock.can_serve(copier)

    def close(self) -> None:
        """End every process, close every mapping, leave no file behind but what is to outlive the
        daemon. Idempotent."""
        self._state.endpoint.close(LAST_ACKS_S)
        for session in self._state.sessions.values():
            session.close()
        self._lifelines.close()
        self._state.sessions.clear()
        created_bytes = self._state.room.store.created_bytes
        stop_s = self._state.deadlines.stop_s + created_bytes / UNPINNED_BYTES_PER_S
        for copier in self._state.copiers.values():
            copier.send(messages.Shutdown())
        for copier in self._state.copiers.values():
            copier.stop(stop_s)
        self._state.room.close()
        self._state.presence.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._wake_in.close()
        self._wake_out.close()

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def stop(number: int, _frame: Any) -> None:
            self._signals.append(signal.Signals(number).name)

        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(self._wake_in.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- waiting and receiving ----------------------------------------------------------------

    def _wait(self, patience_s: float) -> set[Any]:
        """Block until something arrives, or the time is up.

        Returns: the descriptors, and the router, that have something to read or room to write.
        """
        wanted: list[tuple[Any, int]] = [
            (self._state.endpoint.router, zmq.POLLIN),
            (self._state.endpoint.listener.fileno(), zmq.POLLIN),
            (self._lifelines.fileno(), zmq.POLLIN),
            (self._wake_out.fileno(), zmq.POLLIN),
        ]
        wanted += [(fd, zmq.POLLOUT) for fd in self._lifelines.unsent]
        for copier in self._state.copiers.values():
            if copier.channel is not None:
                wants = zmq.POLLIN | (zmq.POLLOUT if copier.channel.wants_write else 0)
                wanted.append((copier.channel.fileno(), wants))
            if copier.state is CopierState.ENDING:
                wanted.append((copier.pidfd, zmq.POLLIN))
        if self._lifelines.waiting:
            patience_s = 0.0
        ready = {what for what, _ in zmq.zmq_poll(wanted, int(patience_s * 1000))}
        if self._wake_out.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(64)
        return ready

    def _is_busy(self) -> bool:
        """Is anything under way that has a deadline?"""
        state = self._state
        return (
            state.drain is not None
            or self._members.busy
            or self._backups.heals
            or state.room.rows.busy
            or any(g.placing or g.undecided for g in state.groups.values())
            or any(len(g.leases) or g.leases.restoring for g in state.groups.values())
            or any(copier.jobs for copier in state.copiers.values())
            or any(copier.state is not CopierState.READY for copier in state.copiers.values())
            or bool(state.abandoned())
        )

    def _receive(self, ready: set[Any], now: float) -> None:
        endpoint = self._state.endpoint
        for copier in self._state.copiers.values():
            heard = copier.channel is not None and copier.channel.fileno() in ready
            if heard or copier.state is CopierState.ENDING:
                self._copiers.receive(copier, now)
        self._lifelines.receive(ready, now)
        if endpoint.listener.fileno() in ready:
            self._lifelines.accept(now)
        if endpoint.router in ready:
            self._receive_clients(MESSAGES_A_TURN, now)

    def _look(self, now: float) -> None:
        """Between two steps of long work: answer what clients have asked."""
        self._lifelines.look(now)
        if self._state.endpoint.heard:
            self._receive_clients(MESSAGES_A_STEP, now)

    def _receive_clients(self, most: int, now: float) -> None:
        for route, data in self._state.endpoint.receive(most):
            self._receive_client(route, data, now)

    def _receive_client(self, route: bytes, data: bytes, now: float) -> None:
        session = self._state.by_route.get(route)
        self._state.counters["messages"] += 1
        self._state.presence.table.beat(time.monotonic())
        try:
            if session is None:
                raise ProtocolError("this connection is not registered; register on the lifeline")
            message = codec.FROM_CLIENT.decode(data)
            if isinstance(message, messages.Flush):
                self._backups.flush(session, message, now)
            elif isinstance(message, messages.Restore):
                self._restores.restore(session, message, now)
            elif isinstance(message, messages.Supply):
                self._backups.supply(session, message)
            else:
                self._members.reset(session, message)
        except ProtocolError as error:
            self._state.complain(route, error)

    def _status(self, now: float) -> dict[str, Any]:
        return status.snapshot(
            socket=str(self._state.endpoint.path),
            uptime_s=now - self._started,
            paused=self._state.paused,
            draining=self._state.drain is not None,
            longest_turn_s=self._longest_turn_s,
            now=now,
            stock=self._state.room.stock,
            catalogs=self._state.catalogs.values(),
            groups=self._state.groups.values(),
            copiers=self._state.copiers.values(),
            counters=self._state.counters,
            shed=self._state.sheds.counts(),
        )

    # --- time ---------------------------------------------------------------------------------

    def _housekeep(self, now: float) -> None:
        self._restores.expire(now)
        self._copiers.tend(now)
        self._lifelines.drop_strangers(now)
        if self._announced and now >= self._next_notice:
            self._next_notice = now + NOTIFY_S
            self._notify("WATCHDOG=1")
        self._state.drop_abandoned()
        self._state.room.rebalance(now)
