"""What a rank's messages report of its backups, checked against what the rank has registered."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from tierd.control.groups import Session
from tierd.control.keys import Keys
from tierd.control.ring import check_ring
from tierd.control.sequencer import Offer, OfferPart
from tierd.wire.errors import ProtocolError
from tierd.wire.limits import KEY_BYTES
from tierd.wire.messages import Flush, Part, Supply


def flushed(
    session: Session, message: Flush, seq: int, parts: slice, parent: bytes | None
) -> Offer:
    """One backup of a step, which has these rows of the columns of parts.

    Raises: ProtocolError: naming the field.
    """
    named = map(Part, message.pools[parts], message.pages[parts], message.ring[parts])
    return _offer(session, message, seq, zip(named, message.first[parts], strict=True), parent)


def supplied(session: Session, message: Supply) -> Offer:
    """What comes before a backup.

    Raises: ProtocolError: naming the field.
    """
    *first, _ = accumulate((part.pages for part in message.parts), initial=0)
    return _offer(session, message, message.seq, zip(message.parts, first, strict=True), b"")


def _offer(
    session: Session,
    message: Flush | Supply,
    seq: int,
    parts: Iterable[tuple[Part, int]],
    parent: bytes | None,
) -> Offer:
    """Args: `parts`: each with the number of its first key in the message."""
    offered = []
    for part, first in parts:
        name = session.pool_name(part.pool)
        check_ring(part, session.segment.spec.backup_ring)
        keys = Keys(message.keys[first * KEY_BYTES : (first + part.pages) * KEY_BYTES])
        offered.append(OfferPart(name, keys, part.ring))
    names = [part.pool for part in offered]
    if len(set(names)) != len(names):
        raise ProtocolError(f"seq {seq} names a pool twice: {names}")
    return Offer(message.epoch, tuple(offered), message.ticket, message.fence, parent)
