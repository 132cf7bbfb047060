"""What ranks report of their backups, for tests of what is decided about them."""

from __future__ import annotations

import hashlib

from tierd.control.keys import Keys
from tierd.control.sequencer import Offer, OfferPart


def key(chain: tuple[int, ...]) -> bytes:
    """The key of a chain's last page."""
    return hashlib.sha256(bytes(chain)).digest()


def offer(*chain: int, first: int = 0, epoch: str = "", ring: int = 0, pool: str = "kv") -> Offer:
    """The pages of a chain from page `first` on."""
    names = Keys.of(key(chain[: i + 1]) for i in range(first, len(chain)))
    return Offer(epoch, (OfferPart(pool, names, ring),), 1, 0, key(chain[:first]) if first else b"")
