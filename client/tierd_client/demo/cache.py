"""Which device page holds which key, and which to give up next: a rank's device cache. Pure, so
that every rank of a group decides the same."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class DeviceCache:
    """Least recently used pages first, except those that are locked.

    Args:
        pages: Device pages; page 0 stays unused, as in engines that pad with it.
    """

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, 0, -1))
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._locks: Counter[bytes] = Counter()
        self.evicted = 0

    def held_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the first on, are on the device."""
        return next((i for i, key in enumerate(keys) if key not in self._held), len(keys))

    def pages(self, keys: Iterable[bytes]) -> list[int]:
        """The device page of each of these keys, which must be held."""
        return [self._held[key] for key in keys]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark as used now; a prefix counts as used later than what follows it."""
        for key in reversed(keys):
            self._held.move_to_end(key)

    def lock(self, keys: Iterable[bytes]) -> None:
        """Keep these from eviction until as many calls of `unlock`."""
        self._locks.update(keys)

    def unlock(self, keys: Iterable[bytes]) -> None:
        """Undo a `lock`."""
        for key in keys:
            self._locks[key] -= 1
            if not self._locks[key]:
                del self._locks[key]

    def can_take(self, pages: int) -> bool:
        """Whether so many pages are free, or held without a lock."""
        return len(self._free) + len(self._held) - len(self._locks) >= pages

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """Give each key a page, evicting others if need be.

        Raises: MemoryError: too many pages are locked (see `can_take`).
        """
        while len(self._free) < len(keys):
            victim = next((key for key in self._held if key not in self._locks), None)
            if victim is None:
                raise MemoryError(f"every device page is locked; {len(keys)} are wanted")
            self._free.append(self._held.pop(victim))
            self.evicted += 1
        pages = [self._free.pop() for _ in keys]
        self._held.update(zip(keys, pages, strict=True))
        return pages

    def items(self) -> tuple[list[bytes], list[int]]:
        """All keys on the device, and their pages."""
        return list(self._held), list(self._held.values())
