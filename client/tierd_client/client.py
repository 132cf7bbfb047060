"""The client of one rank: what an engine's scheduler thread calls.

Nothing here starts a Python thread or waits for the GPU. The calls that wait for the daemon are
`connect`, `lookup` (a bounded time, and once it failed not again for a while), and the verdict
of a restore (`Restore.finish`; `reset` and `close` ask for it too).
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tierd import __version__
from tierd.config import check_socket, default_socket
from tierd.wire import limits, messages
from tierd.wire.errors import ProtocolError
from tierd.wire.geometry import namespace_digest
from tierd.wire.layout import RESTORE_ENTRIES, TICKETS, SegmentSpec
from tierd.wire.presence import Salt
from tierd_client.device import Ring, open_device
from tierd_client.link import Link, LinkState, ProcessHandle
from tierd_client.pools import DevicePool, PoolPages, describe
from tierd_client.restore import FailedRestore, Restore
from tierd_client.segment import create_segment
from tierd_client.watchdog import Watchdog

log = logging.getLogger("tierd_client")

LIFELINE_LOOK_S = 0.01
"""How often `flush` reads the lifeline: a system call that almost never has anything."""
MAX_FLUSH_PAGES = limits.MAX_PAGES_PER_MESSAGE // 2
MAX_FLUSH_ITEMS = limits.MAX_ITEMS_PER_FLUSH // 2
MAX_LEASES = 8192
LEASE_MARGIN = 0.5
"""A remembered answer is used for this share of its lease; then it is asked for again."""


class Ack(NamedTuple):
    """The outcome of one backup. `kept` false: it is not in the tier, for whatever reason."""

    seq: int
    node_id: int | None
    kept: bool


class Need(NamedTuple):
    """A backup before which the tier has lost pages that are still on the device."""

    seq: int
    node_id: int | None


@dataclass(slots=True)
class _Queued:
    seq: int
    pages: Sequence[PoolPages]
    count: int
    parent: bytes | None


class _Sent(NamedTuple):
    """A flush: its ticket, its last number, and where its page numbers end in the ring."""

    ticket: int
    last_seq: int
    ring_end: int


@dataclass(slots=True)
class _Pending:
    seq: int
    node_id: int | None
    since: float


class TierClient:
    """One rank's connection to the tier.

    All ranks of a group must make the same calls of `backup`, `restore` and `reset` in the same
    order, as ranks of a tensor-parallel group do.

    Args:
        socket: The daemon's socket; None is `tierd.config.default_socket()`.
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
        tensors = [buffer.tensor for pool in pools for buffer in pool.buffers]
        self._device = open_device(tensors, rank=rank, forward_stream=forward_stream)
        self._exports = self._device.export(tensors)
        places = iter(self._exports.places)
        self._specs = [describe(pool, [next(places) for _ in pool.buffers]) for pool in pools]
        self._index = {pool.name: i for i, pool in enumerate(pools)}
        self._page_tokens = {pool.name: pool.page_tokens for pool in pools}
        layers = 1 + max(buffer.layer for pool in pools for buffer in pool.buffers)
        self._shared = create_segment(SegmentSpec(max_layers=layers))
        self._segment = self._shared.fields
        self._device.adopt_segment(self._shared.memory, self._segment)
        self._watchdog = (
            None if self._device.name.startswith("host:") else Watchdog(self._shared.fd)
        )
        self._pidfd = os.pidfd_open(os.getpid())
        self._link = Link(check_socket(Path(socket)) if socket else default_socket(), retry_s)
        self._namespace = dict(namespace)
        self._instance = instance
        self._rank = rank
        self._world_size = world_size
        self._supplies = supplies
        self._lookup_timeout_s = lookup_timeout_s
        self._verdict_timeout_s = verdict_timeout_s
        self._ack_timeout_s = ack_timeout_s

        self._epoch = ""
        self._resets = 0
        self._next_seq = 0
        self._queued: list[_Queued] = []
        self._tombstones: list[int] = []
        self._pending: deque[_Pending] = deque()
        self._results: dict[int, bool] = {}
        self._ticket = 0
        # Flushes whose acks are not all here: their ready words and their ring are in use.
        self._sent: deque[_Sent] = deque()
        self._needs: list[int] = []
        self._head = {"backup": 0, "restore": 0}
        self._free_from = {"backup": 0, "restore": 0}
        self._request = 0
        self._salts: dict[tuple[str, int], Salt] = {}
        self._answers: dict[int, messages.LookupReply] = {}
        self._leases: dict[str, tuple[bytes, list[int], float]] = {}
        self._muted_until = 0.0
        self._mute_s = lookup_timeout_s
        self._restores = 0
        self._entries: list[Restore | None] = [None] * RESTORE_ENTRIES
        self._watched: ProcessHandle | None = None
        self._next_look = 0.0
        self._said_absent = False
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

        Returns: whether the rank is registered.
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
            self._link.raise_refusal()
            self._note_link()
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
            next_seq=self._next_seq - len(self._queued),
            supplies=self._supplies,
            allocations=self._exports.allocations,
            pools=self._specs,
        )
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
            self._said_absent = False
            self._watch()
            for ring in self._head:
                self._free_from[ring] = self._head[ring]
            log.info("connected to the tierd daemon on %s", self._link.path)
        elif self._link.refusal is not None:
            log.error("the tierd daemon refuses this rank: %s", self._link.refusal)

    def _poll_link(self, now: float) -> None:
        was_up = self.connected
        if self._link.due(now):
            self._register(now)
        if not self._link.poll(now):
            return
        if self.connected and not was_up:
            self._note_link()
        elif self.connected:
            self._watch()
        elif was_up:
            self._receive()
            self._lost("it closed the connection")
        else:
            self._note_link()

    def _watch(self) -> None:
        """Have the watchdog look at the processes that are there now."""
        control, copier = self._link.control, self._link.copier
        if self._watchdog and control and copier and copier is not self._watched:
            self._watchdog.watch(control.pidfd, copier.pidfd)
            self._watched = copier

    def _lost(self, why: str) -> None:
        """The daemon is gone: nothing that it has not acked is kept. The fence goes up first."""
        self._link.drop()
        self._bump_fence()
        log.warning(
            "lost the tierd daemon on %s (%s): %d backups failed; serving without a host tier "
            "until it is back",
            self._link.path,
            why,
            len(self._pending),
        )
        self._fail_pending()
        self._leases.clear()

    def _bump_fence(self) -> None:
        self._segment.fence[0] = (int(self._segment.fence[0]) + 1) % 2**32

    def _fail_pending(self) -> None:
        for pending in self._pending:
            self._results.setdefault(pending.seq, False)
        self._queued.clear()
        self._tombstones.clear()
        self._sent.clear()
        self._needs.clear()

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
        count = sum([self._check(part) for part in pages])
        seq = self._next_seq
        self._next_seq += 1
        self._queued.append(_Queued(seq, pages, count, parent))
        self._pending.append(_Pending(seq, node_id, 0.0))
        return seq

    def flush(self) -> None:
        """Send what was offered since the last call, as one message, and read what has come.

        Call once a step. Never waits: what cannot be sent now is not kept, on no rank.
        """
        now = time.monotonic()
        if now >= self._next_look or self._link.state is LinkState.REGISTERING:
            self._next_look = now + LIFELINE_LOOK_S
            self._poll_link(now)
        if not self.connected:
            self._fail_pending()
            return
        self._receive()
        if self._pending and 0.0 < self._pending[0].since < now - self._ack_timeout_s:
            self._lost(f"no ack for {self._ack_timeout_s:.0f} s")
            return
        if self._queued or self._tombstones:
            for pending in reversed(self._pending):
                if pending.since:
                    break
                pending.since = now
            self._send_queued()

    def _send_queued(self) -> None:
        queued, self._queued = self._queued, []
        shed, self._tombstones = self._tombstones, []
        while len(shed) > MAX_FLUSH_ITEMS:
            self._send_flush(shed[:MAX_FLUSH_ITEMS], [])
            shed = shed[MAX_FLUSH_ITEMS:]
        batch: list[_Queued] = []
        pages = 0
        for item in queued:
            if batch and (pages + item.count > MAX_FLUSH_PAGES or len(batch) >= MAX_FLUSH_ITEMS):
                self._send_flush(shed, batch)
                shed, batch, pages = [], [], 0
            batch.append(item)
            pages += item.count
        self._send_flush(shed, batch)

    def _send_flush(self, shed: list[int], batch: list[_Queued]) -> None:
        """One Flush message. What finds no place in the ring goes as a tombstone."""
        head = self._head["backup"]
        room = self._room("backup")
        tickets_left = self._ticket_is_free()
        items = [messages.BackupItem(seq, True, []) for seq in shed]
        keys: list[bytes] = []
        slots: list[torch.Tensor] = []
        tokens: list[int] = []
        for item in batch:
            if item.count > min(room, MAX_FLUSH_PAGES) or not tickets_left:
                items.append(messages.BackupItem(item.seq, True, []))
                continue
            parts = []
            for part in item.pages:
                n = len(part.keys) // limits.KEY_BYTES
                if not n:
                    continue
                parts.append(messages.Part(self._index[part.pool], n, head))
                keys.append(part.keys)
                slots.append(part.slots)
                tokens.append(self._page_tokens[part.pool])
                head += n
            room -= item.count
            items.append(
                messages.BackupItem(
                    item.seq, False, parts, item.parent or b"", item.parent is not None
                )
            )
        if slots:
            self._device.write_page_numbers("backup", self._head["backup"], slots, tokens)
        if any(not item.shed for item in items):  # tombstones alone must use up no ready words
            self._device.mark_ready(self._new_ticket())
        message = messages.Flush(
            epoch=self._epoch,
            ticket=self._ticket,
            fence=int(self._segment.fence[0]),
            items=items,
            keys=b"".join(keys),
        )
        if self._link.send(message):
            self._head["backup"] = head
            self._sent.append(_Sent(self._ticket, items[-1].seq, head))
        else:
            self._tombstones += [item.seq for item in items]

    def needs(self) -> list[Need]:
        """Backups that wait for what comes before them, since the last call. Answer each with
        `supply`; without an answer within two seconds the tier goes on with a hole."""
        if not self._needs:
            return []
        wanted, self._needs = set(self._needs), []
        return [Need(p.seq, p.node_id) for p in self._pending if p.seq in wanted]

    def supply(self, seq: int, pages: Sequence[PoolPages]) -> None:
        """Name all pages before a backup's first one, of the pools without a window; they must
        stay as they are until its ack. Empty: they cannot be named. Never waits.

        Raises: ValueError: keys and slots that do not fit together.
        """
        for part in pages:
            self._check(part)
        head = self._head["backup"]
        count = sum(len(part.keys) for part in pages) // limits.KEY_BYTES
        if count > min(self._room("backup"), MAX_FLUSH_PAGES) or not self._ticket_is_free():
            pages, count = [], 0
        parts = []
        for part in pages:
            n = len(part.keys) // limits.KEY_BYTES
            parts.append(messages.Part(self._index[part.pool], n, head))
            head += n
        if count:
            slots = [part.slots for part in pages]
            tokens = [self._page_tokens[part.pool] for part in pages]
            self._device.write_page_numbers("backup", self._head["backup"], slots, tokens)
            self._device.mark_ready(self._new_ticket())
        message = messages.Supply(
            epoch=self._epoch,
            seq=seq,
            ticket=self._ticket,
            fence=int(self._segment.fence[0]),
            parts=parts if count else [],
            keys=b"".join(part.keys for part in pages),
        )
        if self._link.send(message) and count:
            self._head["backup"] = head
            last_seq = max(seq, self._sent[-1].last_seq if self._sent else seq)
            self._sent.append(_Sent(self._ticket, last_seq, head))

    def acks(self) -> list[Ack]:
        """Outcomes since the last call, in sequence order, each exactly once."""
        if not self._results:
            return []
        acks: list[Ack] = []
        while self._pending and (kept := self._results.pop(self._pending[0].seq, None)) is not None:
            pending = self._pending.popleft()
            acks.append(Ack(pending.seq, pending.node_id, kept))
        first = self._pending[0].seq if self._pending else self._next_seq
        while self._sent and self._sent[0].last_seq < first:
            # Also of backups that no copier was told of, whose ring it has not given back.
            self._free_up_to("backup", self._sent.popleft().ring_end)
        return acks

    def _receive(self) -> None:
        was_up = self.connected
        received = self._link.receive()
        if was_up and not self.connected:
            self._lost("it makes no sense")
        for message in received:
            if isinstance(message, messages.Acks):
                first = self._pending[0].seq if self._pending else self._next_seq
                for i, kept in enumerate(message.results):
                    if first <= message.first_seq + i < self._next_seq:
                        self._results.setdefault(message.first_seq + i, bool(kept))
            elif isinstance(message, messages.Need):
                self._needs.append(message.seq)
            elif isinstance(message, messages.LookupReply):
                self._answers[message.request] = message
            else:
                log.error("the tierd daemon could not make sense of a message: %s", message.reason)

    # --- lookup -------------------------------------------------------------------------------

    def lookup(self, rid: str, keys: bytes, pools: Sequence[str] | None = None) -> list[int]:
        """At which page counts of a chain could a request resume right now?

        A hit leases the pages for the group, so that `restore` finds them on every rank.

        Args:
            rid: The request. Its next lookup replaces this one, `cancel` and `restore` end it.
            keys: The chain's 32-byte keys, one after the other.
            pools: Those whose pages a boundary needs; None is all of the rank's.

        Returns: page counts, ascending; empty is a miss.
        """
        if not self.may_hit(rid, keys[: limits.KEY_BYTES], pools):
            return []
        now = time.monotonic()
        indices = self._indices(pools)
        signature = hashlib.blake2b(keys + bytes(indices), digest_size=16).digest()
        known = self._leases.get(rid)
        if known is not None and known[0] == signature and now < known[2]:
            return known[1]
        if known is not None and not self._may_have(keys[: limits.KEY_BYTES], indices):
            return []
        self._request += 1
        message = messages.Lookup(
            request=self._request, epoch=self._epoch, rid=rid, pools=indices, keys=keys
        )
        reply = self._ask(message)
        if reply is None:
            return []
        if reply.lengths:
            expires = now + reply.lease_s * LEASE_MARGIN
            self._leases[rid] = (signature, reply.lengths, expires)
            if len(self._leases) > MAX_LEASES:
                self._leases = {r: x for r, x in self._leases.items() if x[2] > now}
        else:
            self._leases.pop(rid, None)
        return reply.lengths

    def may_hit(self, rid: str, key: bytes, pools: Sequence[str] | None = None) -> bool:
        """Could `lookup` of a chain that begins with this key find anything? Costs no message, and
        spares the caller the keys of a chain that misses, which is what most do.

        Args: as `lookup`.
        """
        if not self.connected or time.monotonic() < self._muted_until or not self._can_restore():
            return False
        return rid in self._leases or self._may_have(key, self._indices(pools))

    def _indices(self, pools: Sequence[str] | None) -> list[int]:
        return [self._index[name] for name in (self._index if pools is None else pools)]

    def _may_have(self, key: bytes, pools: Sequence[int]) -> bool:
        """Does the daemon show this page, or is it not sure? Looks into shared memory."""
        presence = self._link.presence
        for index in pools:
            spec = self._specs[index]
            if presence is None or spec.window:
                continue
            salt = self._salts.get((self._epoch, index))
            if salt is None:
                digest = namespace_digest(
                    self._namespace, self._world_size, self._specs, self._epoch
                )
                salt = self._salts[self._epoch, index] = Salt(digest, spec.name)
            if not presence.may_have(key, salt):
                return False
        return True

    def _ask(self, message: messages.Lookup) -> messages.LookupReply | None:
        """Send a lookup and wait for its answer, a bounded time. After a time-out everything
        misses for a while, so that the next requests do not pay for it again."""
        try:
            sent = self._link.send(message)
        except ProtocolError as error:
            log.warning("a lookup was not sent: %s", error)
            return None
        deadline = time.monotonic() + self._lookup_timeout_s
        while sent and self.connected:
            self._receive()
            reply = self._answers.pop(message.request, None)
            if reply is not None:
                self._mute_s = self._lookup_timeout_s
                self._answers.clear()
                return reply
            now = time.monotonic()
            if now >= deadline:
                break
            was_up = self.connected
            self._link.wait(deadline - now, now)
            if was_up and not self.connected:
                self._receive()
                self._lost("it closed the connection")
                return None
        self._mute_s = min(self._mute_s * 2, 10.0)
        self._muted_until = time.monotonic() + self._mute_s
        log.warning(
            "the tierd daemon has not answered a lookup within %.2f s; lookups miss for %.1f s",
            self._lookup_timeout_s,
            self._mute_s,
        )
        return None

    def cancel(self, rid: str) -> None:
        """The request will not load: its lease ends."""
        if self._leases.pop(rid, None) is not None:
            self._link.send(messages.Cancel(rid=rid))

    # --- restore ------------------------------------------------------------------------------

    def restore(self, loads: Mapping[str, Sequence[PoolPages]]) -> Restore:
        """Start a step's loads, as one message with one verdict.

        Args:
            loads: Per request, the leading pages of its chain and the free slots for them.

        Raises: ValueError: keys and slots that do not fit together.
        """
        for pages in loads.values():
            for part in pages:
                self._check(part)
        self._restores += 1
        for rid in loads:
            self._leases.pop(rid, None)
        used = [restore is not None and not restore.over for restore in self._entries]
        entry = used.index(False) if False in used else None
        if not any(used):
            # Also of restores that no copier was told of, whose ring it has not given back.
            self._free_up_to("restore", self._head["restore"])
        head = self._head["restore"]
        items, keys, slots, tokens = [], [], [], []
        for rid, pages in loads.items():
            parts = []
            for part in pages:
                n = len(part.keys) // limits.KEY_BYTES
                parts.append(messages.Part(self._index[part.pool], n, head))
                keys.append(part.keys)
                slots.append(part.slots)
                tokens.append(self._page_tokens[part.pool])
                head += n
            items.append(messages.RestoreItem(rid, parts))
        count = head - self._head["restore"]
        copier = self._link.copier
        if (
            not self.connected
            or copier is None
            or entry is None
            or not count
            or count > min(self._room("restore"), MAX_FLUSH_PAGES)
            or not self._can_restore()
        ):
            return FailedRestore()
        generation = self._restores % 2**32 or 2**31
        ticket = self._new_ticket()
        self._segment.awaited[entry] = generation
        self._device.write_page_numbers("restore", self._head["restore"], slots, tokens)
        self._device.mark_ready(ticket)
        message = messages.Restore(
            epoch=self._epoch,
            number=self._restores,
            entry=entry,
            generation=generation,
            ticket=ticket,
            fence=int(self._segment.fence[0]),
            items=items,
            keys=b"".join(keys),
        )
        if not self._link.send(message):
            self._segment.release(entry)
            return FailedRestore()
        self._head["restore"] = head

        connection = self._link.connection
        restore = Restore(
            device=self._device,
            segment=self._segment,
            entry=entry,
            generation=generation,
            copier=copier,
            daemon_lost=lambda: self._daemon_lost(connection),
            abandon=self._bump_fence,
            timeout_s=self._verdict_timeout_s,
        )
        self._entries[entry] = restore
        return restore

    def _can_restore(self) -> bool:
        """Would every waiting stream be released, whoever dies?"""
        self._watch()
        return self._watchdog is None or self._watchdog.armed()

    def _daemon_lost(self, connection: int) -> bool:
        """Look at the lifeline: is the daemon that was told of a restore gone, even if there is
        another one by now?"""
        self._poll_link(time.monotonic())
        return not self.connected or self._link.connection != connection

    def _finish_restores(self) -> None:
        for restore in list(self._entries):
            if restore is not None:
                restore.finish()

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
        self._finish_restores()
        self._fail_pending()
        if not keep_pending:
            self._pending.clear()
            self._results.clear()
        self._leases.clear()
        self._salts.clear()
        message = messages.Reset(epoch=self._epoch, next_seq=self._next_seq)
        if self.connected and not self._link.send(message):
            self._lost("its queue is full")

    def close(self) -> None:
        """Leave the daemon. Waits until no restore writes any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bump_fence()
        self._finish_restores()
        self._link.close()
        self._fail_pending()
        self._device.release_segment()
        if self._watchdog is not None:
            self._watchdog.close()
        self._shared.close()
        self._exports.close()
        os.close(self._pidfd)

    # --- inside -------------------------------------------------------------------------------

    def _check(self, part: PoolPages) -> int:
        """How many pages a part names."""
        if part.pool not in self._index:
            raise ValueError(f"no pool {part.pool!r}; there are {', '.join(self._index)}")
        pages, rest = divmod(len(part.keys), limits.KEY_BYTES)
        if rest or part.slots.shape[0] != pages * self._page_tokens[part.pool]:
            raise ValueError(
                f"pool {part.pool!r}: {len(part.keys)} bytes of keys and {len(part.slots)} slots; "
                f"a page has a key of {limits.KEY_BYTES} bytes and "
                f"{self._page_tokens[part.pool]} slots"
            )
        return pages

    def _ticket_is_free(self) -> bool:
        """Are the next ticket's ready words free, with some to spare for restores?"""
        return not self._sent or self._ticket - self._sent[0].ticket < TICKETS - 64

    def _new_ticket(self) -> int:
        self._ticket = (self._ticket + 1) % 2**32 or 1
        return self._ticket

    def _room(self, ring: Ring) -> int:
        """Free places in a ring. The mark never moves back, whatever a late writer stores."""
        self._free_up_to(ring, int(self._segment.consumed[0 if ring == "backup" else 1]))
        size = (
            self._segment.spec.backup_ring if ring == "backup" else self._segment.spec.restore_ring
        )
        return size - (self._head[ring] - self._free_from[ring])

    def _free_up_to(self, ring: Ring, position: int) -> None:
        if self._free_from[ring] < position <= self._head[ring]:
            self._free_from[ring] = position
