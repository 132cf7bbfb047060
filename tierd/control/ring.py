"""How far a rank's index ring can be given back, when its parts are settled out of order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from tierd.wire.errors import ProtocolError
from tierd.wire.limits import MAX_BYTES


def check_ring(pages: int, ring: int, page_tokens: int, size: int) -> None:
    """Raises: ProtocolError: token slots of so many pages, from position `ring` on, that a ring of
    `size` elements cannot hold, or at positions that no rank comes to in its life."""
    if pages * page_tokens > size:
        raise ProtocolError(
            f"`pages` {pages} of {page_tokens} token slots each: more than the ring of {size} holds"
        )
    if ring > MAX_BYTES:
        raise ProtocolError(f"`ring` {ring} is over the limit of {MAX_BYTES}")


@dataclass
class _Part:
    end: int
    settled: bool = False


class RingLedger:
    """Parts of a ring in the order in which they were filled.

    A part is settled once its copies, if there are any, are in a job: the ring may be reused up to
    the first part that is not, as soon as the jobs so far have been read.
    """

    def __init__(self) -> None:
        self.consumed = 0
        self._parts: OrderedDict[Hashable, _Part] = OrderedDict()

    def note(self, name: Hashable, end: int) -> None:
        """A part that ends at ring position `end` was filled; only a name's first one counts."""
        self._parts.setdefault(name, _Part(end))

    def settle(self, name: Hashable) -> None:
        """A part is not needed any more once the jobs so far have been read. It may be unknown."""
        if name in self._parts:
            self._parts[name].settled = True
        while self._parts:
            first = next(iter(self._parts))
            if not self._parts[first].settled:
                break
            self.consumed = max(self.consumed, self._parts.pop(first).end)
