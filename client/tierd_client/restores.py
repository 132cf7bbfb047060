"""The restores of one rank: what they are sent with, and what must hold before one may start."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tierd.wire import limits, messages
from tierd.wire.layout import RESTORE_ENTRIES, Segment
from tierd_client.device import Device
from tierd_client.leases import request_name
from tierd_client.link import Link, LinkState, ProcessHandle
from tierd_client.outbox import MAX_FLUSH_PAGES
from tierd_client.packing import Parts, Pools, grouped, key_blob, named_parts
from tierd_client.restore import FailedRestore, Restore
from tierd_client.ring import RingSpace
from tierd_client.tickets import Tickets
from tierd_client.watchdog import Watchdog


class Restores:
    """What one rank has had loaded, and what is under way.

    Args:
        device, segment, pools: The rank's.
        link: The connection to the daemon.
        watchdog: Releases waiting streams where nobody else can; None where no stream ever waits.
        tickets: Those of flushes and restores, counted together.
        verdict_timeout_s: What a verdict is waited for before its copier is ended.
        tickets_left: How many may still be taken.
        poll_link: Reads the lifeline, and reacts to what has become of it; told the time.
        abandon: Raises the fence: nothing that was asked for is wanted any more.
    """

    def __init__(
        self,
        device: Device,
        segment: Segment,
        pools: Pools,
        link: Link,
        watchdog: Watchdog | None,
        tickets: Tickets,
        *,
        verdict_timeout_s: float,
        tickets_left: Callable[[], int],
        poll_link: Callable[[float], None],
        abandon: Callable[[], None],
    ) -> None:
        self.watchdog = watchdog
        self._device = device
        self._segment = segment
        self._pools = pools
        self._link = link
        self.verdict_timeout_s = verdict_timeout_s
        self._tickets = tickets
        self._tickets_left = tickets_left
        self._poll_link = poll_link
        self._abandon = abandon
        self._number = 0
        self._ring = RingSpace(segment.spec.restore_ring)
        # By entry of the segment, the last restore that has used it.
        self._entries: list[Restore | None] = [None] * RESTORE_ENTRIES
        self._rids: list[frozenset[str]] = [frozenset()] * RESTORE_ENTRIES
        self._watched: ProcessHandle | None = None

    @property
    def tickets(self) -> list[int]:
        """Those whose ready words may still be looked at."""
        return [r.ticket for r in self._entries if r is not None and not r.finished]

    def start(
        self, rids: Sequence[str], parts: Parts, counts: Sequence[int], epoch: str
    ) -> Restore:
        """Start a step's loads, as one message with one verdict.

        Args:
            rids: The requests.
            parts: The leading pages of their chains, and the free slots for them.
            counts: How many of the parts are each request's: the next ones.
            epoch: The one that the rank is in.

        Returns: the restore, which has failed already if it cannot start now.
        """
        self._number += 1
        used = [restore is not None and not restore.over for restore in self._entries]
        entry = used.index(False) if False in used else None
        ring = self._ring
        ring.free_up_to(int(self._segment.consumed[1]))
        if not any(used):
            # Also of restores that no copier was told of, whose ring it has not given back.
            ring.free_all()
        *positions, end = parts.ring_positions(ring.head)
        named = grouped(named_parts(parts, positions), counts)
        items = list(map(messages.RestoreItem, map(request_name, rids), named))
        copier = self._link.copier
        if (
            self._link.state is not LinkState.UP
            or copier is None
            or entry is None
            or end == ring.head
            or end - ring.head > ring.room()
            or sum(parts.pages) > MAX_FLUSH_PAGES
            or len(items) > limits.MAX_ITEMS_PER_RESTORE
            or not self.may_start()
            or not self._tickets_left()
        ):
            return FailedRestore()
        generation = self._number % 2**32 or 2**31
        ticket = self._tickets.take()
        self._segment.awaited[entry] = generation
        message = messages.Restore(
            epoch=epoch,
            number=self._number,
            entry=entry,
            generation=generation,
            ticket=ticket,
            fence=int(self._segment.fence[0]),
            items=items,
            keys=key_blob(parts),
        )
        if not self._link.restore(message):
            self._segment.release(entry)
            return FailedRestore()
        # After the message: it is on its way while the device gets its work.
        self._device.write_slots("restore", ring.head, parts.slots)
        self._device.mark_ready(ticket)
        ring.head = end
        connection = self._link.connection
        restore = Restore(
            device=self._device,
            segment=self._segment,
            entry=entry,
            generation=generation,
            ticket=ticket,
            copier=copier,
            daemon_lost=lambda: self._daemon_lost(connection),
            abandon=self._abandon,
            timeout_s=self.verdict_timeout_s,
        )
        self._entries[entry], self._rids[entry] = restore, frozenset(rids)
        return restore

    def is_loading(self, rid: str) -> bool:
        """Has a restore of this request no verdict yet?"""
        return any(
            restore is not None and rid in rids and not restore.settled
            for restore, rids in zip(self._entries, self._rids, strict=True)
        )

    def may_start(self) -> bool:
        """Would every waiting stream be released, whoever dies? Never waits."""
        self.watch()
        if self.watchdog is None or self.watchdog.armed():
            return True
        if self.watchdog.is_dead():
            self._watched = None  # the next call has another one started
        return False

    def watch(self) -> None:
        """Have the watchdog look at the daemon's processes that are there now."""
        control, copier = self._link.control, self._link.copier
        if (
            self.watchdog
            and control
            and copier
            and copier is not self._watched
            and self.watchdog.watch(control.pidfd, copier.pidfd)
        ):
            self._watched = copier

    def connected(self) -> None:
        """There is another daemon, which reads nothing of what was written to the ring before."""
        self.watch()
        self._ring.free_all()

    def finish(self) -> None:
        """Wait until none of them writes any more.

        Raises: WritesCannotBeStoppedError: as `Restore.finish`.
        """
        for restore in list(self._entries):
            if restore is not None:
                restore.finish()

    def close(self) -> None:
        """None is to start any more, and nothing is watched."""
        self._watched = None

    def _daemon_lost(self, connection: int) -> bool:
        """Look at the lifeline: is the daemon that was told of a restore gone, even if there is
        another one by now?"""
        self._poll_link(time.monotonic())
        return self._link.state is not LinkState.UP or self._link.connection != connection
