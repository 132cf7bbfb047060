"""The lookups of one rank: what shared memory and leases can answer they do, and what is left the
daemon, within a bounded time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tierd.wire import messages
from tierd.wire.errors import ProtocolError
from tierd.wire.presence import Salt
from tierd_client.breaker import Breaker
from tierd_client.leases import ChainId, Leases, request_name
from tierd_client.link import Link, LinkState
from tierd_client.pools import PageKeys, key_at, key_bytes

log = logging.getLogger("tierd_client")

LEASE_MARGIN = 0.5
"""A remembered answer is used for this share of its lease; then it is asked for again."""


class Lookups:
    """What was asked and answered on one rank.

    Args:
        link: The connection to the daemon.
        specs: The rank's pools, as registered.
        digest: The name of the rank's namespace in an epoch (`geometry.namespace_digest`).
        timeout_s: What an answer is waited for at most.
        receive: Takes in what else the daemon has sent.
        lost: Told why, once the daemon turns out to be gone.
        may_restore: Could a restore of a request be started now? If not, there is no use in a hit.
    """

    def __init__(
        self,
        link: Link,
        specs: Sequence[messages.PoolSpec],
        digest: Callable[[str], bytes],
        *,
        timeout_s: float,
        receive: Callable[[], None],
        lost: Callable[[str], None],
        may_restore: Callable[[str], bool],
    ) -> None:
        self._link = link
        self._specs = specs
        self._digest = digest
        self._timeout_s = timeout_s
        self._receive = receive
        self._lost = lost
        self._may_restore = may_restore
        self._asked = 0
        self._leases = Leases()
        self._breaker = Breaker(timeout_s)
        self._salts: dict[tuple[str, int], Salt] = {}

    def look_up(self, rid: str, keys: PageKeys, pools: list[int], epoch: str) -> list[int]:
        """Page counts of a chain that a request could resume at, ascending; empty is a miss. Call
        it only while there is a connection.

        Args:
            rid: The request, which has the pages leased if there are any.
            keys: The chain's keys, one at least.
            pools: Indices of the pools whose pages a boundary needs.
            epoch: The one that the rank is in.

        Raises: ValueError: the keys are not whole.
        """
        leased = rid in self._leases
        if not leased and not self._may_have(key_at(keys, 0), pools, epoch):
            return []
        now = time.monotonic()
        if self._breaker.is_open(now, self._link.heartbeat_s) or not self._may_restore(rid):
            return []
        chain = ChainId.of(keys, pools)
        lengths = self._leases.recall(rid, chain, now)
        if lengths is not None:
            return lengths
        if leased and not self._may_have(key_at(keys, 0), pools, epoch):
            return []
        self._asked += 1
        message = messages.Lookup(
            request=self._asked,
            epoch=epoch,
            rid=request_name(rid),
            pools=pools,
            keys=key_bytes(keys),
        )
        reply = self._ask(message)
        if reply is None:
            # The daemon may grant it late: whoever cancels the request ends that lease, too.
            self._leases.remember(rid, chain, [], now, now)
            return []
        if reply.lengths:
            until = now + reply.lease_s * LEASE_MARGIN
            self._leases.remember(rid, chain, reply.lengths, until, now)
        else:
            self._leases.end(rid)
        return reply.lengths

    def cancel(self, rid: str) -> None:
        """The request will not load: the daemon is told, if it may hold pages for it."""
        if self._leases.end(rid):
            self._link.cancel(request_name(rid))

    def loading(self, rid: str) -> None:
        """The request loads: its lease becomes a pin, and needs no cancelling."""
        self._leases.end(rid)

    def connected(self) -> None:
        """There is a daemon, which has just spoken."""
        self._breaker.connected(time.monotonic(), self._link.heartbeat_s)

    def forget(self) -> None:
        """No request has a lease any more; the daemon has gone, or the rank has left its epoch."""
        self._leases.clear()
        self._salts.clear()

    def _may_have(self, key: bytes, pools: Sequence[int], epoch: str) -> bool:
        """Does the daemon show this page, or is it not sure? Looks into shared memory."""
        presence = self._link.presence
        for index in pools:
            spec = self._specs[index]
            if presence is None or spec.window:
                continue
            salt = self._salts.get((epoch, index))
            if salt is None:
                salt = self._salts[epoch, index] = Salt(self._digest(epoch), spec.name)
            if not presence.may_have(key, salt):
                return False
        return True

    def _ask(self, message: messages.Lookup) -> messages.LookupReply | None:
        """Send a lookup and wait for its answer, a bounded time. After a time-out everything
        misses for a while, so that the next requests do not pay for it again."""
        link = self._link
        try:
            sent = link.ask(message)
        except ProtocolError as error:
            log.warning("a lookup was not sent, and misses: %s", error)
            return None
        now = time.monotonic()
        deadline = now + self._timeout_s
        while sent and now < deadline:
            # Not looked at again and again meanwhile: the kernel likes to wake the daemon on the
            # CPU of whoever has written to it, which must be free for that.
            link.wait(deadline - now, now)
            reply = link.reply(message)
            if reply is not None:
                self._breaker.answered()
                return reply
            if link.state is not LinkState.UP:
                self._receive()
                self._lost("it closed the connection")
                return None
            now = time.monotonic()
        mute_s = self._breaker.timed_out(time.monotonic(), link.heartbeat_s)
        log.warning(
            "the tierd daemon has not answered a lookup within %.2f s; lookups miss for %.1f s "
            "(`tierd status` says how it is)",
            self._timeout_s,
            mute_s,
        )
        return None
