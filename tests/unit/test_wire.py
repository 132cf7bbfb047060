"""The codec: every message survives it, and no bytes at all get anything else through it."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from flushes import Row, columns
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from registrations import largest

from tierd.memory.persist import MAX_RECORD_BYTES
from tierd.wire import codec, layout, limits, messages
from tierd.wire.errors import OutOfStepError, ProtocolError
from tierd.wire.geometry import namespace_digest, namespace_record, read_namespace_record
from tierd.wire.messages import CopyPart, Flush, Lookup, Message, Part, Restore

CONVERSATIONS: dict[str, tuple[Any, codec.Decoder[Any]]] = {
    "from lifeline": (messages.FromLifeline, codec.FROM_LIFELINE),
    "to lifeline": (messages.ToLifeline, codec.TO_LIFELINE),
    "from client": (messages.FromClient, codec.FROM_CLIENT),
    "to client": (messages.ToClient, codec.TO_CLIENT),
    "to copier": (messages.ToCopier, codec.TO_COPIER),
    "from copier": (messages.FromCopier, codec.FROM_COPIER),
}

# --- any message ------------------------------------------------------------------------------


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values that a field's type allows, with small collections."""
    match kind:
        case inspect.IntType():
            low = -(2**63) if kind.ge is None else kind.ge
            high = 2**63 - 1 if kind.le is None else kind.le
            return st.integers(low, high if kind.lt is None else kind.lt - 1)
        case inspect.StrType():
            size = min(12, kind.max_length or 12)
            return st.text(min_size=kind.min_length or 0, max_size=size)
        case inspect.BytesType():
            smallest = kind.min_length or 0
            return st.binary(min_size=smallest, max_size=max(smallest, 8))
        case inspect.BoolType():
            return st.booleans()
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.ListType():
            smallest = kind.min_length or 0
            return st.lists(values(kind.item_type), min_size=smallest, max_size=smallest + 2)
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case inspect.AnyType():
            return st.none() | st.integers(0, 9) | st.text(max_size=5) | st.lists(st.booleans())
        case inspect.StructType():
            return structs(kind.cls)
        case inspect.NoneType():
            return st.none()
        case inspect.UnionType():
            return st.one_of(*map(values, kind.types))
    raise NotImplementedError(f"{kind}: teach this strategy the type")


def structs(cls: type) -> st.SearchStrategy[Any]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    fields = {field.name: values(field.type) for field in info.fields}
    if "protocol" in fields:
        fields["protocol"] = st.just(limits.PROTOCOL_VERSION)
    if cls is Part:
        fields["pages"] = st.integers(0, 3)
    return st.builds(cls, **fields).map(fitting)


def resized(column: list[Any], rows: int, more: Any) -> list[Any]:
    return (column + [more] * rows)[:rows]


def fitting(struct: Any) -> Any:
    """The same with blobs as long as the counts beside them, and ranks inside their world."""
    replace = msgspec.structs.replace
    key = b"k" * limits.KEY_BYTES
    match struct:
        case Flush():
            backups = len(struct.seqs)
            counts = [n % 3 for n in resized(struct.parts, backups, 0)]
            parents = [key if p else p for p in resized(struct.parents, backups, None)]
            names = ("pools", "pages", "ring", "first")
            parts = {name: resized(getattr(struct, name), sum(counts), 0) for name in names}
            parts |= {name: [n % 3 for n in parts[name]] for name in ("pages", "first")}
            blobs = {"keys": b"", "digits": 4 * key.hex()} if struct.digits else {"keys": 4 * key}
            return replace(struct, parts=counts, parents=parents, **blobs, **parts)
        case Restore():
            pages = sum(part.pages for item in struct.items for part in item.parts)
            return replace(struct, keys=key * pages)
        case messages.Supply():
            return replace(struct, keys=key * sum(part.pages for part in struct.parts))
        case Lookup():
            pools = list(dict.fromkeys(struct.pools))
            return replace(struct, pools=pools, keys=key * (len(struct.keys) % 5))
        case CopyPart():
            pages = len(struct.slots)
            return replace(
                struct, ring=b"r" * 8 * pages, chunks=b"c" * 8 * pages, slots=b"s" * 4 * pages
            )
        case messages.Allocation():
            return replace(struct, handle=b"h" * 64 if struct.handle else b"")
        case messages.Register():
            pools = [replace(pool, name=f"p{i}") for i, pool in enumerate(struct.pools)]
            return replace(struct, pools=pools, rank=struct.rank % struct.world_size)
    return struct


ALL = [
    pytest.param(cls, decoder, id=f"{name}: {cls.__name__}")
    for name, (union, decoder) in CONVERSATIONS.items()
    for cls in typing.get_args(union)
]


@pytest.mark.parametrize(("cls", "decoder"), ALL)
@given(data=st.data())
def test_every_message_comes_out_as_it_went_in(
    cls: type[Message], decoder: codec.Decoder[Any], data: st.DataObject
) -> None:
    message = data.draw(structs(cls))
    assert decoder.decode(codec.encode(message)) == message


def test_no_two_messages_of_a_conversation_have_one_name() -> None:
    for union, _ in CONVERSATIONS.values():
        names = [cls.__struct_config__.tag for cls in typing.get_args(union)]
        assert len(set(names)) == len(names)


# --- any bytes --------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn) -> tuple[codec.Decoder[Any], bytes]:
    """A message with some of its bytes changed, dropped, doubled or cut off."""
    union, decoder = draw(st.sampled_from(list(CONVERSATIONS.values())))
    data = bytearray(codec.encode(draw(structs(draw(st.sampled_from(typing.get_args(union)))))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["change", "drop", "double", "cut", "insert"])):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "drop":
                del data[at : at + draw(st.integers(1, 9))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 9))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=5))
            case "cut":
                del data[at:]
    return decoder, bytes(data)


@given(damaged())
def test_damaged_bytes_are_a_valid_message_or_a_protocol_error(
    case: tuple[codec.Decoder[Any], bytes],
) -> None:
    decoder, data = case
    try:
        message = decoder.decode(data)
    except ProtocolError:
        return
    codec.check_blobs(message)
    again = decoder.decode(codec.encode(message))
    assert again == message or message != message, "only a NaN differs from itself"


@given(st.sampled_from(list(CONVERSATIONS.values())), st.binary(max_size=200))
def test_arbitrary_bytes_are_a_protocol_error(
    conversation: tuple[Any, codec.Decoder[Any]], data: bytes
) -> None:
    with pytest.raises(ProtocolError):
        conversation[1].decode(data)


# --- what a bad message is told ---------------------------------------------------------------

KEY = b"k" * limits.KEY_BYTES


def flush(**changes: Any) -> dict[str, Any]:
    """A flush of two backups as a map, to be spoilt: one of two pages, and a tombstone."""
    fields = {"op": "flush", "epoch": "", "ticket": 1, "fence": 0, "keys": KEY * 2}
    return fields | columns([Row(3, [Part(0, 2, 100)], KEY), Row(4)]) | changes


def register(**changes: Any) -> dict[str, Any]:
    row = {"allocation": 0, "offset": 0, "page_stride": 64, "row_bytes": 64, "layer": 0}
    pool = {"name": "kv", "num_pages": 4, "page_tokens": 1, "buffers": [row]}
    return {
        "op": "register",
        "protocol": limits.PROTOCOL_VERSION,
        "software": "test 1",
        "instance": "i",
        "rank": 0,
        "world_size": 1,
        "namespace": {},
        "epoch": "",
        "device": "host:0",
        "pid": 1,
        "next_seq": 0,
        "allocations": [{"size": 256}],
        "pools": [pool],
    } | changes


def told(decoder: codec.Decoder[Any], message: dict[str, Any]) -> str:
    with pytest.raises(ProtocolError) as refused:
        decoder.decode(msgspec.msgpack.encode(message))
    return str(refused.value)


def test_the_unspoilt_ones_pass() -> None:
    codec.FROM_CLIENT.decode(msgspec.msgpack.encode(flush()))
    codec.FROM_LIFELINE.decode(msgspec.msgpack.encode(register()))


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (flush(op="flash"), "flash"),
        (flush(op=7), "op"),
        (flush(colour="red"), "colour"),
        (flush(ticket=2**32), r"$.ticket"),
        (flush(ticket=-1), r"$.ticket"),
        (flush(ticket="1"), r"$.ticket"),
        (flush(epoch="e" * 257), r"$.epoch"),
        (flush(seqs=[3, 2**63]), "$.seqs[1]"),
        (flush(seqs=[3]), "`parts` has 2 rows; `seqs` names 1"),
        (flush(seqs=[3] * (limits.MAX_ITEMS_PER_FLUSH + 1)), "$.seqs"),
        (flush(parts=[1, 33]), "$.parts[1]"),
        (flush(parts=[1, -1]), "$.parts[1]"),
        (flush(parts=[1]), "`parts` has 1 rows; `seqs` names 2"),
        (flush(parts=[1, 1]), "`pools` has 1 rows; `parts` names 2"),
        (flush(pools=[32]), "$.pools[0]"),
        (flush(pools=[]), "`pools` has 0 rows; `parts` names 1"),
        (flush(pages=[-2]), "$.pages[0]"),
        (flush(pages=[2, 0]), "`pages` has 2 rows; `parts` names 1"),
        (flush(ring=[2**63]), "$.ring[0]"),
        (flush(ring=[]), "`ring` has 0 rows; `parts` names 1"),
        (flush(first=[-1]), "$.first[0]"),
        (flush(first=[0, 0]), "`first` has 2 rows; `parts` names 1"),
        (flush(first=[1]), "`first` and `pages` name key 2; `keys` has 2"),
        (flush(keys=KEY), "`first` and `pages` name key 1; `keys` has 1"),
        (flush(keys=KEY * 2 + b"k"), "`keys` has 65 bytes"),
        (flush(keys=b"", digits="0" * 129), "`digits` has 129 characters"),
        (flush(keys=b"", digits="0" * 64), "`first` and `pages` name key 1; `keys` has 1"),
        (flush(digits="0" * 128), "one of them"),
        (flush(parents=[b"k" * 31, None]), "31 bytes in `parents`"),
        (flush(parents=[None, b"k" * 33]), "$.parents[1]"),
        (flush(parents=[None]), "`parents` has 1 rows; `seqs` names 2"),
    ],
)
def test_a_bad_flush_is_told_which_field(spoilt: dict[str, Any], reason: str) -> None:
    assert reason in told(codec.FROM_CLIENT, spoilt)


def test_keys_that_many_parts_share_do_not_make_a_message_larger_than_it_may_be() -> None:
    pages = limits.MAX_PAGES_PER_MESSAGE // 4
    rows = [Row(seq, [Part(0, pages, 0)]) for seq in range(5)]
    shared = flush(keys=KEY * pages, **columns(rows) | {"first": [0] * 5})
    assert f"`pages` come to {5 * pages}" in told(codec.FROM_CLIENT, shared)


SMALL = st.lists(st.integers(0, 3), max_size=4)
COLUMNS = dict.fromkeys(("seqs", "parts", "pools", "pages", "ring", "first"), SMALL)


@given(st.fixed_dictionaries(COLUMNS), st.integers(0, 4))
def test_columns_are_refused_by_name_or_every_row_names_what_is_there(
    rows: dict[str, list[int]], keys: int
) -> None:
    spoilt = flush(**rows, parents=[None] * len(rows["seqs"]), keys=KEY * keys)
    message, reason = None, ""
    try:
        message = codec.FROM_CLIENT.decode(msgspec.msgpack.encode(spoilt))
    except ProtocolError as error:
        reason = str(error)
    if message is None:
        assert re.search("`(parts|pools|pages|ring|first|keys)`", reason)
        return
    assert isinstance(message, Flush)
    parts = list(zip(message.pools, message.pages, message.ring, message.first, strict=True))
    assert len(message.seqs) == len(message.parts) == len(message.parents)
    assert sum(message.parts) == len(parts)
    assert all(first + pages <= keys for _, pages, _, first in parts)


def test_a_missing_field_is_named() -> None:
    message = flush()
    del message["fence"]
    assert "`fence`" in told(codec.FROM_CLIENT, message)


@pytest.mark.parametrize(
    ("version", "upgrade"),
    [(limits.PROTOCOL_VERSION - 1, "the client"), (limits.PROTOCOL_VERSION + 1, "the daemon")],
)
def test_another_version_is_told_which_end_to_upgrade_whatever_else_it_says(
    version: int, upgrade: str
) -> None:
    for message in (
        register(protocol=version),
        register(protocol=version, colour="red"),
        {"op": "a later one", "protocol": version},
    ):
        said = told(codec.FROM_LIFELINE, message)
        assert f"the client speaks protocol {version}" in said
        assert f"upgrade {upgrade} " in said


POOL = register()["pools"][0]


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (register(rank=2, world_size=2), "`rank` 2 in a world of 2"),
        (register(world_size=0), "$.world_size"),
        (register(world_size=65), "$.world_size"),
        (register(allocations=[]), "$.allocations"),
        (register(allocations=[{"size": 0}]), "$.allocations[0].size"),
        (register(allocations=[{"size": 2**62 + 1}]), "$.allocations[0].size"),
        (register(allocations=[{"size": 1, "handle": b"h" * 63}]), "`handle` of 63 bytes"),
        (register(pools=[POOL, POOL]), "`pools` names one pool twice"),
        (register(pools=[POOL | {"buffers": []}]), "$.pools[0].buffers"),
        (register(pools=[POOL | {"name": ""}]), "$.pools[0].name"),
        (register(pools=[POOL | {"num_pages": 2**40 + 1}]), "$.pools[0].num_pages"),
        (register(pools=[POOL | {"colour": 1}]), "colour"),
        (register(namespace={"model": "m" * 4097}), "$.namespace[...]"),
    ],
)
def test_a_bad_registration_is_told_which_field(spoilt: dict[str, Any], reason: str) -> None:
    assert reason in told(codec.FROM_LIFELINE, spoilt)


def test_what_a_rank_may_register_fits_into_all_that_is_made_of_it() -> None:
    rank = largest()
    assert codec.FROM_LIFELINE.decode(codec.encode(rank)) == rank
    host = messages.HostPool(
        block_slots=limits.MAX_BYTES, chunk_slots=limits.MAX_BYTES, data_offset=2**63 - 1
    )
    attach = messages.Attach(
        session=2**63 - 1,
        allocations=rank.allocations,
        pools=rank.pools,
        host_pools=[host] * limits.MAX_POOLS,
    )
    assert codec.TO_COPIER.decode(codec.encode(attach)) == attach
    facts = (rank.namespace, rank.world_size, rank.pools, "")
    record = namespace_record(*facts)
    assert len(record) <= MAX_RECORD_BYTES
    assert len(read_namespace_record(record, namespace_digest(*facts)).pools) == limits.MAX_POOLS


def test_a_rank_with_more_buffers_than_it_may_have_is_told_how_many() -> None:
    first, *others = largest().pools
    first = msgspec.structs.replace(first, buffers=[*first.buffers, first.buffers[0]])
    more = msgspec.structs.replace(largest(), pools=[first, *others])
    with pytest.raises(ProtocolError, match="have 8193 buffers; a rank has 8192 at most"):
        codec.FROM_LIFELINE.decode(codec.encode(more))


@pytest.mark.parametrize(
    "part",
    [
        CopyPart(0, ring=b"r" * 8, chunks=b"c" * 16, slots=b"s" * 4),
        CopyPart(0, ring=b"r" * 8, chunks=b"c" * 8, slots=b"s" * 8),
        CopyPart(0, ring=b"r" * 4, chunks=b"c" * 4, slots=b"s" * 2),
    ],
)
def test_a_job_with_blobs_of_different_lengths_is_refused(part: CopyPart) -> None:
    job = messages.BackupJob(job=1, session=1, tickets=[1], fence=0, consumed=0, parts=[part])
    with pytest.raises(ProtocolError, match="differ in length"):
        codec.TO_COPIER.decode(codec.encode(job))


def test_a_message_over_the_limit_is_refused_at_both_ends() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        codec.FROM_CLIENT.decode(bytes(limits.MAX_MESSAGE_BYTES + 1))
    pages = limits.MAX_PAGES_PER_MESSAGE
    lookup = Lookup(request=1, epoch="", rid="r", pools=[0], keys=KEY * pages)
    with pytest.raises(ProtocolError, match=r"Lookup of 16777\d+ bytes .* send fewer pages"):
        codec.encode(lookup)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (codec.FROM_CLIENT, {"op": "flush", "pages": 0}),
        (codec.TO_LIFELINE, {"op": "lookup_reply", "lengths": 0}),
        (codec.TO_LIFELINE, {"op": "status_reply", "data": 0}),
    ],
)
@pytest.mark.parametrize("length", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_collection_that_only_claims_to_be_long_is_refused_without_room_for_it(
    decoder: codec.Decoder[Any], message: dict[str, Any], length: bytes
) -> None:
    head = msgspec.msgpack.encode(message)[:-1]
    with pytest.raises(ProtocolError):
        decoder.decode(head + length)


# --- frames -----------------------------------------------------------------------------------


def cut(frames: codec.Frames, data: bytes) -> list[tuple[bytes, int]]:
    """The frames that are whole with these bytes."""
    frames.add(data)
    return list(iter(frames.pop, None))


@given(
    st.lists(st.tuples(st.binary(max_size=60), st.integers(0, limits.MAX_FDS)), max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_frames_come_out_whole_however_the_stream_was_cut(
    sent: list[tuple[bytes, int]], cuts: list[int]
) -> None:
    stream = b"".join(codec.frame(payload, fds) for payload, fds in sent)
    frames = codec.Frames()
    received = []
    at = turn = 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        received += cut(frames, stream[at : at + size])
        at, turn = at + size, turn + 1
    assert received == sent
    assert frames.pending == 0


def test_an_unfinished_frame_is_pending() -> None:
    frames = codec.Frames()
    stream = codec.frame(b"payload")
    assert cut(frames, stream[:-1]) == []
    assert not frames.ready
    assert frames.pending == len(stream) - 1
    frames.add(stream[-1:])
    assert frames.ready
    assert cut(frames, b"") == [(b"payload", 0)]
    assert not frames.ready


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ((limits.MAX_MESSAGE_BYTES + 1, 0), "over the limit"),
        ((2**32 - 1, 0), "over the limit"),
        ((0, limits.MAX_FDS + 1), "descriptors; the limit"),
    ],
)
def test_an_oversized_frame_is_refused_at_its_header(header: tuple[int, int], reason: str) -> None:
    frames = codec.Frames()
    data = b"".join(n.to_bytes(4, "little") for n in header)
    good = codec.frame(b"before")
    frames.add(good + data)
    assert frames.pop() == (b"before", 0)
    for _ in range(2):  # and it stays so: nothing after it can be told apart
        assert frames.ready
        with pytest.raises(OutOfStepError, match=reason):
            frames.pop()


# --- the document -----------------------------------------------------------------------------

DOCUMENT = (Path(codec.__file__).parents[1] / "PROTOCOL.md").read_text()


def first_cells(section: str) -> list[str]:
    """The names in the first column of a section's tables."""
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def documented() -> dict[str, list[str]]:
    """Per message or struct of the document, its fields."""
    sections = re.split(r"^##+ ", DOCUMENT, flags=re.MULTILINE)
    return {
        match[1]: first_cells(section)
        for section in sections
        if (match := re.match(r"`(\w+)`\n", section))
    }


def test_the_document_describes_every_message_of_a_client_field_by_field() -> None:
    structs: dict[str, type] = {
        cls.__struct_config__.tag: cls
        for name in ("from lifeline", "to lifeline", "from client", "to client")
        for cls in typing.get_args(CONVERSATIONS[name][0])
    }
    parts = (messages.Allocation, messages.PoolSpec, messages.BufferSpec, Part)
    structs |= {cls.__name__: cls for cls in (*parts, messages.RestoreItem)}
    assert documented() == {name: list(cls.__struct_fields__) for name, cls in structs.items()}


def test_the_document_has_the_limits_and_the_version() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|", DOCUMENT, re.MULTILINE))
    ours = {k: str(v) for k, v in vars(limits).items() if k.startswith(("MAX_", "KEY_"))}
    assert rows == ours
    assert f"protocol version {limits.PROTOCOL_VERSION}." in DOCUMENT


def test_the_document_has_the_segments_offsets() -> None:
    spec = layout.SegmentSpec(8, 8, 5)
    memory = bytearray(spec.nbytes)
    segment = layout.Segment(memory, spec)
    base = np.frombuffer(memory, np.uint8).ctypes.data
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (uint\d+)", DOCUMENT, re.MULTILINE)
    seen = {name: (int(offset), dtype) for offset, name, dtype in rows if hasattr(segment, name)}
    names = ("fence", "consumed", "verdict", "awaited", "ready", "layers")
    fields = {name: getattr(segment, name) for name in names}
    assert seen == {n: (f.ctypes.data - base, str(f.dtype)) for n, f in fields.items()}
    assert f"{layout.SEGMENT_MAGIC:#x}" in DOCUMENT
    shapes = {f"[{n}]" for n in (layout.RESTORE_ENTRIES, layout.TICKETS)}
    assert all(shape in DOCUMENT for shape in shapes)
