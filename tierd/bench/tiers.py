"""Host tiers that a trace is replayed against: tierd's own index under a policy, and pages in
plain LRU order."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierd.bench.traces import Access, Chain
from tierd.control.keys import MISSING, Keys
from tierd.control.pages import PagePool
from tierd.eviction.policy import EvictionPolicy, Slots
from tierd.wire.geometry import HostLayout
from tierd.wire.limits import KEY_BYTES


class HostTier(Protocol):
    """A cache of a fixed number of pages behind the GPU."""

    def serve(self, access: Access) -> int:
        """A request comes and goes; returns how many pages it restored: the run of pages that
        are here from its first page that is not on the GPU on."""


class ChainTier:
    """`tierd.control.pages.PagePool`, used as control uses it.

    A backup offers the pages that were not on the GPU before, and names the page they follow. If
    that page is not here, the backup goes back to the last one that is.
    """

    def __init__(self, pages: int, policy: EvictionPolicy) -> None:
        layout = HostLayout((1,), (0,), 1, 1, pages, pages, 0)
        self._dropped: Chain = []
        self._pool = PagePool("kv", 1, layout, 1, _NoHeaders(), policy=policy)
        self._pool.on_drop = self._note_dropped
        self._pool.chunks.add(0)
        self._room = pages
        self._tick = 0

    def serve(self, access: Access) -> int:
        keys = Keys.of(page.to_bytes(KEY_BYTES, "little") for page in access.chain)
        self._tick += 1
        found = self._pool.prefix(keys[access.gpu_hits :])
        self._pool.touch(found, self._tick)
        self._back_up(keys[: self._room], access.gpu_hits)
        return len(found)

    def take_dropped(self) -> Chain:
        """The pages that have been evicted since the last call, in that order."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _note_dropped(self, keys: Keys, _visible: bool) -> None:
        self._dropped += [int.from_bytes(key, "little") for key in keys]

    def _back_up(self, keys: Keys, first: int) -> None:
        """Back up what fits of a chain from page `first` on."""
        if first >= len(keys):
            return
        pool = self._pool
        while True:
            start = first
            while start and pool.find(keys[start - 1]) is None:
                start -= 1
            known = pool.find_all(keys[start:])
            missing = int(np.count_nonzero(known == MISSING)) - pool.free_slots
            if missing <= 0:
                break
            pool.evict(missing)
        self._tick += 1
        parent = keys[start - 1] if start else b""
        slots = pool.reserve(keys[start:], parent, known, self._tick)
        pool.commit(slots[known == MISSING])


class _NoHeaders:
    """Slot headers of memory that is not there."""

    def writing(
        self, slots: Slots, keys: bytes, parents: bytes, flags: npt.NDArray[np.uint32]
    ) -> None: ...

    def committed(self, slots: Slots) -> None: ...

    def freed(self, slots: Slots) -> None: ...


class PageLru:
    """Least recently used without chains: pages that are looked up or backed up, each for itself.

    Of one request the last page counts as the least recent, as caches do that know of prefixes;
    of a page that the GPU hits it hears nothing.
    """

    def __init__(self, pages: int) -> None:
        self._room = pages
        self._pages: OrderedDict[int, None] = OrderedDict()

    def serve(self, access: Access) -> int:
        pages = self._pages
        offered = access.chain[access.gpu_hits : self._room]
        hits = 0
        for page in access.chain[access.gpu_hits :]:
            if page not in pages:
                break
            hits += 1
        for page in reversed(offered):
            pages[page] = None
            pages.move_to_end(page)
        while len(pages) > self._room:
            pages.popitem(last=False)
        return hits
