"""Ranks come and go: registration, attachment to a copier, death, and change of epoch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets

from tierd import __version__
from tierd.channel import Channel, ChannelClosed
from tierd.control.backups import Backups
from tierd.control.copiers import Copier, CopierState
from tierd.control.groups import Group, Session, map_segment
from tierd.control.leases import Leases
from tierd.control.sequencer import Sequencer
from tierd.control.state import State
from tierd.wire import limits, messages
from tierd.wire.errors import ProtocolError
from tierd.wire.geometry import check_pools, shards

log = logging.getLogger("tierd.control")

LEASE_SHARE = 0.5
"""Leases never hold more than this share of a pool."""


MOST_TOLD = 1 << 18
"""Buffers and allocations of all ranks that share a copier. It is told all of them in one go when
it is started again, in about 80 bytes each: a channel that takes 64 MiB must not be full of it."""


class Members:
    """The sessions and groups of one daemon.

    Args:
        pidfd: Control's own, which every rank gets.
    """

    def __init__(self, state: State, pidfd: int) -> None:
        self._state = state
        self._pidfd = pidfd
        self._detaching: dict[int, tuple[Copier, float]] = {}

    @property
    def busy(self) -> bool:
        """Is a copier letting go of a dead rank's memory?"""
        return bool(self._detaching)

    def register(
        self,
        channel: Channel[messages.FromLifeline],
        info: messages.Register,
        fds: list[int],
        now: float,
    ) -> Session:
        """Let a rank in. It is told so once its copier has mapped its pools.

        Raises: ProtocolError: it cannot be served, and nothing has changed; the descriptors stay
            the caller's.
        """
        if self._state.drain is not None:
            raise ProtocolError("this daemon is ending; register with the next one")
        shared = sum(not allocation.handle for allocation in info.allocations)
        if len(fds) != 2 + shared:
            raise ProtocolError(
                f"{len(fds)} descriptors; a registration with {shared} shared allocations has "
                f"{2 + shared} (segment, pidfd, allocations)"
            )
        copier = self._copier_for(info)
        check_pools(info.allocations, info.pools)
        self._check_memory(info)
        sizes = [a.size for a in info.allocations if not a.handle]
        for number, (fd, size) in enumerate(zip(fds[2:], sizes, strict=True)):
            if os.fstat(fd).st_size < size:
                raise ProtocolError(f"allocation {number} is smaller than its `size` {size}")
        group = self._state.groups.get(info.instance)
        old = group.sessions.get(info.rank) if group is not None else None
        if old is not None and old.channel.ended:  # which we have yet to come to
            self.leave(old, now)
            group = self._state.groups.get(info.instance)
        if group is None:
            group = Group(
                instance=info.instance,
                world_size=info.world_size,
                namespace=info.namespace,
                pools=info.pools,
                leases=Leases(lease_s=self._state.deadlines.lease_s, max_share=LEASE_SHARE),
            )
        else:
            group.check_member(info)
        group.check_epoch(info.epoch)
        self._check_copier(copier, info)
        memory, segment = map_segment(fds[0])
        session = Session(
            number=self._state.next_number(),
            channel=channel,
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
        self._state.catalog(group, info.epoch)
        self._fit_presence(info)
        # Nothing from here on can fail: what a registration may say fits into an `Attach`.
        self._state.groups[info.instance] = group
        group.sessions[info.rank] = session
        self._state.sessions[session.number] = session
        if copier.state is CopierState.READY:
            self.attach(session)
        return session

    def _fit_presence(self, info: messages.Register) -> None:
        """Have a presence table that is large enough for pages as small as this rank's."""
        whole = [pool for pool in info.pools if not pool.window]
        if not whole:
            return
        page_bytes = sum(
            shards(pool, info.world_size) * self._state.layout(pool).slot_bytes for pool in whole
        )
        presence = self._state.presence
        if not presence.outgrown_by(page_bytes, len(whole)):
            return
        for catalog in self._state.catalogs.values():
            catalog.show_all()
        for session in self._state.sessions.values():
            if session.welcomed:
                with contextlib.suppress(ChannelClosed):
                    session.channel.send(messages.PresenceReplaced(), [presence.fd])

    def _check_memory(self, info: messages.Register) -> None:
        """A page is kept in all its pools or in none, so each needs a chunk at least."""
        least = sum(
            self._state.layout(pool).chunk_bytes * shards(pool, info.world_size)
            for pool in info.pools
        )
        budget = self._state.room.store.budget_bytes
        if least > budget:
            raise ProtocolError(
                f"{len(info.pools)} pools of {info.world_size} ranks need {least >> 20} MiB of "
                f"host memory at least, a chunk each; this daemon has {budget >> 20} MiB: start it "
                "with more --memory"
            )

    def _check_copier(self, copier: Copier, info: messages.Register) -> None:
        """One copier can be told so much, and no more."""
        ranks = [s.info for s in self._state.sessions.values() if s.copier is copier]
        told = sum(_told(rank) for rank in ranks)
        if told + _told(info) > MOST_TOLD:
            raise ProtocolError(
                f"{_told(info)} buffers and allocations of this rank and {told} of the others on "
                f"{copier.device} are more than the {MOST_TOLD} that a copier is told of; register "
                "fewer, larger ones"
            )

    def _copier_for(self, info: messages.Register) -> Copier:
        """The copier of a rank's device. Devices of the host backend stand in for each other."""
        copier = self._state.copiers.get(info.device)
        hosts = [c for name, c in self._state.copiers.items() if name.startswith("host:")]
        if copier is None and info.device.startswith("host:") and hosts:
            copier = hosts[info.rank % len(hosts)]
        if copier is None:
            raise ProtocolError(
                f"`device` {info.device} is not served here; this daemon has "
                f"{', '.join(self._state.copiers)}: start it with `--devices all`, or name the "
                "device"
            )
        by_handle = [bool(allocation.handle) for allocation in info.allocations]
        if any(by_handle) == copier.device.startswith("host:"):
            raise ProtocolError(
                "`allocations` of a GPU have CUDA IPC handles, those of a host device have none"
            )
        return copier

    def attach(self, session: Session) -> None:
        """Have the rank's copier map its pools and the chunks that its shard lives in."""
        session.lacks.clear()
        for catalog in session.group.catalogs.values():
            session.lacks |= self._state.room.rows.share(catalog, session.info.rank, session.copier)
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
                    for host in map(self._state.layout, session.info.pools)
                ],
            ),
            [session.fds[0], *session.fds[2:]],
        )

    def attached(self, session: Session, message: messages.Attached) -> bool:
        """A copier has mapped a rank's pools, or cannot: then the rank is told why. False: it
        cannot be served, and its connection must end."""
        info = session.info
        if message.error:
            log.error(
                "rank %d of %s cannot be served: %s. It is told so, and runs without a host tier",
                info.rank,
                info.instance,
                message.error,
            )
            with contextlib.suppress(ChannelClosed):
                session.channel.send(refused(message.error))
            return False
        session.attached = True
        session.paths = message.paths
        copier = session.copier
        with contextlib.suppress(ChannelClosed):
            if session.welcomed:
                session.channel.send(messages.CopierReplaced(), [copier.pidfd])
                return True
            self._state.by_route[session.routing_id] = session
            session.welcomed = True
            session.channel.send(
                messages.Welcome(
                    protocol=limits.PROTOCOL_VERSION,
                    software=f"tierd {__version__}",
                    routing_id=session.routing_id,
                    lease_s=self._state.deadlines.lease_s,
                ),
                [self._pidfd, copier.pidfd, self._state.presence.fd],
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
        return True

    def _complete(self, group: Group) -> None:
        """All ranks are here: from now on, backups are decided for the group."""
        if not group.complete or group.sequencer is not None:
            return
        first = {rank: session.info.next_seq for rank, session in group.sessions.items()}
        rings = [session.segment.spec.backup_ring for session in group.sessions.values()]
        group.sequencer = Sequencer(first, self._state.deadlines.ranks_s, max_pages=2 * max(rings))
        group.backups = Backups(
            group.world_size, self._state.writers, lambda seq, kept: group.acks.append((seq, kept))
        )

    def leave(self, session: Session, now: float) -> None:
        """A rank is gone: nothing of it may be visible, held or mapped for longer than it takes
        its copier to notice."""
        if self._state.sessions.pop(session.number, None) is None:
            return
        group, info = session.group, session.info
        log.info("rank %d of engine %s is gone (pid %d)", info.rank, info.instance, info.pid)
        self._state.by_route.pop(session.routing_id, None)
        if group.sessions.get(info.rank) is session:
            del group.sessions[info.rank]
        group.give_up_placing()
        if group.sequencer is not None:
            for seq in group.sequencer.drop():
                group.acks.append((seq, False))
                group.settle_ring(seq)
            group.sequencer = None
        for heal in group.heals.values():
            heal.backup.owner.give_up_prefix(heal.backup)
        group.heals.clear()
        group.leases.end_all()
        copier = session.copier
        if copier.state is CopierState.READY:
            self._detaching[session.number] = (copier, now + self._state.deadlines.detach_s)
            copier.send(messages.Detach(session=session.number))
        for number in group.leases.unfinished(info.rank):
            if not copier.is_loading(session.number, number):
                group.leases.retire(number, info.rank)
        session.close()
        if not group.sessions and self._state.groups.get(group.instance) is group:
            del self._state.groups[group.instance]
        self._state.forget_epochs(group)

    def reset(self, session: Session, message: messages.Reset) -> None:
        """A rank moves to another epoch.

        Raises: ProtocolError: one that another engine could be in, or that there is no memory for;
            the rank stays where it was.
        """
        group = session.group
        group.check_epoch(message.epoch)
        if message.epoch == session.epoch:
            return
        self._state.catalog(group, message.epoch)
        session.epoch = message.epoch
        group.leases.end_all()
        self._state.forget_epochs(group)

    def chunk_settled(self, copier: Copier, chunk: int) -> None:
        """A copier has pinned a chunk, or need not any more."""
        for session in self._state.sessions.values():
            if session.copier is copier:
                session.lacks.discard(chunk)

    def chunk_lost(self, copier: Copier, chunk: int) -> None:
        """A copier cannot pin a chunk again. Until its pages have been dropped, the engines that
        use it are not served; their leases must not keep those pages."""
        for session in self._state.sessions.values():
            if session.copier is copier and chunk in session.lacks:
                session.group.leases.end_all()

    def detached(self, session: int) -> None:
        """A copier has let go of a dead rank's memory."""
        self._detaching.pop(session, None)

    def copier_lost(self, copier: Copier) -> None:
        """A copier is dead: it maps nothing any more."""
        for session in self._state.sessions.values():
            if session.copier is copier:
                session.attached = False
        for number in [n for n, (holder, _) in self._detaching.items() if holder is copier]:
            del self._detaching[number]

    def overdue(self, now: float) -> list[Copier]:
        """Copiers that hold on to a dead rank's memory for too long."""
        return [copier for copier, until in self._detaching.values() if until <= now]


def _told(info: messages.Register) -> int:
    """What a copier is told of a rank, in buffers and allocations."""
    return len(info.allocations) + sum(len(pool.buffers) for pool in info.pools)


def refused(error: object) -> messages.Refused:
    """The refusal that a client gets; its reason is cut to what the wire carries."""
    return messages.Refused(reason=str(error)[:4096], protocol=limits.PROTOCOL_VERSION)
