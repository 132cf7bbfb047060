"""Answers of lookups, remembered for as long as their leases surely last. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from tierd.wire.limits import MAX_NAME
from tierd_client.pools import PageKeys, count_keys, key_at

MAX_LEASES = 8192


class ChainId(NamedTuple):
    """Names a chain of pages in some pools.

    A key is a sum over all tokens up to its page's end, so the last one and the number of pages
    say what the others are, and spare a scheduler to compare them all whenever it asks again.
    """

    pages: int
    last: bytes
    pools: tuple[int, ...]

    @staticmethod
    def of(keys: PageKeys, pools: Sequence[int]) -> ChainId:
        """Raises: ValueError: the keys are not whole."""
        pages = count_keys(keys)
        return ChainId(pages, key_at(keys, -1) if pages else b"", tuple(pools))


def request_name(rid: str) -> str:
    """A request's id as the wire carries it: itself, or a digest of one that the wire cannot carry.

    Whoever sends a request to the engine may choose its id: it can be empty, of any length, and
    not even Unicode (a lone surrogate). One that the daemon refused would cost a time-out, and
    then everybody's lookups.
    """
    if rid.isascii() and 0 < len(rid) <= MAX_NAME:
        return rid
    return hashlib.blake2b(rid.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class _Lease(NamedTuple):
    chain: ChainId
    lengths: list[int]
    until: float


class Leases:
    """By request, what was found for it. Bounded: beyond `MAX_LEASES` those that have ended go."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    def __contains__(self, rid: str) -> bool:
        """Has a request a lease, of whichever chain, that may have ended?"""
        return rid in self._leases

    def recall(self, rid: str, chain: ChainId, now: float) -> list[int] | None:
        """The lengths that a request holds of this chain; None: ask."""
        lease = self._leases.get(rid)
        if lease is None or lease.chain != chain or now >= lease.until:
            return None
        return lease.lengths

    def remember(
        self, rid: str, chain: ChainId, lengths: list[int], until: float, now: float
    ) -> None:
        """A lookup found something."""
        self._leases[rid] = _Lease(chain, lengths, until)
        if len(self._leases) > MAX_LEASES:
            self._leases = {r: lease for r, lease in self._leases.items() if lease.until > now}

    def end(self, rid: str) -> bool:
        """A request's lease is over. Returns: whether it had one."""
        return self._leases.pop(rid, None) is not None

    def clear(self) -> None:
        """No request has a lease any more."""
        self._leases.clear()
