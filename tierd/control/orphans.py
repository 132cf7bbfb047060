"""Pages whose predecessor is known by its key, and is not here: who waits for whom. Pure."""

from __future__ import annotations


class Orphans:
    """Slots of one pool, by the key of the page that their pages follow."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[int]] = {}
        self._awaited: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def add(self, slot: int, parent: bytes) -> None:
        """The page in `slot` waits for the page with this key."""
        self._waiting.setdefault(parent, []).append(slot)
        self._awaited[slot] = parent

    def discard(self, slot: int) -> None:
        """It waits no longer, if it did."""
        parent = self._awaited.pop(slot, None)
        if parent is not None:
            siblings = self._waiting[parent]
            siblings.remove(slot)
            if not siblings:
                del self._waiting[parent]

    def of(self, parent: bytes) -> list[int]:
        """The slots of the pages that wait for this one."""
        return list(self._waiting.get(parent, ()))
