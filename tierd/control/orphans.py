"""Pages whose predecessor is known by its key, and is not here: who waits for whom. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tierd.eviction.policy import NO_PARENT, EvictionPolicy, Slots


class Orphans:
    """Slots of one pool, by the key of the page that their pages follow.

    Args: `policy`: knows of all other pages what they follow.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
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

    def adopt(self, slot: int, parent: int, now: int) -> None:
        """Link a page to a predecessor that was not here or not known before.

        Chained hashes cannot form a ring, but keys come from outside: one that would is ignored.
        """
        step = parent
        while step != NO_PARENT:
            if step == slot:
                return
            step = int(self._policy.parent[step])
        self.discard(slot)
        self._policy.link(slot, parent, now)

    def add_followers(self, slots: Slots, key_of: Callable[[int], bytes]) -> None:
        """What comes after these pages elsewhere waits for them: their slots are about to be given
        up."""
        here = set(slots.tolist())
        inside = Counter(self._policy.parent[slots].tolist())
        children = self._policy.children[slots].tolist()
        followed = [s for s, n in zip(slots.tolist(), children, strict=True) if n > inside[s]]
        for slot in followed:
            for child in self._policy.following(slot):
                if child not in here:
                    self._policy.orphan(child)
                    self.add(child, key_of(slot))
