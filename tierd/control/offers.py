"""What a rank's messages report of its backups, checked against what the rank has registered."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterable
from itertools import accumulate

from tierd.control.groups import Session
from tierd.control.keys import Keys
from tierd.control.ring import check_ring
from tierd.control.sequencer import Offer, OfferPart
from tierd.wire.errors import ProtocolError
from tierd.wire.limits import KEY_BYTES
from tierd.wire.messages import Flush, Supply


def flushed(
    session: Session, message: Flush, seq: int, parts: slice, parent: bytes | None
) -> Offer:
    """One backup of a step, which has these rows of the columns of parts.

    Raises: ProtocolError: naming the field.
    """
    named = zip(
        message.pools[parts],
        message.pages[parts],
        message.ring[parts],
        message.first[parts],
        strict=True,
    )
    return _offer(session, message, message.digits or message.keys, seq, named, parent)


def supplied(session: Session, message: Supply) -> Offer:
    """What comes before a backup.

    Raises: ProtocolError: naming the field.
    """
    first = accumulate((part.pages for part in message.parts), initial=0)
    parts = ((part.pool, part.pages, part.ring, next(first)) for part in message.parts)
    return _offer(session, message, message.keys, message.seq, parts, b"")


def _offer(
    session: Session,
    message: Flush | Supply,
    keys: bytes | str,
    seq: int,
    parts: Iterable[tuple[int, int, int, int]],
    parent: bytes | None,
) -> Offer:
    """Args: `parts`: of each the pool, its pages, where its token slots begin in the ring, and the
    number of its first key in the message."""
    offered, size = [], session.segment.spec.backup_ring
    for pool, pages, ring, first in parts:
        name = session.pool_name(pool)
        page_tokens = session.info.pools[pool].page_tokens
        check_ring(pages, ring, page_tokens, size)
        offered.append(OfferPart(name, _some(keys, first, first + pages), ring, page_tokens))
    if len(offered) > 1:
        names = [part.pool for part in offered]
        if len(set(names)) != len(names):
            raise ProtocolError(f"seq {seq} names a pool twice: {names}")
    return Offer(message.epoch, tuple(offered), message.ticket, message.fence, parent)


def _some(keys: bytes | str, first: int, end: int) -> Keys:
    """Some of a message's keys, which are bytes or digits.

    Raises: ProtocolError: digits that are not hexadecimal.
    """
    if isinstance(keys, bytes):
        return Keys(keys[first * KEY_BYTES : end * KEY_BYTES])
    try:
        return Keys(unhexlify(keys[2 * first * KEY_BYTES : 2 * end * KEY_BYTES]))
    except ValueError:
        raise ProtocolError("`digits` has some that are not hexadecimal") from None
