"""The client of one rank: what an engine's scheduler thread calls.

Nothing here starts a Python thread or waits for the GPU. The calls that wait for the daemon are
`connect`, `lookup` (a bounded time, and once it failed not again for a while), and the verdict
of a restore (`Restore.finish`; `reset` and `close` ask for it too).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tierd import __version__
from tierd.meeting import check_socket, default_socket
from tierd.wire import limits, messages
from tierd.wire.geometry import namespace_digest
from tierd.wire.layout import MAX_RING, SegmentSpec
from tierd.wire.messages import PoolSpec
from tierd_client.device import open_device
from tierd_client.link import Link, LinkState
from tierd_client.lookups import Lookups
from tierd_client.outbox import MAX_FLUSH_PAGES, Ack, Batch, Need, Outbox
from tierd_client.packing import (
    Parts,
    Pools,
    key_blob,
    keys_to_send,
    named_parts,
    no_parts,
    share_keys,
)
from tierd_client.pools import DevicePool, PageKeys, PoolPages, describe
from tierd_client.restore import Restore
from tierd_client.restores import Restores
from tierd_client.segment import create_segment
from tierd_client.tickets import FOR_LOADS, FOR_RESTORES, Tickets
from tierd_client.watchdog import Watchdog

log = logging.getLogger("tierd_client")

LIFELINE_LOOK_S = 0.05
"""How often `flush` reads the lifeline: a system call that almost never has anything."""


class TierClient:
    """One rank's connection to the tier.

    All ranks of a group must make the same calls of `backup`, `restore` and `reset` in the same
    order, as ranks of a tensor-parallel group do.

    Args:
        socket: The daemon's socket; None is `tierd.meeting.default_socket()`.
        pools: The rank's KV pools, all on one device.
        namespace: Names and values of all that makes pages interchangeable between engines
            (model, weights, dtype ...), besides the pools' geometry and the world size.
        instance: One string for all ranks of the engine, unlike any other engine's.
        rank, world_size: The rank's place in its group.
        forward_stream: The stream whose kernels write the KV; None if it is the current one.
        supplies: The caller answers `needs()`, on all ranks alike.
        lookup_timeout_s: What a lookup waits at most.
        verdict_timeout_s: What a restore's verdict is waited for before its copier is ended.
        ack_timeout_s: A daemon that has not acked a backup by then is given up.
        retry_s: Pause between attempts to connect.

    Raises:
        RefusedError: pools that cannot be shared; the text says why and what to do.
        ConfigError: `socket` is no path.
        OSError, zmq.ZMQError: no memory, process or descriptor left.
        In all cases nothing is left open.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None,
        pools: Sequence[DevicePool],
        *,
        namespace: Mapping[str, str],
        instance: str,
        rank: int = 0,
        world_size: int = 1,
        forward_stream: torch.cuda.Stream | None = None,
        supplies: bool = False,
        lookup_timeout_s: float = 0.2,
        verdict_timeout_s: float = 60.0,
        ack_timeout_s: float = 60.0,
        retry_s: float = 1.0,
    ) -> None:
        self._namespace = dict(namespace)
        tensors = [buffer.tensor for pool in pools for buffer in pool.buffers]
        self._device = open_device(tensors, rank=rank, forward_stream=forward_stream)
        with contextlib.ExitStack() as open_now:
            self._exports = self._device.export(tensors)
            open_now.callback(self._exports.close)
            places = iter(self._exports.places)
            self._specs = [describe(pool, [next(places) for _ in pool.buffers]) for pool in pools]
            self._pools = Pools({pool.name: pool.page_tokens for pool in pools})
            layers = 1 + max(buffer.layer for pool in pools for buffer in pool.buffers)
            self._shared = create_segment(_segment_spec(self._specs, layers))
            open_now.callback(self._shared.close)
            self._segment = self._shared.fields
            watchdog = None if self._device.name.startswith("host:") else Watchdog(self._shared.fd)
            if watchdog is not None:
                open_now.callback(watchdog.close)
            self._device.adopt_segment(self._shared.memory, self._segment)
            open_now.callback(self._device.release_segment)
            self._pidfd = os.pidfd_open(os.getpid())
            open_now.callback(os.close, self._pidfd)
            self._link = Link(check_socket(Path(socket)) if socket else default_socket(), retry_s)
            open_now.callback(self._link.close)
            self._open = open_now.pop_all()
        self._instance = instance
        self._rank = rank
        self._world_size = world_size
        self._supplies = supplies
        self._ack_timeout_s = ack_timeout_s

        self._epoch = ""
        self._registered_epoch = ""
        self._resets = 0
        self._outbox = Outbox(self._segment.spec.backup_ring)
        self._tickets = Tickets()
        self._restores = Restores(
            self._device,
            self._segment,
            self._pools,
            self._link,
            watchdog,
            self._tickets,
            verdict_timeout_s=verdict_timeout_s,
            tickets_left=self._tickets_left,
            poll_link=self._poll_link,
            abandon=self._bump_fence,
        )
        self._lookups = Lookups(
            self._link,
            self._specs,
            lambda epoch: namespace_digest(self._namespace, world_size, self._specs, epoch),
            timeout_s=lookup_timeout_s,
            receive=self._receive,
            lost=self._lost,
            may_restore=self._may_restore,
        )
        self._next_look = 0.0
        self._said_absent = False
        self._said_refusal = ""
        self._errors = 0
        self._closed = False

    # --- connection ---------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Is there a daemon that has accepted this rank?"""
        return self._link.state is LinkState.UP

    @property
    def epoch(self) -> str:
        """The epoch that pages are kept in; empty is the one that engines share."""
        return self._epoch

    def connect(self, timeout_s: float = 5.0) -> bool:
        """Register with the daemon, waiting for its answer.

        Without a daemon the client works all the same, as if every lookup missed, and `flush`
        connects when one comes.

        Returns: whether the rank is registered. Not with a daemon of another protocol version,
            which is as good as none: in a rolling upgrade either end may come first.
        Raises: RefusedError: the daemon refuses this rank; the text says why and what to do.
        """
        deadline = time.monotonic() + timeout_s
        while not self.connected:
            now = time.monotonic()
            if self._link.state is LinkState.DOWN and not self._register(now):
                return False
            if now >= deadline:
                return False
            self._link.wait(min(0.05, deadline - now), now)
            if not self._link.other_version:
                self._link.raise_refusal()
            self._note_link()
            if self._link.other_version:
                return False
        return True

    def _register(self, now: float) -> bool:
        message = messages.Register(
            protocol=limits.PROTOCOL_VERSION,
            software=f"tierd_client {__version__}",
            instance=self._instance,
            rank=self._rank,
            world_size=self._world_size,
            namespace=self._namespace,
            epoch=self._epoch,
            device=self._device.name,
            pid=os.getpid(),
            next_seq=self._outbox.first_unsent,
            supplies=self._supplies,
            allocations=self._exports.allocations,
            pools=self._specs,
        )
        self._registered_epoch = self._epoch
        there = self._link.register(
            message, [self._shared.fd, self._pidfd, *self._exports.fds], now
        )
        if not there and not self._said_absent:
            self._said_absent = True
            log.warning(
                "no tierd daemon on %s: serving without a host tier until one comes "
                "(start it with `tierd serve`)",
                self._link.path,
            )
        return there

    def _note_link(self) -> None:
        """React to what the link has become."""
        if self.connected:
            self._said_absent, self._said_refusal = False, ""
            self._outbox.ring.free_all()
            self._restores.connected()
            self._lookups.connected()
            if self._registered_epoch != self._epoch:
                self._send_reset()  # `reset` was called while the daemon had yet to answer
            log.info("connected to the tierd daemon on %s", self._link.path)
        elif self._link.refusal not in (None, self._said_refusal):
            self._said_refusal = str(self._link.refusal)
            log.error(
                "the tierd daemon refuses this rank: %s. Serving without a host tier until it is "
                "accepted",
                self._link.refusal,
            )

    def _poll_link(self, now: float) -> None:
        was_up = self.connected
        if self._link.due(now):
            self._register(now)
        if not self._link.poll(now):
            return
        if self.connected and not was_up:
            self._note_link()
        elif self.connected:
            self._restores.watch()
        elif was_up:
            self._receive()
            self._lost("it closed the connection")
        else:
            self._note_link()

    def _lost(self, why: str) -> None:
        """The daemon is gone: nothing that it has not acked is kept. The fence goes up first."""
        self._link.drop()
        self._bump_fence()
        log.warning(
            "lost the tierd daemon on %s (%s): %d backups failed; serving without a host tier "
            "until it is back",
            self._link.path,
            why,
            self._outbox.pending,
        )
        self._outbox.fail()
        self._lookups.forget()

    def _bump_fence(self) -> None:
        self._segment.fence[0] = (int(self._segment.fence[0]) + 1) % 2**32

    # --- backup -------------------------------------------------------------------------------

    def backup(
        self,
        pages: Sequence[PoolPages],
        node_id: int | None = None,
        parent: bytes | None = None,
    ) -> int:
        """Offer pages to the tier: all of them are kept, or none. Only appends to a list.

        Args:
            pages: Per pool, the pages of one node.
            node_id: Comes back with the ack.
            parent: Key of the page before the first one: b"" if there is none, None if unknown.

        Returns: the backup's sequence number.
        Raises: ValueError: keys and slots that do not fit together.
        """
        parts = self._pools.parts_of([part for part in pages if part.keys])
        return self.backup_nodes(parts, [len(parts.pages)], [node_id], [parent])

    def backup_nodes(
        self,
        parts: Parts,
        counts: list[int],
        node_ids: Sequence[int | None],
        parents: Sequence[bytes | None],
    ) -> int:
        """`backup` for many nodes at once, by columns.

        Args:
            parts: Those of all nodes, made by `parts`.
            counts: How many of them are each node's: the next ones. 0: it is not kept.
            node_ids, parents: Of each node, as `backup` takes them.

        Returns: the first one's sequence number; the others follow.
        """
        return self._outbox.offer(share_keys(parts, counts), counts, node_ids, parents)

    def parts(self, pools: Sequence[str], keys: list[PageKeys], slots: list[torch.Tensor]) -> Parts:
        """Pages by columns, for `backup_nodes`: entry i of each list is part i, pages of one pool.

        Args:
            pools: Their pools' names.
            keys, slots: As of `PoolPages`.

        Raises: ValueError: keys and slots that do not fit together, or no such pool.
        """
        return self._pools.parts(pools, keys, slots)

    def flush(self) -> None:
        """Send what was offered since the last call, as one message, and read what has come.

        Call once a step. Never waits: what cannot be sent now is not kept, on no rank.
        """
        now = time.monotonic()
        if now >= self._next_look or self._link.state is LinkState.REGISTERING:
            self._next_look = now + LIFELINE_LOOK_S
            self._poll_link(now)
        if not self.connected:
            self._outbox.fail()
            return
        if self._outbox.awaits_answers:
            self._receive()
            if self._outbox.oldest_s(now) > self._ack_timeout_s:
                self._lost(f"no ack for {self._ack_timeout_s:.0f} s")
                return
        for batch in self._outbox.batches():
            self._send_flush(batch, now)

    def _send_flush(self, batch: Batch, now: float) -> None:
        """One Flush message. What finds no place in the ring goes as a tombstone."""
        ring = self._outbox.ring
        enough = self._tickets_left() > FOR_RESTORES
        shed, nodes = batch.split(ring.room() if enough else -1)
        *positions, end = nodes.parts.ring_positions(ring.head)
        keys = keys_to_send(nodes.parts.keys)
        if positions:
            self._device.write_slots("backup", ring.head, nodes.parts.slots)
        if nodes.seqs:  # tombstones alone must use up no ready words
            self._device.mark_ready(self._tickets.take())
        rows = nodes.with_tombstones(shed)
        message = messages.Flush(
            epoch=self._epoch,
            ticket=self._tickets.last,
            fence=int(self._segment.fence[0]),
            seqs=rows.seqs,
            parts=rows.counts,
            parents=rows.parents,
            pools=rows.parts.pools,
            pages=rows.parts.pages,
            ring=positions,
            first=nodes.parts.first,
            keys=b"" if isinstance(keys, str) else keys,
            digits=keys if isinstance(keys, str) else "",
        )
        if self._link.send(message):
            self._outbox.sent(self._tickets.last, rows.seqs[-1], end, now)
        else:
            self._outbox.not_sent(batch)

    def needs(self) -> list[Need]:
        """Backups that wait for what comes before them, since the last call. Answer each with
        `supply`; without an answer within two seconds the tier goes on with a hole."""
        return self._outbox.needs()

    def supply(self, seq: int, pages: Sequence[PoolPages]) -> None:
        """Name all pages before a backup's first one, of the pools without a window; they must
        stay as they are until its ack. Empty: they cannot be named. Never waits.

        Raises: ValueError: keys and slots that do not fit together.
        """
        given = self._pools.parts_of(pages)
        ring = self._outbox.ring
        enough = self._tickets_left() > FOR_RESTORES
        room = ring.room() if enough else 0
        if sum(given.tokens) > room or sum(given.pages) > MAX_FLUSH_PAGES:
            given = no_parts()
        *positions, end = given.ring_positions(ring.head)
        named = end > ring.head
        if named:
            self._device.write_slots("backup", ring.head, given.slots)
            self._device.mark_ready(self._tickets.take())
        message = messages.Supply(
            epoch=self._epoch,
            seq=seq,
            ticket=self._tickets.last,
            fence=int(self._segment.fence[0]),
            parts=named_parts(given, positions) if named else [],
            keys=key_blob(given),
        )
        if self._link.send(message) and named:
            self._outbox.sent(self._tickets.last, seq, end, time.monotonic())

    def acks(self) -> list[Ack]:
        """Outcomes since the last call, in sequence order, each exactly once."""
        return self._outbox.acks()

    def _receive(self) -> None:
        was_up = self.connected
        received = self._link.receive()
        if was_up and not self.connected:
            self._lost("it makes no sense")
        for message in received:
            if isinstance(message, messages.Acks):
                self._outbox.settle(message.first_seq, message.results)
            elif isinstance(message, messages.Need):
                self._outbox.need(message.seq)
            else:
                self._errors += 1
                if self._errors & (self._errors - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                    log.error(
                        "the tierd daemon made no sense of a message (number %d of those), whose "
                        "pages it does not keep: %s. Please report this",
                        self._errors,
                        message.reason,
                    )

    # --- lookup -------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: PageKeys, pools: Sequence[str] | None = None) -> list[int]:
        """At which page counts of a chain could a request resume right now?

        A hit leases the pages for the group, so that `restore` finds them on every rank. Costs
        microseconds, however long the chain is, if its first page is not there or if the request
        has a lease on it.

        Args:
            rid: The request. Its next lookup replaces this one, `cancel` and `restore` end it.
            keys: The chain's keys, each a sum over all that comes before it, too.
            pools: Those whose pages a boundary needs; None is all of the rank's.

        Returns: page counts, ascending; empty is a miss, as it is while a restore of the request
            is under way.
        """
        if not keys or not self.connected:
            return []
        return self._lookups.look_up(rid, keys, self._pools.indices(pools), self._epoch)

    def _may_restore(self, rid: str) -> bool:
        # A lookup could overtake the restore that the request has under way, which goes by ZeroMQ,
        # and would lose its lease to it.
        return (
            not self._restores.is_loading(rid)
            and self._restores.may_start()
            and self._tickets_left() > FOR_LOADS
        )

    def cancel(self, rid: str) -> None:
        """The request will not load: its lease ends."""
        self._lookups.cancel(rid)

    # --- restore ------------------------------------------------------------------------------

    def restore(self, loads: Mapping[str, Sequence[PoolPages]]) -> Restore:
        """Start a step's loads, as one message with one verdict.

        Args:
            loads: Per request, the leading pages of its chain and the free slots for them.

        Raises: ValueError: keys and slots that do not fit together.
        """
        given = self._pools.parts_of([part for pages in loads.values() for part in pages])
        for rid in loads:
            self._lookups.loading(rid)
        counts = [len(pages) for pages in loads.values()]
        return self._restores.start(list(loads), given, counts, self._epoch)

    # --- epochs and the end -------------------------------------------------------------------

    def reset(self, *, keep_pending: bool = False) -> None:
        """Leave all that was kept behind, for good: move to an epoch of this engine alone.

        Waits until no restore writes any more. What was offered and not acked is not kept.

        Args:
            keep_pending: Its acks (all failed) still come; otherwise they never do.
        """
        self._resets += 1
        self._epoch = f"{self._instance}:{self._resets}"
        self._bump_fence()
        self._restores.finish()
        if keep_pending:
            self._outbox.fail()
        else:
            self._outbox.forget()
        self._lookups.forget()
        if self.connected:
            self._send_reset()

    def _send_reset(self) -> None:
        message = messages.Reset(epoch=self._epoch, next_seq=self._outbox.next_seq)
        if not self._link.send(message):
            self._lost("its queue is full")

    def close(self) -> None:
        """Leave the daemon. Waits until no restore writes any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bump_fence()
        self._restores.finish()
        self._restores.close()
        self._open.close()
        self._outbox.fail()

    # --- inside -------------------------------------------------------------------------------

    def _tickets_left(self) -> int:
        """How many flushes and restores may still be sent before an answer comes."""
        return self._tickets.left((*self._outbox.tickets, *self._restores.tickets))


def _segment_spec(pools: Sequence[PoolSpec], layers: int) -> SegmentSpec:
    """A segment whose ring for restores has room for every token slot that the rank has: no load
    of an engine, however large, may fail for want of it."""
    slots = sum(pool.num_pages * pool.page_tokens for pool in pools)
    restore_ring = min(max(slots, SegmentSpec().restore_ring), MAX_RING)
    return SegmentSpec(restore_ring=restore_ring, max_layers=layers)
