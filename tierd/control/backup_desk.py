"""Backups on their way: noted when they arrive, decided in slices, handed to copiers, acked."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from tierd.control.backups import (
    Backup,
    Backups,
    Copy,
    NoRoomError,
    Offer,
    OfferPart,
    Sequencer,
    runs,
)
from tierd.control.catalog import Catalog
from tierd.control.groups import Group, Heal, Session
from tierd.control.ring import check_ring
from tierd.control.state import State
from tierd.wire import codec, messages
from tierd.wire.errors import ProtocolError

FLIGHT_BYTES = 4 << 30
"""Backups decided and not copied, a group: what is beyond waits undecided."""
JOB_PAGES = 2048
"""A job's size, roughly: a restore never waits behind more than a few of them."""
SLICE_S = 0.001


@dataclass
class Batch:
    """What one rank's copier will be told in one job.

    `parts`: by the rank's pool index, (ring position of the part, pages to copy).
    """

    fence: int
    parts: dict[int, list[tuple[int, Copy]]] = field(default_factory=dict)
    backups: list[Backup] = field(default_factory=list)
    tickets: dict[int, None] = field(default_factory=dict)
    consumed: int = 0
    pages: int = 0


class BackupDesk:
    """All backups of one daemon."""

    def __init__(self, state: State) -> None:
        self._state = state

    def can_decide(self) -> bool:
        """Is there one to decide right now?"""
        now = time.monotonic()
        return any(
            group.sequencer is not None
            and group.sequencer.ready(now) is not None
            and not self._is_full(group)
            and not group.waits_for_room
            for group in self._state.groups.values()
        )

    @property
    def heals(self) -> bool:
        """Does a backup wait for what comes before it?"""
        return any(group.heals for group in self._state.groups.values())

    def flush(self, session: Session, message: messages.Flush, now: float) -> None:
        """Note a step's backups. One that makes no sense is shed for all, the others go on.

        Raises: ProtocolError: naming the field.
        """
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
            if not item.shed and self._state.drain is None:
                try:
                    offer = _offer(session, message, item, blobs)
                except ProtocolError as bad:
                    error = bad  # this one is shed for all, the others go their way
            if offer is not None:
                session.ring.note(item.seq, offer.ring_end)
            sequencer = group.sequencer
            if sequencer is None or not sequencer.report(session.info.rank, item.seq, offer, now):
                late.append((item.seq, False))
                session.ring.settle(item.seq)
        for first, results in runs(late):
            self._state.counters["backups_shed"] += len(results)
            acks = messages.Acks(first_seq=first, results=results)
            self._state.endpoint.send(session.routing_id, acks)
        if error is not None:
            raise error

    def supply(self, session: Session, message: messages.Supply) -> None:
        """A rank says what comes before a backup.

        Raises: ProtocolError: naming the field; the rank has nothing to say then.
        """
        heal = session.group.heals.get(message.seq)
        if heal is None or session.info.rank in heal.offers:
            return
        try:
            item = messages.BackupItem(message.seq, False, message.parts, b"", True)
            offer = _offer(session, message, item, codec.split_keys(message.keys))
        except ProtocolError:
            self._give_up(session.group, message.seq)
            raise
        session.ring.note(_supplied(message.seq), offer.ring_end)
        heal.offers[session.info.rank] = offer

    def decide(self, now: float) -> None:
        """Decide what can be decided within one slice: one backup of each group in turn."""
        until = time.monotonic() + SLICE_S
        turns: list[tuple[Group, Sequencer, Backups, dict[int, Batch]]] = []
        for group in self._state.groups.values():
            group.waits_for_room = False
            if group.sequencer is not None and group.backups is not None:
                turns.append((group, group.sequencer, group.backups, {}))
        left = turns
        for group, _, backups, batches in turns:
            for seq in list(group.heals):
                self._decide_heal(group, seq, backups, batches, now)
        while left and time.monotonic() < until:
            left = [turn for turn in left if self._decide_next(*turn, now)]
        for group, _, _, batches in turns:
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
        if offers is None or not self._may_keep(group, offers):
            self._decided(group, sequencer, seq)
            backups.shed(seq)
            return True
        offer = offers[min(offers)]
        catalog = self._state.catalog(group, offer.epoch)
        pools = [catalog.pools[part.pool] for part in offer.parts]
        try:
            backup, copies = backups.decide(seq, offer, pools, self._state.next_tick())
        except NoRoomError as lack:
            made = self._make_room(catalog, lack)
            if made is None and sequencer.oldest_s(now) < self._state.deadlines.room_s:
                group.waits_for_room = True
                return False
            if not made:
                self._decided(group, sequencer, seq)
                backups.shed(seq)
            return True
        self._decided(group, sequencer, seq)
        if offer.parent:
            catalog.touch_boundary(offer.parent, self._state.next_tick())
            whole = [pool for pool in pools if not pool.window]
            if group.supplies and any(pool.find(offer.parent) is None for pool in whole):
                self._ask_for_prefix(group, backup, now)
        self._add(group, offers, backup, copies, batches)
        return True

    def _may_keep(self, group: Group, offers: dict[int, Offer]) -> bool:
        epochs = {session.epoch for session in group.sessions.values()}
        offered = {offer.epoch for offer in offers.values()}
        return group.serving and not self._state.paused and offered == epochs

    def _decided(self, group: Group, sequencer: Sequencer, seq: int) -> None:
        sequencer.decided(seq)
        for session in group.sessions.values():
            session.ring.settle(seq)

    def _make_room(self, catalog: Catalog, lack: NoRoomError) -> bool | None:
        sharers = self._state.sharers(catalog)
        return self._state.room.make_room(catalog, lack.pool, lack.missing, sharers)

    def _add(
        self,
        group: Group,
        offers: dict[int, Offer],
        backup: Backup,
        copies: list[Copy],
        batches: dict[int, Batch],
    ) -> None:
        """Have every rank's copier make a backup's copies."""
        for rank, mine in offers.items():
            session = group.sessions[rank]
            batch = batches.setdefault(rank, Batch(mine.fence))
            if batch.pages >= JOB_PAGES or batch.fence != mine.fence:
                self._send_backup(session, batch)
                batch = batches[rank] = Batch(mine.fence)
            batch.tickets[mine.ticket] = None
            batch.consumed = session.ring.consumed
            if copies:
                batch.backups.append(backup)
            for copy in copies:
                part = mine.parts[copy.part]
                index = session.pool_index(part.pool)
                batch.parts.setdefault(index, []).append((part.ring, copy))
                batch.pages += len(copy.pages)

    # --- holes --------------------------------------------------------------------------------

    def _ask_for_prefix(self, group: Group, backup: Backup, now: float) -> None:
        """The tier has evicted what comes before a backup, and the engine, which offers a node
        once, does not know. The backup keeps the whole path on the device until it is acked."""
        if backup.owner.await_prefix(backup):
            group.heals[backup.seq] = Heal(backup, now)
            for session in group.sessions.values():
                self._state.endpoint.send(session.routing_id, messages.Need(seq=backup.seq))

    def _decide_heal(
        self, group: Group, seq: int, backups: Backups, batches: dict[int, Batch], now: float
    ) -> None:
        heal = group.heals[seq]
        waited_s = now - heal.since
        if len(heal.offers) < group.world_size:
            if waited_s > self._state.deadlines.heal_s:
                self._give_up(group, seq)
            return
        first, *rest = (heal.offers[rank] for rank in sorted(heal.offers))
        alike = all(first.same_pages(other) for other in rest)
        if not first.parts or not alike or not self._may_keep(group, heal.offers):
            self._give_up(group, seq)
            return
        catalog = self._state.catalog(group, first.epoch)
        pools = [catalog.pools[part.pool] for part in first.parts]
        try:
            prefix, copies = backups.copy_prefix(heal.backup, first, pools, self._state.next_tick())
        except NoRoomError as lack:
            made = self._make_room(catalog, lack)
            if made is None and waited_s < self._state.deadlines.heal_s:
                group.waits_for_room = True
            elif not made:
                self._give_up(group, seq)
            return
        self._state.counters["pages_healed"] += prefix.pages
        del group.heals[seq]
        for session in group.sessions.values():
            session.ring.settle(_supplied(seq))
        self._add(group, heal.offers, prefix, copies, batches)

    def _give_up(self, group: Group, seq: int) -> None:
        """What comes before a backup stays lost; its ack waits no longer."""
        heal = group.heals.pop(seq)
        heal.backup.owner.give_up_prefix(heal.backup)
        for session in group.sessions.values():
            session.ring.settle(_supplied(seq))

    def _is_full(self, group: Group) -> bool:
        """Is so much on its way to the copiers that more must wait?"""
        if group.backups is None:
            return False
        slot_bytes = sum(b.row_bytes for pool in group.pools for b in pool.buffers)
        return group.backups.pages_in_flight * slot_bytes > FLIGHT_BYTES

    def _send_backup(self, session: Session, batch: Batch) -> None:
        parts = []
        for index, copies in batch.parts.items():
            ring = [np.uint64(start) + c.pages.astype(np.uint64) for start, c in copies]
            slots = np.concatenate([copy.slots for _, copy in copies])
            pool = copies[0][1].pool
            chunks, within = self._state.room.locate(pool, slots, session.info.rank)
            parts.append(
                messages.CopyPart(
                    index, np.concatenate(ring).tobytes(), chunks.tobytes(), within.tobytes()
                )
            )

        def done(ok: bool, _lost: bool) -> None:
            for backup in batch.backups:
                backup.owner.copied(backup, ok)

        job = self._state.new_job(session, done, self._state.deadlines.backup_s)
        session.copier.send(
            messages.BackupJob(
                job=job.number,
                session=session.number,
                tickets=list(batch.tickets),
                fence=batch.fence,
                consumed=batch.consumed,
                parts=parts,
            )
        )

    def send_acks(self) -> None:
        """Tell every rank what has been settled."""
        for group in self._state.groups.values():
            if not group.acks:
                continue
            acks, group.acks = sorted(group.acks), []
            kept = sum(kept for _, kept in acks)
            self._state.counters["backups_kept"] += kept
            self._state.counters["backups_shed"] += len(acks) - kept
            for first, results in runs(acks):
                for session in group.sessions.values():
                    self._state.endpoint.send(
                        session.routing_id, messages.Acks(first_seq=first, results=results)
                    )


def _supplied(seq: int) -> tuple[str, int]:
    """The name of a prefix's part of the ring."""
    return ("prefix", seq)


def _offer(
    session: Session,
    message: messages.Flush | messages.Supply,
    item: messages.BackupItem,
    keys: list[bytes],
) -> Offer:
    """One backup of a flush, checked.

    Raises: ProtocolError: naming the field.
    """
    parts, at = [], 0
    for part in item.parts:
        mine = tuple(keys[at : at + part.pages])
        at += part.pages
        name = session.pool_name(part.pool)
        if len(set(mine)) != len(mine):
            raise ProtocolError(f"seq {item.seq} has one key twice in pool {name!r}")
        check_ring(part, session.segment.spec.backup_ring)
        parts.append(OfferPart(name, mine, part.ring))
    names = [part.pool for part in parts]
    if len(set(names)) != len(names):
        raise ProtocolError(f"seq {item.seq} names a pool twice: {names}")
    parent = item.parent if item.parent_known else None
    return Offer(message.epoch, tuple(parts), message.ticket, message.fence, parent)
