"""Lookups and restores: answered with leases, turned into pins, handed to copiers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierd.control.copiers import Job
from tierd.control.groups import Session
from tierd.control.keys import Keys
from tierd.control.leases import Held, Want
from tierd.control.ring import check_ring
from tierd.control.state import State
from tierd.wire import limits, messages
from tierd.wire.errors import ProtocolError
from tierd.wire.layout import RESTORE_ENTRIES


class RestoreDesk:
    """All lookups and restores of one daemon."""

    def __init__(self, state: State) -> None:
        self._state = state

    def lookup(self, session: Session, message: messages.Lookup, now: float) -> None:
        """Answer a lookup, on the lifeline that it came from.

        Raises: ProtocolError: naming the field. ChannelClosed: the rank is gone.
        """
        group = session.group
        group.check_epoch(message.epoch)
        names = [session.pool_name(index) for index in message.pools]
        if all(session.info.pools[index].window for index in message.pools):
            raise ProtocolError(f"`pools` {names} all have a window; name one without, too")

        def answer(lengths: list[int], lease_s: float) -> None:
            session.channel.send(
                messages.LookupReply(request=message.request, lengths=lengths, lease_s=lease_s)
            )

        lengths: list[int] = []
        refusing = self._state.paused or self._state.drain is not None
        if group.serving and not refusing and message.epoch == session.epoch:
            catalog = self._state.catalog(group, message.epoch)
            lengths = group.leases.lookup(
                message.rid,
                Keys(message.keys),
                [catalog.pools[name] for name in names],
                now=now,
                answer=answer,
            )
        else:
            answer(lengths, self._state.deadlines.lease_s)
        self._state.counters["lookups"] += 1
        self._state.counters["lookup_hits"] += bool(lengths)
        if lengths:
            group.leases.note_use(message.rid, self._state.next_tick())

    def restore(self, session: Session, message: messages.Restore, now: float) -> None:
        """Start a step's loads on one rank, or fail them.

        Raises: ProtocolError: naming the field; the loads have failed.
        """
        if message.entry >= RESTORE_ENTRIES:
            raise ProtocolError(f"`entry` {message.entry}; there are {RESTORE_ENTRIES}")
        rank, leases = session.info.rank, session.group.leases
        if session.copier.is_loading(session.number, message.number):
            raise ProtocolError(f"`number` {message.number}: this restore is under way already")
        plan: list[Held] | None = None
        try:
            if session.group.serving and message.epoch == session.epoch:
                plan = self._pin(session, message, now)
            if plan is not None:
                self._send_restore(session, message, plan)
                leases.note_load(message.number, self._state.next_tick())
        finally:
            # Also when the message makes no sense: whoever waits for a verdict gets one.
            if plan is None:
                self._state.counters["restores_failed"] += 1
                session.fail_restore(message.entry, message.generation)
                leases.retire(message.number, rank)

    def _pin(self, session: Session, message: messages.Restore, now: float) -> list[Held] | None:
        """The slots of a step's loads, decided once for the group; None: it cannot be served."""
        # All that must be the same on every rank, because one plan serves them all: which pages,
        # and how they are divided into requests and pools.
        shape = [[(part.pool, part.pages) for part in item.parts] for item in message.items]
        signature = shape, message.keys
        pins = session.group.leases.pin(
            message.number,
            self._wants(session, message),
            signature,
            set(session.group.sessions),
            deadline=now + self._state.deadlines.restore_s,
        )
        if pins.signature != signature or session.info.rank not in pins.ranks_left:
            return None
        return pins.plan

    def _wants(self, session: Session, message: messages.Restore) -> Sequence[tuple[str, Want]]:
        """Per request, what it loads.

        Raises: ProtocolError: naming the field.
        """
        pools = self._state.catalog(session.group, message.epoch).pools
        wants, at = [], 0
        for item in message.items:
            names = [session.pool_name(part.pool) for part in item.parts]
            if len(set(names)) != len(names):
                raise ProtocolError(f"`parts` names a pool twice: {names}")
            want = []
            for name, part in zip(names, item.parts, strict=True):
                tokens = session.info.pools[part.pool].page_tokens
                check_ring(part.pages, part.ring, tokens, session.segment.spec.restore_ring)
                end = at + part.pages * limits.KEY_BYTES
                want.append((pools[name], Keys(message.keys[at:end])))
                at = end
            wants.append((item.rid, want))
        return wants

    def _send_restore(self, session: Session, message: messages.Restore, plan: list[Held]) -> None:
        rank, group = session.info.rank, session.group
        parts = []
        for item, held in zip(message.items, plan, strict=True):
            for part, (pool, slots) in zip(item.parts, held, strict=True):
                tokens = session.info.pools[part.pool].page_tokens
                end = part.ring + part.pages * tokens
                ring = np.arange(part.ring, end, tokens, dtype=np.uint64)
                chunks, within = self._state.room.rows.locate(pool, slots, rank)
                parts.append(
                    messages.CopyPart(part.pool, ring.tobytes(), chunks.tobytes(), within.tobytes())
                )
                session.restore_ring_end = max(session.restore_ring_end, end)

        def done(ok: bool, lost: bool) -> None:
            self._state.counters["restores" if ok else "restores_failed"] += 1
            if lost:
                session.fail_restore(message.entry, message.generation)
            group.leases.retire(message.number, rank)

        job = self._state.new_job(session, done, self._state.deadlines.restore_s, message.number)
        job.held = [part for held in plan for part in held]
        session.copier.send(
            messages.RestoreJob(
                job=job.number,
                session=session.number,
                ticket=message.ticket,
                fence=message.fence,
                consumed=session.restore_ring_end,
                entry=message.entry,
                generation=message.generation,
                parts=parts,
            )
        )

    def spoiled(self, job: Job, corrupt: bytes) -> None:
        """A copier has found that pages of a restore have changed: nobody is to get them.

        Args: `corrupt`: as in `JobDone`.
        """
        for part, position in np.frombuffer(corrupt, "<u4").reshape(-1, 2).tolist():
            pool, slots = job.held[part]
            self._state.counters["pages_corrupt"] += pool.spoil(slots[position : position + 1])

    def expire(self, now: float) -> None:
        """End leases that ran out, and steps that some rank never loaded."""
        for group in self._state.groups.values():
            group.leases.expire(now)
            for number, ranks in group.leases.overdue(now):
                for rank in ranks:
                    late = group.sessions.get(rank)
                    if late is None or not late.copier.is_loading(late.number, number):
                        group.leases.retire(number, rank)
