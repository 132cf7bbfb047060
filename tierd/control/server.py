"""The control process: one event loop that receives, lets the pure parts decide, and carries out.

What arrives is handled in this order: deaths, leases and restores, then backups, which are only
noted on arrival and decided in slices, so that one long step of one engine holds nobody back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq

from tierd import __version__
from tierd.channel import Channel, ChannelClosed, close_all
from tierd.config import ServeConfig
from tierd.control import status
from tierd.control.backups import (
    Backup,
    Backups,
    Copy,
    NoRoomError,
    Offer,
    OfferPart,
    Sequencer,
    Writers,
    runs,
)
from tierd.control.catalog import Catalog, PagePool
from tierd.control.copiers import Copier, CopierState, Job, describe_exit
from tierd.control.endpoint import Endpoint
from tierd.control.groups import Group, Session, map_segment
from tierd.control.leases import Held, Leases, Want
from tierd.control.room import RoomKeeper
from tierd.wire import codec, limits, messages
from tierd.wire.errors import ProtocolError, TierdError
from tierd.wire.geometry import check_pools, namespace_digest, pool_layout
from tierd.wire.layout import RESTORE_ENTRIES

log = logging.getLogger("tierd.control")

LEASE_S = 30.0
LEASE_SHARE = 0.5
"""Leases never hold more than this share of a pool."""
RANKS_TIMEOUT_S = 2.0
"""How long a backup waits for the last rank's report before it is shed for all."""
ROOM_TIMEOUT_S = 5.0
"""How long a backup waits for a chunk to be pinned before it is shed: it locks GPU pages."""
RESTORE_DEADLINE_S = 20.0
"""A restore that has not retired by then costs its copier its life: only then is it safe to say
that nothing writes the pages any more."""
BACKUP_DEADLINE_S = 60.0
FLIGHT_BYTES = 4 << 30
"""Backups decided and not copied, a group: what is beyond waits undecided."""
JOB_PAGES = 2048
SLICE_S = 0.001
TICK_S = 0.02
IDLE_S = 1.0
DETACH_S = 5.0
STOP_S = 5.0


@dataclass(eq=False)
class Connection:
    """One accepted lifeline: an admin command, or a rank."""

    channel: Channel[messages.FromLifeline]
    session: Session | None = None


@dataclass
class Batch:
    """What one rank's copier will be told in this round."""

    parts: dict[int, list[tuple[int, PagePool, Copy]]]
    backups: list[Backup]
    tickets: dict[int, None]
    fence: int
    pages: int = 0


def serve(config: ServeConfig, on_ready: Callable[[], None]) -> int:
    """Run a daemon until SIGTERM or Ctrl-C. Call from the main thread.

    Args:
        config: Checked by `tierd.config`.
        on_ready: Called once, when engines can register.

    Returns: the exit status.
    Raises: ConfigError: the socket cannot be had; the text says why and what to do.
    """
    control = Control(config)
    try:
        return control.run(on_ready)
    finally:
        control.close()


class Control:
    """One daemon. Not thread-safe: everything happens in `run`."""

    def __init__(self, config: ServeConfig) -> None:
        self._started = time.monotonic()
        self._endpoint = Endpoint(config.socket)
        self._copiers = {name: Copier(name) for name in config.devices}
        self._room = RoomKeeper(config.memory_bytes, self._tell_chunk)
        self._catalogs: dict[bytes, Catalog] = {}
        self._groups: dict[str, Group] = {}
        self._sessions: dict[int, Session] = {}
        self._by_route: dict[bytes, Session] = {}
        self._connections: dict[int, Connection] = {}
        self._detaching: dict[int, tuple[Copier, float]] = {}
        self._writers = Writers()
        self._counters: Counter[str] = Counter(
            dict.fromkeys(
                (
                    "backups_kept",
                    "backups_shed",
                    "lookups",
                    "lookup_hits",
                    "restores",
                    "restores_failed",
                    "pages_evicted",
                    "errors",
                ),
                0,
            )
        )
        self._paused = False
        self._stopping: str | None = None
        self._number = 0
        self._tick = 0
        self._next_tick = 0.0
        self._pidfd = os.pidfd_open(os.getpid())
        self._wake_out, self._wake_in = socket.socketpair()

    # --- life ---------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[], None]) -> int:
        with self._signals():
            for copier in self._copiers.values():
                copier.start()
            announced = False
            while self._stopping is None:
                self._wait()
                now = time.monotonic()
                self._receive(now)
                self._decide(now)
                self._send_acks()
                if now >= self._next_tick:
                    self._next_tick = now + TICK_S
                    self._housekeep(now)
                if not announced:
                    dead = [c for c in self._copiers.values() if c.state is CopierState.DEAD]
                    if dead:
                        log.error(
                            "copier %s cannot start; its own log lines above say why",
                            dead[0].device,
                        )
                        return 1
                    if all(c.state is CopierState.READY for c in self._copiers.values()):
                        on_ready()
                        announced = True
            log.info("stopping: %s", self._stopping)
            return 0

    def close(self) -> None:
        """End every process, close every mapping, leave no file behind. Idempotent."""
        self._endpoint.close()
        for session in self._sessions.values():
            session.close()
        for connection in self._connections.values():
            connection.channel.close()
        self._sessions.clear()
        self._connections.clear()
        for copier in self._copiers.values():
            copier.send(messages.Shutdown())
        for copier in self._copiers.values():
            copier.stop(STOP_S)
        self._room.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._wake_in.close()
        self._wake_out.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(number: int, _frame: Any) -> None:
            self._stopping = signal.Signals(number).name

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

    def _wait(self) -> None:
        """Block until something arrives or is due."""
        poller = zmq.Poller()
        poller.register(self._endpoint.router, zmq.POLLIN)
        poller.register(self._endpoint.listener, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        for channel in self._channels():
            poller.register(channel, zmq.POLLIN | (zmq.POLLOUT if channel.wants_write else 0))
        busy = any(g.sequencer and g.sequencer.waiting for g in self._groups.values())
        waiting = (
            busy
            or self._detaching
            or self._room.busy
            or any(c.jobs or not c.caught_up for c in self._copiers.values())
            or any(len(g.leases) or g.leases.restoring for g in self._groups.values())
            or any(catalog.private for catalog in self._catalogs.values())
        )
        patience_s = 0.0 if self._can_decide() else TICK_S if waiting else IDLE_S
        poller.poll(int(patience_s * 1000))
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(64)

    def _can_decide(self) -> bool:
        now = time.monotonic()
        return any(
            group.sequencer is not None
            and group.sequencer.ready(now) is not None
            and not self._is_full(group)
            and not self._room.busy
            for group in self._groups.values()
        )

    def _channels(self) -> Iterator[Channel[Any]]:
        for connection in self._connections.values():
            yield connection.channel
        for copier in self._copiers.values():
            if copier.channel is not None:
                yield copier.channel

    def _receive(self, now: float) -> None:
        for copier in self._copiers.values():
            self._receive_copier(copier, now)
        for connection in list(self._connections.values()):
            self._receive_lifeline(connection, now)
        for channel in self._endpoint.accept():
            self._connections[channel.fileno()] = Connection(channel)
        for route, data in self._endpoint.receive():
            self._receive_client(route, data, now)

    def _receive_copier(self, copier: Copier, now: float) -> None:
        if copier.channel is None:
            return
        try:
            copier.channel.flush()
            for message, fds in copier.channel.receive():
                close_all(fds)
                self._on_copier(copier, message, now)
        except ChannelClosed:
            self._copier_died(copier, now)
        except ProtocolError as error:
            log.error("copier %s makes no sense (%s); starting it again", copier.device, error)
            copier.kill()

    def _receive_lifeline(self, connection: Connection, now: float) -> None:
        channel = connection.channel
        fd = channel.fileno()
        try:
            channel.flush()
            for message, fds in channel.receive():
                try:
                    self._on_lifeline(connection, message, fds, now)
                except TierdError as error:
                    close_all(fds)
                    self._counters["errors"] += 1
                    log.warning("refused: %s", error)
                    channel.send(_refused(error))
        except ProtocolError as error:
            self._counters["errors"] += 1
            log.warning("closing a connection: %s", error)
            with contextlib.suppress(ChannelClosed):
                channel.send(_refused(error))
            channel.close()
            self._drop_connection(fd, connection, now)
        except ChannelClosed:
            self._drop_connection(fd, connection, now)

    def _drop_connection(self, fd: int, connection: Connection, now: float) -> None:
        self._connections.pop(fd, None)
        if connection.session is not None:
            self._leave(connection.session, now)

    def _receive_client(self, route: bytes, data: bytes, now: float) -> None:
        session = self._by_route.get(route)
        try:
            if session is None:
                raise ProtocolError("this connection is not registered; register on the lifeline")
            message = codec.FROM_CLIENT.decode(data)
            if isinstance(message, messages.Flush):
                self._flush(session, message, now)
            elif isinstance(message, messages.Lookup):
                self._lookup(session, message, now)
            elif isinstance(message, messages.Restore):
                self._restore(session, message, now)
            elif isinstance(message, messages.Cancel):
                session.group.leases.cancel(message.rid)
            else:
                self._reset(session, message, now)
        except ProtocolError as error:
            self._counters["errors"] += 1
            who = f"rank {session.info.rank}" if session else "a stranger"
            log.warning("bad message from %s: %s", who, error)
            self._endpoint.send(route, messages.Error(reason=str(error)))

    # --- the lifeline -------------------------------------------------------------------------

    def _on_lifeline(
        self,
        connection: Connection,
        message: messages.FromLifeline,
        fds: list[int],
        now: float,
    ) -> None:
        channel = connection.channel
        if isinstance(message, messages.Register):
            self._register(connection, message, fds, now)
            return
        close_all(fds)
        if isinstance(message, messages.StatusRequest):
            channel.send(messages.Status(data=self._status(now)))
        elif isinstance(message, messages.ClearRequest):
            dropped = sum(p.clear() for c in self._catalogs.values() for p in c.pools.values())
            log.info("cleared %d pages", dropped)
            channel.send(messages.Done(detail={"pages": dropped}))
        else:
            self._paused = message.paused
            log.info("paused" if message.paused else "resumed")
            channel.send(messages.Done(detail={"paused": int(message.paused)}))

    def _status(self, now: float) -> dict[str, Any]:
        return status.snapshot(
            socket=str(self._endpoint.path),
            uptime_s=now - self._started,
            paused=self._paused,
            now=now,
            store=self._room.store,
            catalogs=self._catalogs.values(),
            groups=self._groups.values(),
            copiers=self._copiers.values(),
            counters=self._counters,
        )

    def _register(
        self, connection: Connection, info: messages.Register, fds: list[int], now: float
    ) -> None:
        if connection.session is not None:
            raise ProtocolError("this connection is registered already")
        shared = sum(not allocation.handle for allocation in info.allocations)
        if len(fds) != 2 + shared:
            raise ProtocolError(
                f"{len(fds)} descriptors; a registration with {shared} shared allocations has "
                f"{2 + shared} (segment, pidfd, allocations)"
            )
        copier = self._copier_for(info)
        check_pools(info.allocations, info.pools)
        sizes = [a.size for a in info.allocations if not a.handle]
        for number, (fd, size) in enumerate(zip(fds[2:], sizes, strict=True)):
            if os.fstat(fd).st_size < size:
                raise ProtocolError(f"allocation {number} is smaller than its `size` {size}")
        group = self._groups.get(info.instance)
        if group is None:
            group = Group(
                instance=info.instance,
                world_size=info.world_size,
                namespace=info.namespace,
                pools=info.pools,
                leases=Leases(lease_s=LEASE_S, max_share=LEASE_SHARE),
            )
        if (old := group.sessions.get(info.rank)) is not None and self._has_ended(old):
            self._drop_connection(old.channel.fileno(), self._connection_of(old), now)
        group.check_member(info)
        group.check_epoch(info.epoch)
        memory, segment = map_segment(fds[0])
        self._number += 1
        session = Session(
            number=self._number,
            channel=connection.channel,
            info=info,
            fds=fds,
            memory=memory,
            segment=segment,
            copier=copier,
            routing_id=secrets.token_bytes(16),
            since=now,
            epoch=info.epoch,
            group=group,
        )
        connection.session = session
        self._groups[info.instance] = group
        group.sessions[info.rank] = session
        self._sessions[session.number] = session
        self._catalog(group, info.epoch)
        if copier.state is CopierState.READY:
            self._attach(session)

    def _copier_for(self, info: messages.Register) -> Copier:
        """The copier of a rank's device. Devices of the host backend stand in for each other."""
        copier = self._copiers.get(info.device)
        hosts = [c for name, c in self._copiers.items() if name.startswith("host:")]
        if copier is None and info.device.startswith("host:") and hosts:
            copier = hosts[info.rank % len(hosts)]
        if copier is None:
            raise ProtocolError(
                f"`device` {info.device} is not served here; this daemon has "
                f"{', '.join(self._copiers)}. Start it with `--devices all` or name the device"
            )
        by_handle = [bool(allocation.handle) for allocation in info.allocations]
        if any(by_handle) == copier.device.startswith("host:"):
            raise ProtocolError(
                "`allocations` of a GPU have CUDA IPC handles, those of a host device have none"
            )
        return copier

    def _has_ended(self, session: Session) -> bool:
        """Did this rank's process close its end, although we have not handled that yet?"""
        try:
            return not session.channel.receive() and session.channel.closed
        except (ChannelClosed, ProtocolError):
            return True

    def _connection_of(self, session: Session) -> Connection:
        return next(c for c in self._connections.values() if c.session is session)

    def _attach(self, session: Session) -> None:
        """Have the rank's copier map its pools and the chunks that its shard lives in."""
        for catalog in session.group.catalogs.values():
            self._room.share(catalog, session.info.rank, session.copier)
        session.copier.send(
            messages.Attach(
                session=session.number,
                allocations=session.info.allocations,
                pools=session.info.pools,
                host_pools=[
                    messages.HostPool(
                        block_slots=host.block_slots,
                        chunk_slots=host.chunk_slots,
                        data_offset=host.data_offset,
                    )
                    for host in map(pool_layout, session.info.pools)
                ],
            ),
            [session.fds[0], *session.fds[2:]],
        )

    def _attached(self, session: Session, message: messages.Attached) -> None:
        info = session.info
        if message.error:
            log.error("rank %d of %s cannot be served: %s", info.rank, info.instance, message.error)
            with contextlib.suppress(ChannelClosed):
                session.channel.send(_refused(message.error))
            return
        session.attached = True
        session.paths = message.paths
        copier = session.copier
        with contextlib.suppress(ChannelClosed):
            if session.welcomed:
                session.channel.send(messages.CopierReplaced(), [copier.pidfd])
                return
            self._by_route[session.routing_id] = session
            session.welcomed = True
            session.channel.send(
                messages.Welcome(
                    protocol=limits.PROTOCOL_VERSION,
                    software=f"tierd {__version__}",
                    routing_id=session.routing_id,
                    lease_s=LEASE_S,
                ),
                [self._pidfd, copier.pidfd],
            )
        log.info(
            "rank %d of %d of engine %s registered on %s (pid %d; %s)",
            info.rank,
            info.world_size,
            info.instance,
            copier.device,
            info.pid,
            ", ".join(
                f"{p.name}: {path}" for p, path in zip(info.pools, message.paths, strict=True)
            ),
        )
        self._complete(session.group)

    def _complete(self, group: Group) -> None:
        """All ranks are here: from now on, backups are decided for the group."""
        if not group.complete or group.sequencer is not None:
            return
        first = {rank: session.info.next_seq for rank, session in group.sessions.items()}
        group.sequencer = Sequencer(first, RANKS_TIMEOUT_S)
        group.backups = Backups(
            group.world_size, self._writers, lambda seq, kept: group.acks.append((seq, kept))
        )

    def _leave(self, session: Session, now: float) -> None:
        """A rank is gone: nothing of it may be visible, held or mapped for longer than it takes
        its copier to notice."""
        group, info = session.group, session.info
        log.info("rank %d of engine %s is gone (pid %d)", info.rank, info.instance, info.pid)
        self._by_route.pop(session.routing_id, None)
        self._sessions.pop(session.number, None)
        if group.sessions.get(info.rank) is session:
            del group.sessions[info.rank]
        if group.sequencer is not None:
            for seq in group.sequencer.drop():
                group.acks.append((seq, False))
            group.sequencer = None
        group.leases.end_all()
        copier = session.copier
        if copier.state is CopierState.READY:
            self._detaching[session.number] = (copier, now + DETACH_S)
            copier.send(messages.Detach(session=session.number))
        loading = self._loading()
        for number in group.leases.unfinished(info.rank):
            if (session.number, number) not in loading:
                group.leases.retire(number, info.rank)
        session.close()
        if not group.sessions and self._groups.get(group.instance) is group:
            del self._groups[group.instance]
        self._forget_epochs(group)

    # --- epochs and catalogs ------------------------------------------------------------------

    def _catalog(self, group: Group, epoch: str) -> Catalog:
        catalog = group.catalogs.get(epoch)
        if catalog is None:
            digest = namespace_digest(group.namespace, group.world_size, group.pools, epoch)
            catalog = self._catalogs.get(digest)
            if catalog is None:
                catalog = Catalog(digest, group.world_size, private=bool(epoch))
                self._catalogs[digest] = catalog
            group.catalogs[epoch] = catalog
            for spec in group.pools:
                self._room.open_pool(catalog, spec.name, spec.page_tokens, pool_layout(spec))
        return catalog

    def _forget_epochs(self, group: Group) -> None:
        """Let go of the epochs that no rank of the group is in."""
        wanted = {session.epoch for session in group.sessions.values()}
        for epoch in [epoch for epoch in group.catalogs if epoch not in wanted]:
            del group.catalogs[epoch]

    def _reset(self, session: Session, message: messages.Reset, now: float) -> None:
        group = session.group
        group.check_epoch(message.epoch)
        if message.epoch == session.epoch:
            return
        session.epoch = message.epoch
        group.leases.end_all()
        self._catalog(group, message.epoch)
        self._forget_epochs(group)

    def _drop_private(self) -> None:
        """Give back the memory of epochs that nobody is in."""
        used = {id(c) for g in self._groups.values() for c in g.catalogs.values()}
        for digest, catalog in list(self._catalogs.items()):
            if catalog.private and id(catalog) not in used and self._room.dissolve(catalog):
                self._counters["pages_evicted"] += sum(p.evictions for p in catalog.pools.values())
                del self._catalogs[digest]

    # --- backups ------------------------------------------------------------------------------

    def _flush(self, session: Session, message: messages.Flush, now: float) -> None:
        group = session.group
        group.check_epoch(message.epoch)
        keys = codec.split_keys(message.keys)
        at = 0
        late: list[tuple[int, bool]] = []
        error: ProtocolError | None = None
        for item in message.items:
            blobs = keys[at : at + sum(part.pages for part in item.parts)]
            at += len(blobs)
            offer = None
            if not item.shed:
                try:
                    offer = _offer(session, message, item, blobs)
                except ProtocolError as bad:
                    error = bad  # this one is shed for all, the others go their way
            sequencer = group.sequencer
            if sequencer is None or not sequencer.report(session.info.rank, item.seq, offer, now):
                late.append((item.seq, False))
        for first, results in runs(late):
            self._counters["backups_shed"] += len(results)
            acks = messages.Acks(first_seq=first, results=results)
            self._endpoint.send(session.routing_id, acks)
        if error is not None:
            raise error

    def _decide(self, now: float) -> None:
        """Decide what can be decided within one slice, over all groups."""
        until = time.monotonic() + SLICE_S
        for group in list(self._groups.values()):
            if group.sequencer is None or group.backups is None:
                continue
            batches: dict[int, Batch] = {}
            while time.monotonic() < until:
                if not self._decide_next(group, group.sequencer, group.backups, batches, now):
                    break
            for rank, batch in batches.items():
                self._send_backup(group.sessions[rank], batch)

    def _decide_next(
        self,
        group: Group,
        sequencer: Sequencer,
        backups: Backups,
        batches: dict[int, Batch],
        now: float,
    ) -> bool:
        """Decide one backup; False: none can be decided now."""
        ready = sequencer.ready(now)
        if ready is None or (ready[1] is not None and self._is_full(group)):
            return False
        seq, offers = ready
        epochs = {session.epoch for session in group.sessions.values()}
        if (
            offers is None
            or self._paused
            or not group.serving
            or {offer.epoch for offer in offers.values()} != epochs
        ):
            sequencer.decided(seq)
            backups.shed(seq)
            return True
        offer = offers[min(offers)]
        catalog = self._catalog(group, offer.epoch)
        pools = [catalog.pools[part.pool] for part in offer.parts]
        self._tick += 1
        try:
            backup, copies = backups.decide(seq, offer, pools, self._tick)
        except NoRoomError as lack:
            made = self._room.make_room(catalog, lack.pool, lack.missing, self._sharers(catalog))
            if made is None and sequencer.oldest_s(now) < ROOM_TIMEOUT_S:
                return False
            if not made:
                sequencer.decided(seq)
                backups.shed(seq)
            return True
        sequencer.decided(seq)
        for rank, mine in offers.items():
            session = group.sessions[rank]
            batch = batches.setdefault(rank, Batch({}, [], {}, mine.fence))
            if batch.pages >= JOB_PAGES or batch.fence != mine.fence:
                self._send_backup(session, batch)
                batch = batches[rank] = Batch({}, [], {}, mine.fence)
            session.consumed[0] = max(session.consumed[0], mine.ring_end)
            batch.tickets[mine.ticket] = None
            if copies:
                batch.backups.append(backup)
            for copy in copies:
                part = mine.parts[copy.part]
                index = session.pool_index(part.pool)
                batch.parts.setdefault(index, []).append((part.ring, copy.pool, copy))
                batch.pages += len(copy.pages)
        return True

    def _is_full(self, group: Group) -> bool:
        """Is so much on its way to the copiers that more must wait?"""
        if group.backups is None:
            return False
        slot_bytes = sum(b.row_bytes for pool in group.pools for b in pool.buffers)
        return group.backups.pages_in_flight * slot_bytes > FLIGHT_BYTES

    def _sharers(self, catalog: Catalog) -> list[tuple[int, Copier]]:
        """(shard, copier) of every rank that uses a catalog."""
        return [
            (session.info.rank, session.copier)
            for session in self._sessions.values()
            if catalog in session.group.catalogs.values()
        ]

    def _send_backup(self, session: Session, batch: Batch) -> None:
        parts = []
        for index, copies in batch.parts.items():
            ring = [np.uint64(start) + c.pages.astype(np.uint64) for start, _, c in copies]
            slots = np.concatenate([copy.slots for _, _, copy in copies])
            pool = copies[0][1]
            chunks, within = self._room.locate(pool, slots, session.info.rank)
            parts.append(
                messages.CopyPart(
                    index, np.concatenate(ring).tobytes(), chunks.tobytes(), within.tobytes()
                )
            )

        def done(ok: bool, _lost: bool) -> None:
            for backup in batch.backups:
                backup.owner.copied(backup, ok)

        job = self._new_job(session, done, BACKUP_DEADLINE_S)
        session.copier.send(
            messages.BackupJob(
                job=job.number,
                session=session.number,
                tickets=list(batch.tickets),
                fence=batch.fence,
                consumed=session.consumed[0],
                parts=parts,
            )
        )

    def _send_acks(self) -> None:
        for group in self._groups.values():
            if not group.acks:
                continue
            acks, group.acks = sorted(group.acks), []
            kept = sum(kept for _, kept in acks)
            self._counters["backups_kept"] += kept
            self._counters["backups_shed"] += len(acks) - kept
            for first, results in runs(acks):
                for session in group.sessions.values():
                    self._endpoint.send(
                        session.routing_id, messages.Acks(first_seq=first, results=results)
                    )

    # --- lookups and restores -----------------------------------------------------------------

    def _lookup(self, session: Session, message: messages.Lookup, now: float) -> None:
        group = session.group
        lengths: list[int] = []
        if len({part.pages for part in message.parts}) != 1:
            raise ProtocolError("a lookup's `parts` must all have the same number of pages")
        group.check_epoch(message.epoch)
        if group.serving and not self._paused and message.epoch == session.epoch:
            want = self._want(session, message.epoch, message.parts, message.keys)
            signature = bytes(part.pool for part in message.parts) + message.keys
            self._tick += 1
            lengths = group.leases.lookup(message.rid, want, signature, now=now, tick=self._tick)
        self._counters["lookups"] += 1
        self._counters["lookup_hits"] += bool(lengths)
        reply = messages.LookupReply(request=message.request, lengths=lengths, lease_s=LEASE_S)
        self._endpoint.send(session.routing_id, reply)

    def _want(self, session: Session, epoch: str, parts: list[messages.Part], blob: bytes) -> Want:
        names = [_pool_name(session, part.pool) for part in parts]
        if len(set(names)) != len(names):
            raise ProtocolError(f"`parts` names a pool twice: {names}")
        catalog = self._catalog(session.group, epoch)
        keys = codec.split_keys(blob)
        want, at = [], 0
        for name, part in zip(names, parts, strict=True):
            want.append((catalog.pools[name], keys[at : at + part.pages]))
            at += part.pages
        return want

    def _restore(self, session: Session, message: messages.Restore, now: float) -> None:
        if message.entry >= RESTORE_ENTRIES:
            raise ProtocolError(f"`entry` {message.entry}; there are {RESTORE_ENTRIES}")
        rank, leases = session.info.rank, session.group.leases
        plan: list[Held] | None = None
        try:
            if session.group.serving and message.epoch == session.epoch:
                plan = self._pin(session, message, now)
            if plan is not None:
                self._send_restore(session, message, plan)
        finally:
            # Also when the message makes no sense: whoever waits for a verdict gets one.
            if plan is None:
                self._counters["restores_failed"] += 1
                session.fail_restore(message.entry, message.generation)
                leases.retire(message.number, rank)

    def _pin(self, session: Session, message: messages.Restore, now: float) -> list[Held] | None:
        """The slots of a step's loads, decided once for the group; None: it cannot be served."""
        wants, at = [], 0
        for item in message.items:
            size = sum(part.pages for part in item.parts) * limits.KEY_BYTES
            blob = message.keys[at : at + size]
            at += size
            wants.append((item.rid, self._want(session, message.epoch, item.parts, blob)))
            for part in item.parts:
                if part.pages > session.segment.spec.restore_ring:
                    raise ProtocolError(f"{part.pages} pages are more than the ring holds")
        self._tick += 1
        pins = session.group.leases.pin(
            message.number,
            wants,
            message.keys,
            set(session.group.sessions),
            deadline=now + RESTORE_DEADLINE_S,
            tick=self._tick,
        )
        if pins.signature != message.keys or session.info.rank not in pins.ranks_left:
            return None
        return pins.plan

    def _send_restore(self, session: Session, message: messages.Restore, plan: list[Held]) -> None:
        rank, group = session.info.rank, session.group
        parts = []
        for item, held in zip(message.items, plan, strict=True):
            for part, (pool, slots) in zip(item.parts, held, strict=True):
                ring = np.arange(part.ring, part.ring + part.pages, dtype=np.uint64)
                chunks, within = self._room.locate(pool, slots, rank)
                parts.append(
                    messages.CopyPart(part.pool, ring.tobytes(), chunks.tobytes(), within.tobytes())
                )
                session.consumed[1] = max(session.consumed[1], part.ring + part.pages)

        def done(ok: bool, lost: bool) -> None:
            self._counters["restores" if ok else "restores_failed"] += 1
            if lost:
                session.fail_restore(message.entry, message.generation)
            group.leases.retire(message.number, rank)

        job = self._new_job(session, done, RESTORE_DEADLINE_S, message.number)
        session.copier.send(
            messages.RestoreJob(
                job=job.number,
                session=session.number,
                ticket=message.ticket,
                fence=message.fence,
                consumed=session.consumed[1],
                entry=message.entry,
                generation=message.generation,
                parts=parts,
            )
        )

    # --- copiers ------------------------------------------------------------------------------

    def _new_job(
        self,
        session: Session,
        done: Callable[[bool, bool], None],
        deadline_s: float,
        restore: int | None = None,
    ) -> Job:
        self._number += 1
        job = Job(self._number, session.number, time.monotonic() + deadline_s, done, restore)
        session.copier.jobs[job.number] = job
        return job

    def _on_copier(self, copier: Copier, message: messages.FromCopier, now: float) -> None:
        if isinstance(message, messages.JobDone):
            job = copier.retire(message)
            if job is not None:
                if not message.ok:
                    log.warning("a copy on %s failed: %s", copier.device, message.error)
                job.done(message.ok, False)
        elif isinstance(message, messages.ChunkReady):
            copier.chunks[message.chunk] = True
            self._room.ready(copier, message.chunk, message.error)
        elif isinstance(message, messages.ChunkDropped):
            copier.chunks.pop(message.chunk, None)
            self._room.dropped(copier, message.chunk)
        elif isinstance(message, messages.CopierReady):
            copier.ready(message.detail)
            log.info("copier %s is ready (pid %d)", copier.device, copier.pid)
            for session in self._sessions.values():
                if session.copier is copier:
                    self._attach(session)
        elif isinstance(message, messages.Attached):
            joined = self._sessions.get(message.session)
            if joined is not None:
                self._attached(joined, message)
                if message.error:
                    self._drop_connection(joined.channel.fileno(), self._connection_of(joined), now)
        else:
            self._detaching.pop(message.session, None)

    def _loading(self) -> set[tuple[int, int | None]]:
        """(session, step) of every restore that a copier has been told of."""
        return {
            (job.session, job.restore)
            for copier in self._copiers.values()
            for job in copier.jobs.values()
        }

    def _copier_died(self, copier: Copier, now: float) -> None:
        status_text = describe_exit(copier.reap(now))
        log.error(
            "copier %s died (%s); its copies have failed, it is started again in %.1f s",
            copier.device,
            status_text,
            copier.restart_at - now,
        )
        jobs, copier.jobs = copier.jobs, {}
        for session in self._sessions.values():
            if session.copier is copier:
                session.attached = False
        for number, (holder, _) in list(self._detaching.items()):
            if holder is copier:
                del self._detaching[number]
        for job in jobs.values():
            job.done(False, True)
        self._room.lost(copier)

    def _tell_chunk(self, copier: Copier, message: messages.Message, fd: int | None) -> None:
        copier.send(message, [] if fd is None else [fd])

    # --- time ---------------------------------------------------------------------------------

    def _housekeep(self, now: float) -> None:
        for group in self._groups.values():
            group.leases.expire(now)
            for number, ranks in group.leases.overdue(now):
                for rank in ranks:
                    late = group.sessions.get(rank)
                    if late is None or (late.number, number) not in self._loading():
                        group.leases.retire(number, rank)
        for copier in self._copiers.values():
            if copier.state is CopierState.DEAD:
                if now >= copier.restart_at:
                    copier.start()
                continue
            stuck = any(job.kills_at <= now for job in copier.jobs.values())
            stuck = stuck or any(
                holder is copier and until <= now for holder, until in self._detaching.values()
            )
            if stuck:
                log.error(
                    "copier %s (pid %d) does not finish its copies; killing it so that nothing "
                    "is written late",
                    copier.device,
                    copier.pid,
                )
                copier.kill()
        self._drop_private()


def _pool_name(session: Session, index: int) -> str:
    pools = session.info.pools
    if index >= len(pools):
        raise ProtocolError(f"`pool` {index}; rank {session.info.rank} registered {len(pools)}")
    return pools[index].name


def _offer(
    session: Session, message: messages.Flush, item: messages.BackupItem, keys: list[bytes]
) -> Offer:
    """One backup of a flush, checked.

    Raises: ProtocolError: naming the field.
    """
    parts, at = [], 0
    for part in item.parts:
        mine = tuple(keys[at : at + part.pages])
        at += part.pages
        name = _pool_name(session, part.pool)
        if len(set(mine)) != len(mine):
            raise ProtocolError(f"seq {item.seq} has one key twice in pool {name!r}")
        if part.pages > session.segment.spec.backup_ring:
            raise ProtocolError(f"seq {item.seq} has more pages in {name!r} than the ring holds")
        parts.append(OfferPart(name, mine, part.ring))
    names = [part.pool for part in parts]
    if len(set(names)) != len(names):
        raise ProtocolError(f"seq {item.seq} names a pool twice: {names}")
    parent = item.parent if item.parent_known else None
    return Offer(message.epoch, tuple(parts), message.ticket, message.fence, parent)


def _refused(error: object) -> messages.Refused:
    return messages.Refused(reason=str(error)[:4096], protocol=limits.PROTOCOL_VERSION)
