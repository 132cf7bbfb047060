"""Backups on their way: noted, decided, handed to copiers and acked, in steps of a fraction of a
millisecond, so that one long message or one long prompt holds nobody else back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from tierd.control.backups import Backup, NoRoomError, Piece, RepeatedKeyError, copied, runs
from tierd.control.groups import Batch, Group, Heal, Placing, Session, Stripe
from tierd.control.offers import flushed, supplied
from tierd.control.sequencer import Offer
from tierd.control.sheds import Shed
from tierd.control.state import State
from tierd.wire import messages
from tierd.wire.errors import ProtocolError

FLIGHT_BYTES = 4 << 30
"""Backups decided and not copied, a group: what is beyond waits undecided."""
JOB_PAGES, JOB_BYTES = 2048, 128 << 20
"""A job's size, roughly: a restore never waits behind more than a few of them, and of large pages
the first are on the wire while the others are decided."""
GATHER_S = 0.004
"""While there is more to decide, a job grows for so long: what a copier pays for each, whatever its
size, is then a small part of it, even if small pages come more slowly than the link takes them."""
SLICE_S = 0.001
SLICE_STEPS = 8
"""Steps go on for so long, or are so many, before the loop looks at copiers and lifelines again.
What clients ask is looked for after every step."""
RETIRED_PAGES = 256
"""Pages that become visible at a time, roughly."""
NOTE_ITEMS = 16
"""Backups of a message that are noted at a time."""


class BackupDesk:
    """All backups of one daemon."""

    def __init__(self, state: State) -> None:
        self._state = state
        # Pieces of which one rank's copies have retired, and whether they went well.
        self._retired: deque[tuple[Piece, bool]] = deque()
        self._turn = 0
        # By session, what its copier is still to be told, and since when the first of them waits.
        self._batches: dict[int, Batch] = {}
        self._gathering_since = 0.0

    @property
    def heals(self) -> bool:
        """Does a backup wait for what comes before it?"""
        return any(group.heals for group in self._state.groups.values())

    # --- arrival ------------------------------------------------------------------------------

    def flush(self, session: Session, message: messages.Flush, now: float) -> None:
        """Take in a step's backups. One that makes no sense is shed for all, the others go on.

        Raises: ProtocolError: naming the field.
        """
        session.group.check_epoch(message.epoch)
        if not session.inbox.add(message):
            self._report(session, [(seq, None) for seq in message.seqs], now)

    def supply(self, session: Session, message: messages.Supply) -> None:
        """A rank says what comes before a backup."""
        session.inbox.add(message)  # a heal that finds no place is given up when its time is over

    def _note(self, session: Session, now: float) -> None:
        """Look at the next few backups that a rank has reported."""
        inbound = session.inbox.first
        message = inbound.message
        if isinstance(message, messages.Supply):
            session.inbox.pop()
            self._note_supply(session, message)
            return
        reports: list[tuple[int, Offer | None]] = []
        rows = slice(inbound.row, inbound.row + NOTE_ITEMS)
        for seq, count, parent in zip(
            message.seqs[rows], message.parts[rows], message.parents[rows], strict=True
        ):
            offer = None
            part, inbound.part = inbound.part, inbound.part + count
            if count and self._state.drain is None:
                try:
                    offer = flushed(session, message, seq, slice(part, inbound.part), parent)
                except ProtocolError as bad:  # this one is shed for all, the others go their way
                    self._state.complain(session.routing_id, bad)
            reports.append((seq, offer))
        self._report(session, reports, now)
        inbound.row += NOTE_ITEMS
        if inbound.row >= len(message.seqs):
            session.inbox.pop()

    def _report(
        self, session: Session, reports: list[tuple[int, Offer | None]], now: float
    ) -> None:
        sequencer, late = session.group.sequencer, []
        rank, ring = session.info.rank, session.ring
        for seq, offer in reports:
            if offer is not None:
                ring.note(seq, offer.ring_end)
            if sequencer is None or not sequencer.report(rank, seq, offer, now):
                late.append((seq, False))
                ring.settle(seq)
        if late:
            self._state.sheds.note(Shed.RANKS, session.group.instance, len(late))
        for first, results in runs(late):
            self._state.counters["backups_shed"] += len(results)
            acks = messages.Acks(first_seq=first, results=results)
            self._state.endpoint.send(session.routing_id, acks)

    def _note_supply(self, session: Session, message: messages.Supply) -> None:
        heal = session.group.heals.get(message.seq)
        if heal is None or session.info.rank in heal.offers:
            return
        try:
            offer = supplied(session, message)
        except ProtocolError as error:
            self._give_up_heal(session.group, message.seq)
            self._state.complain(session.routing_id, error)
            return
        session.ring.note(_supplied(message.seq), offer.ring_end)
        heal.offers[session.info.rank] = offer

    # --- work ---------------------------------------------------------------------------------

    def work(self, now: float, look: Callable[[], None]) -> bool:
        """Work for one slice: one step of each group in turn.

        Args: `look`: called after each step, to answer what cannot wait for the slice's end.
        Returns: whether there is more that need not wait for anything.
        """
        until = time.monotonic() + SLICE_S
        for _ in range(SLICE_STEPS):
            more = self.step(now)
            if not more or time.monotonic() >= until:
                break
            look()
        if not more or now - self._gathering_since >= GATHER_S:
            batches, self._batches = self._batches, {}
            for batch in batches.values():
                self._send_backup(batch)
        return more or bool(self._retired)

    def step(self, now: float) -> bool:
        """Do one thing of bounded size. False: there is nothing that can be done right now."""
        if self._retired:
            self._retire()
            return True
        groups = list(self._state.groups.values())
        for _ in groups:
            self._turn = (self._turn + 1) % len(groups)
            if self._step(groups[self._turn], now):
                return True
        return False

    def _retire(self) -> None:
        """Make some of what has been copied visible."""
        some, pages = [], 0
        while self._retired and pages < RETIRED_PAGES:
            piece, ok = self._retired.popleft()
            some.append((piece, ok))
            pages += len(piece.slots)
        copied(some)

    def _step(self, group: Group, now: float) -> bool:
        for session in group.sessions.values():
            if session.inbox:
                self._note(session, now)
                return True
        if group.placing is not None:
            objection = self._objection(group, group.placing.offers)
            if objection is not None:
                self._give_up_placing(group, group.placing, objection)
                return True
            return not self._is_full(group) and self._place(group, group.placing, now)
        begun = self._begin_heal(group, now) or self._begin_next(group, now)
        if group.placing is not None and not self._is_full(group):
            self._place(group, group.placing, now)
        return begun

    def _begin_next(self, group: Group, now: float) -> bool:
        """Begin with the next backup that every rank has reported, or shed it."""
        if group.sequencer is None or group.backups is None:
            return False
        ready = group.sequencer.ready(now)
        if ready is None:
            return False
        seq, offers = ready
        group.sequencer.decided(seq)
        objection = self._objection(group, offers)
        if offers is None or objection is not None:
            self._state.sheds.note(objection or Shed.RANKS, group.instance)
            group.settle_ring(seq)
            group.backups.shed(seq)
            return True
        offer = offers[min(offers)]
        catalog = self._state.catalog(group, offer.epoch)
        pools = [catalog.pools[part.pool] for part in offer.parts]
        placement = group.backups.begin(seq, offer, pools, self._state.next_tick())
        group.placing = Placing(placement, catalog, offers, seq)
        return True

    def _place(self, group: Group, placing: Placing, now: float) -> bool:
        """Give slots to a few more pages. False: there is no room for them yet."""
        placement, piece = placing.placement, None
        if not placement.done:
            number, _ = placement.next
            try:
                piece = placement.backup.owner.place(placement)
            except NoRoomError as lack:
                return self._make_room(group, placing, lack, now)
            except RepeatedKeyError:
                name = placement.offer.parts[number].pool
                error = ProtocolError(
                    f"seq {placement.backup.seq} has one key twice in pool {name!r}"
                )
                for session in group.sessions.values():
                    self._state.complain(session.routing_id, error)
                self._give_up_placing(group, placing, Shed.REPEATED_KEY)
                return True
            placing.lacks_since = None
            if piece is not None and placement.backup.prefix_of is not None:
                self._state.counters["pages_healed"] += len(piece.slots)
        if placement.done:
            group.settle_ring(placing.ring_name)
            group.placing = None
        self._add(group, placing.offers, piece, now)
        if placement.done:
            self._placed(group, placing, now)
        return True

    def _placed(self, group: Group, placing: Placing, now: float) -> None:
        """All pages of a backup have slots."""
        placement, catalog = placing.placement, placing.catalog
        backup, parent = placement.backup, placement.offer.parent
        if backup.prefix_of is not None or not parent:
            return
        catalog.touch_boundary(parent, self._state.next_tick())
        whole = [pool for pool in placement.pools if not pool.window]
        if group.supplies and any(pool.find(parent) is None for pool in whole):
            self._ask_for_prefix(group, backup, now)

    def _objection(self, group: Group, offers: dict[int, Offer] | None) -> Shed | None:
        """Why these pages must not be kept right now; None: they may."""
        if self._state.paused or (offers is None and self._state.drain is not None):
            return Shed.PAUSED
        if offers is None or not group.complete:
            return Shed.RANKS
        if not group.serving:
            return Shed.COPIER
        epochs = {session.epoch for session in group.sessions.values()}
        return None if epochs == {offer.epoch for offer in offers.values()} else Shed.EPOCH

    def _give_up_placing(self, group: Group, placing: Placing, reason: Shed) -> None:
        if placing.placement.backup.prefix_of is None:  # what heals one has no outcome of its own
            self._state.sheds.note(reason, group.instance)
        group.give_up_placing()

    def _make_room(self, group: Group, placing: Placing, lack: NoRoomError, now: float) -> bool:
        """Make room for the next pages, or give their backup up. False: it takes a while."""
        catalog, pool = placing.catalog, lack.pool
        sharers = self._state.sharers(catalog)
        made = self._state.room.make_room(pool, lack.missing, sharers)
        if placing.lacks_since is None:
            placing.lacks_since = now
        # Also where room is made again and again, and others have it every time.
        late = now - placing.lacks_since >= self._state.deadlines.room_s
        if made is None and not late:
            return False
        if late or not made:
            reason = Shed.NO_ROOM if made is False else Shed.LATE_ROOM
            self._give_up_placing(group, placing, reason)
        return True

    def _add(self, group: Group, offers: dict[int, Offer], piece: Piece | None, now: float) -> None:
        """Have every rank's copier make a piece's copies."""
        for rank, mine in offers.items():
            session = group.sessions[rank]
            batch = self._batches.get(session.number)
            if batch is not None and batch.fence != mine.fence:
                self._send_backup(self._batches.pop(session.number))
                batch = None
            if batch is None:
                if not self._batches:
                    self._gathering_since = now
                batch = self._batches[session.number] = Batch(session, mine.fence)
            batch.tickets[mine.ticket] = None
            batch.consumed = session.ring.consumed
            if piece is not None:
                part = mine.parts[piece.part]
                pages, slots = piece.of(rank, group.world_size)
                if len(pages):
                    ring = part.ring + pages.astype(np.uint64) * np.uint64(part.page_tokens)
                    stripe = Stripe(piece.pool, ring, slots)
                    batch.parts.setdefault(session.pool_index(part.pool), []).append(stripe)
                # Also where it has nothing to copy: no rank's pages are kept without its consent.
                batch.pieces.append(piece)
                batch.pages += len(pages)
                batch.nbytes += len(pages) * piece.pool.host.slot_bytes
            if batch.pages >= JOB_PAGES or batch.nbytes >= JOB_BYTES:
                self._send_backup(self._batches.pop(session.number))

    # --- holes --------------------------------------------------------------------------------

    def _ask_for_prefix(self, group: Group, backup: Backup, now: float) -> None:
        """The tier has evicted what comes before a backup, and the engine, which offers a node
        once, does not know. The backup keeps the whole path on the device until it is acked."""
        if backup.owner.await_prefix(backup):
            group.heals[backup.seq] = Heal(backup, now)
            for session in group.sessions.values():
                self._state.endpoint.send(session.routing_id, messages.Need(seq=backup.seq))

    def _begin_heal(self, group: Group, now: float) -> bool:
        """Begin with what comes before a backup, if every rank has named it."""
        return any(self._begin_prefix(group, seq, now) for seq in list(group.heals))

    def _begin_prefix(self, group: Group, seq: int, now: float) -> bool:
        heal = group.heals[seq]
        if len(heal.offers) < group.world_size:
            if now - heal.since > self._state.deadlines.heal_s:
                self._give_up_heal(group, seq)
            return False
        first, *rest = (heal.offers[rank] for rank in sorted(heal.offers))
        alike = all(first.same_pages(other) for other in rest)
        if not first.parts or not alike or self._objection(group, heal.offers) is not None:
            self._give_up_heal(group, seq)
            return False
        del group.heals[seq]
        catalog = self._state.catalog(group, first.epoch)
        pools = [catalog.pools[part.pool] for part in first.parts]
        backup, tick = heal.backup, self._state.next_tick()
        placement = backup.owner.begin_prefix(backup, first, pools, tick)
        group.placing = Placing(placement, catalog, heal.offers, _supplied(seq))
        return True

    def _give_up_heal(self, group: Group, seq: int) -> None:
        """What comes before a backup stays lost; its ack waits no longer."""
        heal = group.heals.pop(seq)
        heal.backup.owner.give_up_prefix(heal.backup)
        group.settle_ring(_supplied(seq))

    # --- jobs and acks ------------------------------------------------------------------------

    def _is_full(self, group: Group) -> bool:
        """Is so much on its way to the copiers that more must wait?"""
        if group.backups is None:
            return False
        return group.backups.pages_in_flight * group.page_bytes > FLIGHT_BYTES

    def _send_backup(self, batch: Batch) -> None:
        session = batch.session
        if session.number not in self._state.sessions or not session.attached:
            # Its rank or its copier has gone meanwhile: nothing of it is on any wire.
            self._retired.extend((piece, False) for piece in batch.pieces)
            return
        parts = []
        for index, stripes in batch.parts.items():
            ring = [stripe.ring for stripe in stripes]
            slots = np.concatenate([stripe.slots for stripe in stripes])
            pool = stripes[0].pool
            chunks, within = self._state.room.rows.locate(pool, slots, session.info.rank)
            parts.append(
                messages.CopyPart(
                    index, np.concatenate(ring).tobytes(), chunks.tobytes(), within.tobytes()
                )
            )

        def done(ok: bool, _lost: bool) -> None:
            self._retired.extend((piece, ok) for piece in batch.pieces)

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
