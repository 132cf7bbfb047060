"""The pools of one namespace, and what the pages of one mean to those of another: KV that is gone
takes its windows with it, and what has been backed up shows in the presence table."""

from __future__ import annotations

from typing import Protocol

from tierd.control.keys import Keys
from tierd.control.pages import PagePool
from tierd.wire.presence import Salt


class Presence(Protocol):
    """Shows which pages there are."""

    def add(self, keys: bytes, salt: Salt) -> None:
        """Pages of the pool that `salt` stands for can be hit. `keys`: 32 bytes each."""

    def remove(self, keys: bytes, salt: Salt) -> None:
        """They are gone."""


class Catalog:
    """The pages of one namespace: pools by name.

    Args:
        private: An epoch that only one engine uses; it goes when that engine leaves it.
        presence: Where ranks see which pages there are.
    """

    def __init__(
        self,
        digest: bytes,
        world_size: int,
        private: bool,
        presence: Presence | None = None,
    ) -> None:
        self.digest = digest
        self.world_size = world_size
        self.private = private
        self.pools: dict[str, PagePool] = {}
        self._presence = presence

    @property
    def is_empty(self) -> bool:
        """Has no pool a slot?"""
        return not any(pool.capacity for pool in self.pools.values())

    def add_pool(self, pool: PagePool) -> None:
        """Take in a new pool."""
        self.pools[pool.name] = pool
        if pool.window:
            return
        salt = Salt(self.digest, pool.name)
        presence = self._presence

        def show(keys: Keys) -> None:
            if presence is not None:
                presence.add(keys.blob, salt)

        def forget(keys: Keys, visible: bool) -> None:
            if presence is not None and visible:
                presence.remove(keys.blob, salt)
            for other in self.pools.values():
                if other.window:
                    other.forget(keys)

        pool.on_commit, pool.on_drop = show, forget

    def show_all(self) -> None:
        """Show all pages again, to a table that has none of them."""
        for pool in self.pools.values():
            if pool.on_commit is not None:
                for keys in pool.committed_keys():
                    pool.on_commit(keys)

    def touch_boundary(self, key: bytes, now: int) -> None:
        """A request has gone on from the boundary after this page: all it needs is as recent.

        An engine that hits a prefix on its GPU never asks for it here, but it backs up what comes
        after.
        """
        whole = next((pool for pool in self.pools.values() if not pool.window), None)
        for pool in self.pools.values():
            if whole is not None and pool.window:
                slots = pool.present(whole.before(key, pool.window))
                pool.touch(slots[slots >= 0], now)
