"""What the parts of control share: who is connected, what is stored, and what is under way."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from tierd.config import ServeConfig
from tierd.control.backups import Writers
from tierd.control.catalog import Catalog
from tierd.control.copiers import Copier, Job
from tierd.control.deadlines import Deadlines
from tierd.control.drain import Drain
from tierd.control.endpoint import Endpoint
from tierd.control.groups import Group, Session
from tierd.control.room import RoomKeeper
from tierd.control.sheds import Sheds
from tierd.control.stock import Stock
from tierd.memory.chunks import ChunkStore
from tierd.memory.persist import PersistDirectory
from tierd.memory.presence import SharedPresence
from tierd.memory.source import AnonymousMemory, ChunkSource
from tierd.wire import messages
from tierd.wire.errors import ProtocolError
from tierd.wire.geometry import HostLayout, namespace_digest, namespace_record, pool_layout, shards

log = logging.getLogger("tierd.control")

COUNTERS = (
    "messages",
    "backups_kept",
    "backups_shed",
    "lookups",
    "lookup_hits",
    "restores",
    "restores_failed",
    "pages_evicted",
    "pages_healed",
    "pages_corrupt",
    "errors",
)


class State:
    """One daemon's state. Plain: whoever changes it says why in its own module."""

    def __init__(
        self, endpoint: Endpoint, config: ServeConfig, directory: PersistDirectory | None = None
    ) -> None:
        self.endpoint = endpoint
        self.directory = directory
        """Where the pages outlive the daemon."""
        self.deadlines = Deadlines().times(config.patience)
        self.copiers = {
            name: Copier(
                name,
                self.deadlines,
                max_gbps=config.max_gbps,
                pin_threads=config.pin_threads,
                verify=config.verify,
                hold_fd=directory.copiers_lock if directory is not None else -1,
            )
            for name in config.devices
        }
        self.presence = SharedPresence(config.memory_bytes)
        memory: ChunkSource = directory or AnonymousMemory(dict(config.pages.huge))
        self.room = RoomKeeper(
            Stock(
                ChunkStore(config.memory_bytes, memory, config.pages.chunk_bytes),
                _tell,
                config.devices,
                ahead_bytes=config.pin_ahead_bytes,
                # Where a file system is full, or a cgroup has no huge page left, who touches what
                # is not there is killed; who asks for it beforehand is told.
                touch=config.pin_ahead_bytes > 0
                or directory is not None
                or bool(config.pages.huge),
            ),
            config.pool_shares,
        )
        self.catalogs: dict[bytes, Catalog] = {}
        self.groups: dict[str, Group] = {}
        self.sessions: dict[int, Session] = {}
        self.by_route: dict[bytes, Session] = {}
        self.writers = Writers()
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.sheds = Sheds()
        self.paused = False
        self.drain: Drain | None = None
        """The daemon is ending."""
        self._number = 0
        self._tick = 0
        self._strangers = 0
        """Messages from those who are not registered."""

    def next_number(self) -> int:
        """A number that nothing else of this daemon has."""
        self._number += 1
        return self._number

    def next_tick(self) -> int:
        """Recency for the eviction policies: a count, not a clock."""
        self._tick += 1
        return self._tick

    def complain(self, route: bytes, error: ProtocolError) -> None:
        """Tell whoever has sent it by ZeroMQ that a message makes no sense."""
        self.endpoint.send(route, self.complaint(self.by_route.get(route), error))

    def complaint(self, session: Session | None, error: ProtocolError) -> messages.Error:
        """Take note of a message that makes no sense. The log has the first of a rank, the second,
        the fourth, the eighth ...: one that babbles must not fill it.

        Returns: what its sender is to be told.
        """
        self.counters["errors"] += 1
        if session is not None:
            number = session.bad_messages = session.bad_messages + 1
            who = f"rank {session.info.rank} of engine {session.info.instance}"
        else:
            number = self._strangers = self._strangers + 1
            who = "somebody who is not registered"
        if number & (number - 1) == 0:
            log.warning(
                "bad message number %d from %s: %s; it is told so, others notice nothing",
                number,
                who,
                error,
            )
        return messages.Error(reason=str(error))

    def new_job(
        self,
        session: Session,
        done: Callable[[bool, bool], None],
        deadline_s: float,
        restore: int | None = None,
    ) -> Job:
        """Note a job of a session's copier, which is killed if that has not retired by then.

        Args: `done`, `restore`: as of `Job`.
        """
        job = Job(self.next_number(), session.number, time.monotonic() + deadline_s, done, restore)
        session.copier.jobs[job.number] = job
        return job

    def catalog(self, group: Group, epoch: str) -> Catalog:
        """The pages of one epoch of an engine; made when it is entered.

        Raises: ProtocolError: there is no memory to keep account of its pages; nothing has changed.
        """
        catalog = group.catalogs.get(epoch)
        if catalog is not None:
            return catalog
        digest = namespace_digest(group.namespace, group.world_size, group.pools, epoch)
        catalog = self.catalogs.get(digest)
        if catalog is None:
            catalog = Catalog(digest, group.world_size, bool(epoch), self.presence)
        try:
            for spec in group.pools:
                self.room.rows.open_pool(
                    catalog,
                    spec.name,
                    spec.page_tokens,
                    self.layout(spec),
                    spec.window,
                    shards=shards(spec, group.world_size),
                )
        except MemoryError:
            if digest not in self.catalogs:
                self.room.dissolve(catalog)
            raise ProtocolError(
                f"`pools` have pages so small that no memory is left to keep account of all that "
                f"{self.room.store.budget_bytes >> 20} MiB could hold; start the daemon with less "
                "--memory, or make pages larger"
            ) from None
        self.catalogs[digest] = group.catalogs[epoch] = catalog
        if self.directory is not None and not epoch:
            self._describe(self.directory, group, digest)
        return catalog

    def _describe(self, directory: PersistDirectory, group: Group, digest: bytes) -> None:
        """Leave word of what a namespace is, for the daemon after this one."""
        record = namespace_record(group.namespace, group.world_size, group.pools, "")
        try:
            directory.describe(digest, record)
        except OSError as error:
            log.error(
                "cannot write to %s (%s): what engine %s backs up will be lost with this daemon",
                directory.path,
                error.strerror,
                group.instance,
            )

    def layout(self, pool: messages.PoolSpec) -> HostLayout:
        """How a pool's slots lie in this daemon's chunks."""
        return pool_layout(pool, self.room.store.chunk_bytes)

    def forget_epochs(self, group: Group) -> None:
        """Let go of the epochs that no rank of the group is in."""
        wanted = {session.epoch for session in group.sessions.values()}
        for epoch in [epoch for epoch in group.catalogs if epoch not in wanted]:
            del group.catalogs[epoch]

    def drop_abandoned(self) -> None:
        """Give back what `abandoned` catalogs have, some at a time, and forget them."""
        for catalog in self.abandoned():
            if self.room.dissolve(catalog):
                self.counters["pages_evicted"] += sum(p.evictions for p in catalog.pools.values())
                del self.catalogs[catalog.digest]

    def abandoned(self) -> list[Catalog]:
        """Catalogs that nobody is in and nobody can come back to: private epochs, and namespaces
        of which nothing is left. Each costs what is known of as many slots as it ever had."""
        used = {id(c) for g in self.groups.values() for c in g.catalogs.values()}
        return [
            c for c in self.catalogs.values() if id(c) not in used and (c.private or c.is_empty)
        ]

    def sharers(self, catalog: Catalog) -> list[tuple[int, Copier]]:
        """(shard, copier) of every rank that uses a catalog."""
        return [
            (session.info.rank, session.copier)
            for session in self.sessions.values()
            if catalog in session.group.catalogs.values()
        ]


def _tell(copier: Copier, message: messages.Message, fd: int | None) -> None:
    copier.send(message, [] if fd is None else [fd])
