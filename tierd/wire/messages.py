"""Every message of tierd in one place, as msgspec structs.

A struct's field types and `Meta` bounds are its schema: `tierd.wire.codec` refuses anything
else, naming the field. Messages are tagged msgpack maps (`{"op": "flush", ...}`), so that a
dump of the wire reads by itself; bulk data (keys, slots) travels as blobs.

Three conversations use them:

- client and control over the lifeline (`FromLifeline`, `ToLifeline`), with file descriptors beside:
  registration, and what somebody waits for; admin commands speak it, too;
- client and control over ZeroMQ (`FromClient`, `ToClient`), all that nobody waits for;
- control and a copier over a socket pair (`ToCopier`, `FromCopier`).
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from tierd.wire import limits

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size = Annotated[int, Meta(ge=1, le=limits.MAX_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME)]
OptionalName = Annotated[str, Meta(max_length=limits.MAX_NAME)]
Text = Annotated[str, Meta(max_length=4096)]
OptionalKey = Annotated[bytes, Meta(max_length=limits.KEY_BYTES)]
PageCount = Annotated[int, Meta(ge=0, le=limits.MAX_PAGES_PER_MESSAGE)]
Rank = Annotated[int, Meta(ge=0, lt=limits.MAX_WORLD_SIZE)]
PoolIndex = Annotated[int, Meta(ge=0, lt=limits.MAX_POOLS)]
PartCount = Annotated[int, Meta(ge=0, le=limits.MAX_POOLS)]


class Message(Struct, tag_field="op", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages. Unknown fields are refused: a typo must not pass as a default."""


# --- geometry ---------------------------------------------------------------------------------


class Allocation(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One piece of a rank's memory that holds KV buffers.

    `handle` is the 64-byte `cudaIpcMemHandle_t` of the allocation's base. Empty: the memory is a
    file descriptor (host backend), and the fds beside the message come in the allocations' order.
    """

    size: Size
    handle: Annotated[bytes, Meta(max_length=64)] = b""


class BufferSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row-per-page buffer of a pool: the K or the V of one layer, a scale, a state.

    Page p of the buffer is the `row_bytes` bytes at
    `allocation + offset + p * page_stride`.
    """

    allocation: Annotated[int, Meta(ge=0, lt=limits.MAX_ALLOCATIONS)]
    offset: Annotated[int, Meta(ge=0, le=limits.MAX_BYTES)]
    page_stride: Size
    row_bytes: Size
    layer: Annotated[int, Meta(ge=0, lt=limits.MAX_BUFFERS)]


class PoolSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One component of the KV cache, as a rank registers it.

    `num_pages` bounds the page numbers that the rank may name. The order of `buffers` is the
    order of the rows in host memory and part of what makes two pages interchangeable. `window`:
    how many pages before a boundary must be here for a request to resume at it; 0 is all of them.
    `replicated`: every rank of the group holds the same bytes, so that one copy serves them all.
    """

    name: Name
    num_pages: Annotated[int, Meta(ge=1, le=2**40)]
    page_tokens: Annotated[int, Meta(ge=1, le=2**20)]
    window: Annotated[int, Meta(ge=0, le=2**20)] = 0
    replicated: bool = False
    buffers: Annotated[list[BufferSpec], Meta(min_length=1, max_length=limits.MAX_BUFFERS)]


# --- lifeline: client -> control --------------------------------------------------------------


class Register(Message, frozen=True, tag="register"):
    """A rank joins. Beside it: the segment's fd, the rank's own pidfd, then the fds of the
    allocations without a handle."""

    protocol: int
    software: OptionalName
    instance: Name
    rank: Rank
    world_size: Annotated[int, Meta(ge=1, le=limits.MAX_WORLD_SIZE)]
    namespace: Annotated[dict[Name, Text], Meta(max_length=64)]
    epoch: OptionalName
    device: Name
    pid: U32
    next_seq: U63
    allocations: Annotated[list[Allocation], Meta(min_length=1, max_length=limits.MAX_ALLOCATIONS)]
    pools: Annotated[list[PoolSpec], Meta(min_length=1, max_length=limits.MAX_POOLS)]
    supplies: bool = False
    """It answers `Need`."""


class StatusRequest(Message, frozen=True, tag="status"):
    """Answer with a `Status`."""

    protocol: int


class ClearRequest(Message, frozen=True, tag="clear"):
    """Drop every page that no engine is loading right now."""

    protocol: int


class PauseRequest(Message, frozen=True, tag="pause"):
    """The kill switch: while paused, lookups miss and backups are shed; the engine serves on."""

    protocol: int
    paused: bool


class Lookup(Message, frozen=True, tag="lookup"):
    """At which page counts of this chain can a request resume, as far as these pools go? A hit
    leases its pages for the group. At least one of the pools must have window 0."""

    request: U63
    epoch: OptionalName
    rid: Name
    pools: Annotated[list[PoolIndex], Meta(min_length=1, max_length=limits.MAX_POOLS)]
    keys: bytes


class Cancel(Message, frozen=True, tag="cancel"):
    """The request will not load: its lease ends."""

    rid: Name


class Part(Struct, array_like=True, frozen=True):
    """The pages of one pool in a restore, or in what comes before a backup.

    Their keys come next in the message's `keys` blob. `ring` is the absolute position of the
    first page's first token slot in the segment's index ring.
    """

    pool: PoolIndex
    pages: PageCount
    ring: U63


class RestoreItem(Struct, array_like=True, frozen=True):
    """One request's pages in all its pools, restored all or not at all."""

    rid: Name
    parts: Annotated[list[Part], Meta(min_length=1, max_length=limits.MAX_POOLS)]


class Restore(Message, frozen=True, tag="restore"):
    """A step's loads, one verdict for all. `entry` names the group of layer words and the verdict
    word in the segment, `generation` the value that they will get.

    Comes on the lifeline, which is quicker, or on the hot path, which takes any size."""

    epoch: OptionalName
    number: U63
    entry: U32
    generation: U32
    ticket: U32
    fence: U32
    items: Annotated[list[RestoreItem], Meta(min_length=1, max_length=limits.MAX_ITEMS_PER_RESTORE)]
    keys: bytes


AdminRequest = StatusRequest | ClearRequest | PauseRequest
FromRank = Lookup | Cancel | Restore
FromLifeline = Register | FromRank | AdminRequest


# --- lifeline: control -> client --------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """The rank is in. Beside it: control's pidfd, its copier's, and the presence table.

    `routing_id` is the ZeroMQ identity that the rank must use: the proof that a hot-path message
    comes from the process at the other end of this lifeline.
    """

    protocol: int
    software: OptionalName
    routing_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    lease_s: float


class CopierReplaced(Message, frozen=True, tag="copier_replaced"):
    """The rank's copier died and a new one has mapped its pools. Beside it: the new pidfd."""


class PresenceReplaced(Message, frozen=True, tag="presence_replaced"):
    """A larger presence table has taken the place of the one before. Beside it: the table."""


class Refused(Message, frozen=True, tag="refused"):
    """A request that cannot be served. `reason` says why and what to do."""

    reason: Text
    protocol: int


class Status(Message, frozen=True, tag="status_reply"):
    """A snapshot for people and machines; its shape is documented in `tierd.control.status`."""

    data: dict[str, Any]


class Done(Message, frozen=True, tag="done"):
    """An admin request was carried out."""

    detail: dict[str, int]


class LookupReply(Message, frozen=True, tag="lookup_reply"):
    """`lengths`: restorable page counts, ascending; empty is a miss. The lease lasts `lease_s`."""

    request: U63
    lengths: list[PageCount]
    lease_s: float


class Error(Message, frozen=True, tag="error"):
    """The answer to a message that makes no sense. The session goes on."""

    reason: Text


ToLifeline = (
    Welcome | CopierReplaced | PresenceReplaced | LookupReply | Error | Refused | Status | Done
)


# --- hot path: client -> control (ZeroMQ) -----------------------------------------------------


class Flush(Message, frozen=True, tag="flush"):
    """A step's backups, by columns: a struct for each would cost the sender, an engine's scheduler
    thread, more than all else that it does for one. Token slots are valid in the ring once both
    ready words of `ticket` say so; `fence` is the value of the fence word that the copier must
    still find after its copies.

    Row i of `seqs`, `parts` and `parents` is a backup: a node's pages in all its pools, to be kept
    all or not at all. It has the next `parts[i]` rows of the other columns, which are one pool's
    pages each; none, if this rank could not queue it (a tombstone). `parents`: the key of the page
    before its first one, empty if there is none, None if the client cannot tell.

    Row j of `pools`, `pages`, `ring` and `first` is a part. `ring`: the absolute position of its
    first token slot in the segment's index ring; those of all its pages follow. `first`: which key
    of `keys` is that of its first page; the others follow. Parts may share keys, as a window's
    pages do with the prefix's.

    `digits`: in place of `keys`, the same as hexadecimal digits: an engine that has those leaves it
    to the daemon to make bytes of them.
    """

    epoch: OptionalName
    ticket: U32
    fence: U32
    seqs: Annotated[list[U63], Meta(max_length=limits.MAX_ITEMS_PER_FLUSH)]
    parts: Annotated[list[PartCount], Meta(max_length=limits.MAX_ITEMS_PER_FLUSH)]
    parents: Annotated[list[OptionalKey | None], Meta(max_length=limits.MAX_ITEMS_PER_FLUSH)]
    pools: Annotated[list[PoolIndex], Meta(max_length=limits.MAX_PARTS_PER_FLUSH)]
    pages: Annotated[list[PageCount], Meta(max_length=limits.MAX_PARTS_PER_FLUSH)]
    ring: Annotated[list[U63], Meta(max_length=limits.MAX_PARTS_PER_FLUSH)]
    first: Annotated[list[PageCount], Meta(max_length=limits.MAX_PARTS_PER_FLUSH)]
    keys: bytes
    digits: str = ""


class Supply(Message, frozen=True, tag="supply"):
    """The answer to `Need`: all pages before a backup's first one, of the pools without a window.
    Without parts: this rank cannot name them any more."""

    epoch: OptionalName
    seq: U63
    ticket: U32
    fence: U32
    parts: Annotated[list[Part], Meta(max_length=limits.MAX_POOLS)]
    keys: bytes


class Reset(Message, frozen=True, tag="reset"):
    """The rank moves to another epoch; what it offered before is not wanted any more."""

    epoch: OptionalName
    next_seq: U63


FromClient = Flush | Restore | Supply | Reset


# --- hot path: control -> client (ZeroMQ) -----------------------------------------------------


class Acks(Message, frozen=True, tag="acks"):
    """Results of consecutive backups: byte i is 1 if `first_seq + i` is kept, else 0."""

    first_seq: U63
    results: Annotated[bytes, Meta(min_length=1, max_length=limits.MAX_ITEMS_PER_FLUSH)]


class Need(Message, frozen=True, tag="need"):
    """The tier has lost what comes before a backup: name it with `Supply`. The backup, whose ack
    waits for it, keeps those pages on the device."""

    seq: U63


ToClient = Acks | Need | Error


# --- control -> copier ------------------------------------------------------------------------


class HostPool(Struct, frozen=True, kw_only=True):
    """How a pool's slots lie in host memory (see `tierd.wire.geometry.HostLayout`)."""

    block_slots: Size
    chunk_slots: Size
    data_offset: U63


class ChunkLayout(HostPool, frozen=True, kw_only=True):
    """How a pool's slots lie, and the bytes of a page's rows."""

    rows: Annotated[list[Size], Meta(min_length=1, max_length=limits.MAX_BUFFERS)]


class AddChunk(Message, frozen=True, tag="add_chunk"):
    """A host chunk to map and pin. Beside it: its fd. `touch`: every page must be there, though
    the device does not need it. `verify`: an earlier daemon has left it; compare its pages with
    their checksums, if any are to be."""

    chunk: U63
    size: Size
    touch: bool = False
    verify: ChunkLayout | None = None


class DropChunk(Message, frozen=True, tag="drop_chunk"):
    """Unpin and unmap a chunk once no copy uses it; say so."""

    chunk: U63


class Attach(Message, frozen=True, tag="attach"):
    """A rank's pools to map. Beside it: the segment's fd, then the allocations' fds."""

    session: U63
    allocations: list[Allocation]
    pools: list[PoolSpec]
    host_pools: list[HostPool]


class Detach(Message, frozen=True, tag="detach"):
    """The rank is gone: finish or drop its copies, close its mappings, say so."""

    session: U63


class CopyPart(Struct, array_like=True, frozen=True):
    """Pages of one pool in a job.

    `ring`: uint64 blob, the ring position of each page's first token slot. `chunks`: uint64 blob,
    the chunk of each page. `slots`: uint32 blob, its slot within that chunk.
    """

    pool: PoolIndex
    ring: bytes
    chunks: bytes
    slots: bytes


class BackupJob(Message, frozen=True, tag="backup_job"):
    """Copy device pages to slots. `consumed`: once its indices are read, the ring is free up to
    there. Ready when both words of every one of `tickets` are set."""

    job: U63
    session: U63
    tickets: list[U32]
    fence: U32
    consumed: U63
    parts: list[CopyPart]


class RestoreJob(Message, frozen=True, tag="restore_job"):
    """Copy slots to device pages, layer group by layer group, setting layer words on the way and
    the verdict word at the end."""

    job: U63
    session: U63
    ticket: U32
    fence: U32
    consumed: U63
    entry: U32
    generation: U32
    parts: list[CopyPart]


class Ping(Message, frozen=True, tag="ping"):
    """Say that your loop goes round."""


class Shutdown(Message, frozen=True, tag="shutdown"):
    """Finish what is on the wire, close every mapping, exit."""


ToCopier = AddChunk | DropChunk | Attach | Detach | BackupJob | RestoreJob | Ping | Shutdown


# --- copier -> control ------------------------------------------------------------------------


class CopierReady(Message, frozen=True, tag="copier_ready"):
    """The device is open. `detail`: facts about it, for `tierd status`."""

    device: Name
    detail: dict[str, Any]


class ChunkReady(Message, frozen=True, tag="chunk_ready"):
    """`error` empty: the chunk is mapped and pinned. `corrupt`: uint32 blob, slots of pages that
    are not what their checksums say. `joined_bytes`: how much of it lies in huge pages."""

    chunk: U63
    error: Text = ""
    corrupt: bytes = b""
    joined_bytes: U63 = 0


class ChunkDropped(Message, frozen=True, tag="chunk_dropped"):
    """The chunk is not mapped any more."""

    chunk: U63


class Attached(Message, frozen=True, tag="attached"):
    """`error` empty: mapped. `paths`: per pool, the copy path that its geometry got."""

    session: U63
    paths: list[Text]
    error: Text = ""


class Detached(Message, frozen=True, tag="detached"):
    """Nothing of the rank is mapped, or under way, any more."""

    session: U63


class JobDone(Message, frozen=True, tag="job_done"):
    """The copies of a job have retired: nothing of it is on the wire. `ok` false: `error` says why
    (a fence that moved, a page out of range, indices that never came, pages that have changed in
    host memory: `corrupt` is a uint32 blob of them, the number of the part and the position in it
    of each). `seconds`: how long the copier was at it; what two jobs of a direction share counts
    once."""

    job: U63
    ok: bool
    error: Text = ""
    corrupt: bytes = b""
    pages: U63 = 0
    copied_bytes: U63 = 0
    seconds: float = 0.0


class Pong(Message, frozen=True, tag="pong"):
    """The answer to `Ping`."""


FromCopier = CopierReady | ChunkReady | ChunkDropped | Attached | Detached | JobDone | Pong
