"""Messages and memory that make no sense: a clear answer, and nobody else notices."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import msgspec
import pytest
from flushes import Row, columns
from guest import PAGES, ROW, SPEC, Guest, memfd, pool, raw
from tier_harness import DEADLINE_S, Daemon, Engine, eventually, keys, open_files, running
from tierd_client.segment import create_segment

from tierd.channel import ChannelClosed
from tierd.wire import codec, limits, messages
from tierd.wire.messages import Allocation, BufferSpec, Part

UNUSED = count()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all of them: it has to bear them all."""
    with running(tmp_path_factory.mktemp("tier"), devices="host:2") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def neighbour(daemon: Daemon) -> Iterator[Engine]:
    """A well-behaved engine."""
    engine = Engine(daemon.socket, instance="neighbour")
    assert engine.back_up("always", 4)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def nobody_else_notices(daemon: Daemon, neighbour: Engine) -> Iterator[None]:
    copiers = [copier["pid"] for copier in daemon.status()["copiers"]]
    yield
    assert neighbour.client.connected
    assert neighbour.restored("always", 4)
    assert neighbour.back_up(f"new {next(UNUSED)}", 2)
    assert [copier["pid"] for copier in daemon.status()["copiers"]] == copiers
    eventually(
        lambda: [s["instance"] for s in daemon.status()["sessions"]] == ["neighbour"],
        "nothing of the guest is left",
    )


@pytest.fixture
def guests(daemon: Daemon) -> Iterator[Callable[[], Guest]]:
    with ExitStack() as stack:

        def make() -> Guest:
            guest = Guest(daemon.socket)
            stack.callback(guest.close)
            return guest

        yield make


@pytest.fixture
def guest(guests: Callable[[], Guest]) -> Guest:
    return guests()


# --- the lifeline -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "words"), [(0, "upgrade the client"), (99, "upgrade the daemon")]
)
def test_another_protocol_is_told_which_end_to_upgrade(
    guest: Guest, protocol: int, words: str
) -> None:
    reason = guest.refusal(protocol=protocol)
    assert f"the client speaks protocol {protocol}" in reason
    assert words in reason


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (msgspec.msgpack.encode({"op": "dance", "protocol": limits.PROTOCOL_VERSION}), "dance"),
        (
            msgspec.msgpack.encode({"op": "status", "protocol": limits.PROTOCOL_VERSION})[:-3],
            "not a valid message",
        ),
        (b"GET / HTTP/1.1\r\n\r\n", "not a valid message"),
        (b"", "not a valid message"),
        (
            msgspec.msgpack.encode(
                {"op": "pause", "protocol": limits.PROTOCOL_VERSION, "paused": "yes"}
            ),
            "paused",
        ),
    ],
    ids=["unknown op", "cut short", "http", "empty", "wrong type"],
)
def test_nonsense_on_the_lifeline_is_answered_and_hung_up_on(
    daemon: Daemon, payload: bytes, words: str
) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(daemon.socket))
    sock.sendall(codec.frame(payload))
    refused = heard(sock)
    assert words in refused.reason
    assert sock.recv(1) == b"", "the stream may be out of step: it ends"
    sock.close()


def test_a_frame_over_the_limit_is_refused_before_it_is_read(daemon: Daemon) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(daemon.socket))
    sock.sendall(struct.pack("<II", limits.MAX_MESSAGE_BYTES + 1, 0))
    assert "over the limit" in heard(sock).reason
    assert sock.recv(1) == b""
    sock.close()


def test_a_frame_that_never_ends_costs_nothing(daemon: Daemon) -> None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(daemon.socket))
    sock.sendall(struct.pack("<II", 1000, 0) + b"x" * 10)
    assert daemon.status()["pid"] == daemon.pid
    sock.close()


def heard(sock: socket.socket) -> messages.Refused:
    sock.settimeout(DEADLINE_S)
    frames = codec.Frames()
    while True:
        frames.add(sock.recv(1 << 16))
        if (frame := frames.pop()) is not None:
            answer = codec.TO_LIFELINE.decode(frame[0])
            assert isinstance(answer, messages.Refused)
            return answer


# --- registration -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2, 4, 9])
def test_a_registration_with_the_wrong_number_of_descriptors_is_refused(
    daemon: Daemon, guest: Guest, number: int
) -> None:
    fds = (guest.fds + [guest.memory] * 9)[:number]
    assert f"{number} descriptors" in guest.refusal(fds)
    eventually(lambda: open_segments(daemon) == 2, "the neighbour's, and its mapping's")


def open_segments(daemon: Daemon) -> int:
    """Descriptors of segments in control; a mapping has one of its own."""
    return sum("tierd-segment" in what for what in open_files(daemon.pid).values())


def a_segment_of(nbytes: int, seals: int) -> int:
    """A segment whose header is right."""
    fd = memfd(SPEC.nbytes)
    shared = create_segment(SPEC)
    os.pwrite(fd, os.pread(shared.fd, 4096, 0), 0)
    shared.close()
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: a_segment_of(SPEC.nbytes, fcntl.F_SEAL_GROW), "not sealed"),
        (lambda: a_segment_of(SPEC.nbytes - 4096, fcntl.F_SEAL_SHRINK), "claims"),
        (lambda: a_segment_of(1000, fcntl.F_SEAL_SHRINK), "shorter than its header"),
        (lambda: memfd(0, fcntl.F_SEAL_SHRINK), "cannot be mapped"),
        (lambda: memfd(SPEC.nbytes, fcntl.F_SEAL_SHRINK), "not a tierd segment"),
        (lambda: os.open("/dev/null", os.O_RDWR), "cannot be mapped"),
    ],
    ids=["not sealed", "too short", "no header", "empty", "zeros", "no memfd"],
)
def test_a_segment_that_could_kill_its_reader_is_refused(
    guest: Guest, make: Callable[[], int], words: str
) -> None:
    fd = make()
    assert words in guest.refusal([fd, guest.pidfd, guest.memory])
    os.close(fd)


def a_buffer(**changes: Any) -> list[BufferSpec]:
    return [msgspec.structs.replace(pool().buffers[0], **changes)]


HUGE = 1 << 60


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pools": [pool(num_pages=PAGES + 1)]}, "last page ends at byte"),
        ({"pools": [pool(buffers=a_buffer(allocation=1))]}, "`allocation` 1"),
        ({"pools": [pool(buffers=a_buffer(page_stride=ROW - 1))]}, "pages would overlap"),
        ({"pools": [pool(buffers=a_buffer() * 2)]}, "their pages overlap"),
        ({"pools": [pool(), pool(name="swa")]}, "their pages overlap"),
        ({"pools": [pool(), pool()]}, "names one pool twice"),
        ({"pools": [pool(buffers=a_buffer(offset=HUGE))]}, "last page ends at byte"),
        ({"pools": [pool(buffers=a_buffer(layer=4))]}, "layers in `pools`"),
        ({"allocations": [Allocation(size=HUGE)]}, "smaller than its `size`"),
        ({"allocations": [Allocation(size=4096, handle=b"h" * 64)]}, "descriptors"),
        ({"device": "GPU-0"}, "`device` GPU-0 is not served here"),
        ({"rank": 3}, "`rank` 3 in a world of 1"),
        ({"epoch": "somebody else's"}, "`epoch`"),
        ({"pools": []}, "pools"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_geometry_that_reaches_beyond_the_ranks_memory_is_refused(
    guest: Guest, changes: dict[str, Any], words: str
) -> None:
    assert words in guest.refusal(**changes)


def test_a_page_larger_than_all_memory_is_shed_and_holds_nobody_up(guest: Guest) -> None:
    huge = memfd(HUGE)
    buffers = a_buffer(row_bytes=HUGE, page_stride=HUGE)
    answer = guest.register(
        [guest.shared.fd, guest.pidfd, huge],
        allocations=[Allocation(size=HUGE)],
        pools=[pool(num_pages=1, buffers=buffers)],
    )
    assert isinstance(answer, messages.Welcome | messages.Refused)
    if isinstance(answer, messages.Welcome):
        guest.open(answer.routing_id)
        assert not guest.kept(guest.flush(0))
    os.close(huge)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 3}, "`world_size`"),
        ({"namespace": {"model": "another"}}, "`namespace`"),
        ({"pools": [pool(page_tokens=2)]}, "geometry of pool 'kv'"),
        ({"pools": [pool(name="swa")]}, "geometry of pool"),
        ({"rank": 0}, "rank 0 of instance guest is registered already"),
    ],
    ids=["world size", "namespace", "geometry", "pools", "twice"],
)
def test_a_rank_that_does_not_fit_to_the_ones_before_it_is_refused(
    guests: Callable[[], Guest], changes: dict[str, Any], words: str
) -> None:
    first, second, third = guests(), guests(), guests()
    first.enter(world_size=2)
    reason = second.refusal(**{"rank": 1, "world_size": 2, "device": "host:1", **changes})
    assert words in reason
    second.enter(rank=1, world_size=2, device="host:1")  # the same connection may ask again
    assert "registered already" in third.refusal(rank=1, world_size=2)
    for rank in (first, second):
        rank.say(raw(rank.flush(1, 2, keys=b"".join(keys("of both", 2)))))
    for rank in (first, second):
        answer = rank.hear()
        assert isinstance(answer, messages.Acks)
        assert answer.results == b"\1"


# --- the hot path, and lookups ----------------------------------------------------------------

DANCE = msgspec.msgpack.encode({"op": "dance"})


def a_lookup(**changes: Any) -> messages.Lookup:
    message = messages.Lookup(request=1, epoch="", rid="r", pools=[0], keys=b"".join(keys("x", 2)))
    return msgspec.structs.replace(message, **changes)


def a_restore(names: bytes, generation: int, pool: int, entry: int = 0) -> messages.Restore:
    pages = len(names) // limits.KEY_BYTES
    return messages.Restore(
        epoch="",
        number=generation,
        entry=entry,
        generation=generation,
        ticket=1,
        fence=0,
        items=[messages.RestoreItem("r", [Part(pool, pages, 0)])],
        keys=names,
    )


def test_a_stranger_is_told_to_register(guest: Guest) -> None:
    guest.open(b"0123456789abcdef")
    assert "register on the lifeline" in guest.error(messages.Reset(epoch="", next_seq=0))


@pytest.mark.parametrize(
    "what",
    [messages.Cancel(rid="r"), a_lookup(), a_restore(bytes(limits.KEY_BYTES), 1, 0)],
    ids=["cancel", "lookup", "restore"],
)
def test_there_is_nothing_for_a_stranger(guest: Guest, what: messages.FromRank) -> None:
    guest.channel.send(what)
    answer = guest.answer()
    assert isinstance(answer, messages.Refused)
    assert "not registered" in answer.reason
    with pytest.raises(ChannelClosed):
        guest.channel.wait(DEADLINE_S)


def test_whoever_has_left_is_a_stranger(guest: Guest) -> None:
    guest.enter()
    assert guest.kept(guest.flush(1))
    guest.channel.close()

    def forgotten() -> bool:
        guest.say(DANCE)
        answer = guest.hear()
        return isinstance(answer, messages.Error) and "register" in answer.reason

    eventually(forgotten, "its way is closed")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (DANCE, "dance"),
        (b"", "not a valid message"),
        (raw(a_lookup()), "lookup"),
        (raw(messages.Reset(epoch="", next_seq=0))[:-1], "not a valid message"),
        (raw(messages.Reset(epoch="somebody else's", next_seq=0)), "`epoch`"),
        (b"x" * (limits.MAX_MESSAGE_BYTES + 1), "over the limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_message_that_makes_no_sense_is_answered_and_the_session_goes_on(
    guest: Guest, message: bytes, words: str
) -> None:
    guest.enter()
    assert words in guest.error(message)
    assert guest.kept(guest.flush(1, 2))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (DANCE, "dance"),
        (b"", "not a valid message"),
        (raw(messages.Reset(epoch="", next_seq=0)), "reset"),
        (raw(a_lookup())[:-40], "not a valid message"),
        (raw(a_lookup(keys=bytes(63))), "`keys` has 63 bytes"),
        (raw(a_lookup(pools=[3])), "`pool` 3"),
        (raw(a_lookup(pools=[99])), "`$.pools[0]`"),
        (raw(a_lookup(pools=[0, 0])), "names one pool twice"),
        (raw(a_lookup(epoch="somebody else's")), "`epoch`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lookup_that_makes_no_sense_is_answered_and_the_session_goes_on(
    guest: Guest, message: bytes, words: str
) -> None:
    guest.enter()
    assert words in guest.complaint(message)
    assert guest.kept(guest.flush(1, 2))
    guest.channel.send(a_lookup())
    answer = guest.answer()
    assert isinstance(answer, messages.LookupReply)
    assert (answer.request, answer.lengths) == (1, [])


def test_a_message_of_many_frames_is_answered(guest: Guest) -> None:
    guest.enter()
    guest.say(b"one", b"two", b"three")
    answer = guest.hear()
    assert isinstance(answer, messages.Error)
    assert "this one has 3" in answer.reason


def test_a_message_far_over_the_limit_costs_its_sender_the_connection_alone(
    daemon: Daemon, guest: Guest
) -> None:
    guest.enter()
    guest.say(bytes(2 * limits.MAX_MESSAGE_BYTES + 1))
    eventually(lambda: guest.kept(guest.flush(1, 2)), "it is connected again")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row(0, [Part(1, 2, 0)]), "`pool` 1"),
        (Row(0, [Part(0, 1, 0), Part(0, 1, 1)]), "names a pool twice"),
        (Row(0, [Part(0, 2, 0)], b"short"), "`parents`"),
        (Row(0, [Part(0, 3, 0)]), "name key 2; `keys` has 2"),
    ],
    ids=["pool", "twice", "parent", "keys"],
)
def test_a_backup_that_makes_no_sense_names_the_field(guest: Guest, row: Row, words: str) -> None:
    guest.enter()
    assert words in guest.error(guest.flush(1, 2, **columns([row])))


def test_one_bad_backup_of_a_step_is_shed_and_the_others_are_kept(guest: Guest) -> None:
    guest.enter()
    rows = [Row(0, [Part(0, 1, 0)]), Row(1, [Part(7, 1, 1)]), Row(2, [Part(0, 1, 2)])]
    assert "`pool` 7" in guest.error(guest.flush(1, 2, 3, **columns(rows)))
    results = b""
    while len(results) < 3:
        answer = guest.hear()
        assert isinstance(answer, messages.Acks)
        results += answer.results
    assert results == b"\1\0\1"


@pytest.mark.parametrize("digit", ["x", "\u00e9", "\u0661"])
def test_keys_whose_digits_are_none_are_refused(guest: Guest, digit: str) -> None:
    guest.enter()
    good = b"".join(keys("y", 2)).hex()
    assert "not hexadecimal" in guest.error(guest.flush(1, 2, keys=b"", digits=good[:-1] + digit))
    answer = guest.hear()
    assert isinstance(answer, messages.Acks)
    assert answer.results == b"\0"
    assert guest.kept(guest.flush(1, 2, seq=1, keys=b"", digits=good))


def test_digits_and_bytes_name_the_same_pages(guest: Guest) -> None:
    guest.enter()
    blob = b"".join(keys("z", 2))
    assert guest.kept(guest.flush(1, 2, keys=b"", digits=blob.hex().upper()))
    guest.channel.send(a_lookup(keys=blob))
    reply = guest.answer()
    assert isinstance(reply, messages.LookupReply)
    assert reply.lengths == [1, 2]


def test_one_key_twice_in_a_backup_is_refused(guest: Guest) -> None:
    guest.enter()
    assert "one key twice" in guest.error(guest.flush(1, 2, keys=keys("x", 1)[0] * 2))


@pytest.mark.parametrize("number", [PAGES, -1, 1 << 40, -(1 << 63)])
def test_a_page_number_out_of_range_in_the_ring_is_not_kept(guest: Guest, number: int) -> None:
    guest.enter()
    assert not guest.kept(guest.flush(3, number))
    assert guest.kept(guest.flush(3, 4, seq=1))


def test_a_restore_to_pages_out_of_range_fails_with_a_verdict(guest: Guest) -> None:
    guest.enter()
    names = b"".join(keys("to be restored", 2))
    assert guest.kept(guest.flush(1, 2, keys=names))
    guest.segment.restore_ring[:2] = [3, PAGES]
    assert not restored(guest, names, generation=1)
    guest.segment.restore_ring[:2] = [3, 4]
    assert restored(guest, names, generation=2)


@pytest.mark.parametrize("lifeline", [False, True], ids=["hot path", "lifeline"])
def test_a_restore_that_makes_no_sense_still_gets_a_verdict(guest: Guest, lifeline: bool) -> None:
    guest.enter()
    names = b"".join(keys("x", 2))
    assert not restored(guest, names, generation=1, pool=5, lifeline=lifeline)
    answer = guest.answer() if lifeline else guest.hear()
    assert isinstance(answer, messages.Error)
    assert "`pool` 5" in answer.reason
    assert guest.kept(guest.flush(1, 2, keys=names))
    guest.segment.restore_ring[:2] = [3, 4]
    assert restored(guest, names, generation=2, lifeline=lifeline)


def test_a_restore_to_an_entry_that_is_not_there_is_answered(guest: Guest) -> None:
    guest.enter()
    message = a_restore(b"".join(keys("x", 1)), 1, 0, entry=99)
    assert "`entry` 99" in guest.error(message)


def restored(
    guest: Guest, names: bytes, *, generation: int, pool: int = 0, lifeline: bool = False
) -> bool:
    """Ask for a restore into the pages that the ring names; its verdict."""
    guest.segment.awaited[0] = generation
    guest.segment.ready[1] = 1
    message = a_restore(names, generation, pool)
    if lifeline:
        guest.channel.send(message)
    else:
        guest.say(raw(message))
    eventually(lambda: guest.segment.get_verdict(0, generation), "the verdict")
    assert (guest.segment.layers[0, 0]) == generation, "whoever waits for a layer goes on"
    return guest.segment.get_verdict(0, generation) == 1


def test_a_restore_is_made_once_however_often_it_is_asked_for(guest: Guest) -> None:
    guest.enter()
    names = b"".join(keys("asked for twice", 2))
    assert guest.kept(guest.flush(1, 2, keys=names))
    guest.segment.restore_ring[:2] = [3, 4]
    guest.segment.awaited[0] = 1
    guest.segment.ready[2] = 0  # its token slots are not there yet, so it is under way for long
    message = msgspec.structs.replace(a_restore(names, 1, 0), ticket=2)
    guest.say(raw(message))
    assert "under way already" in guest.error(message)
    assert guest.segment.get_verdict(0, 1) == 0
    guest.segment.ready[2] = 2
    eventually(lambda: guest.segment.get_verdict(0, 1) == 1, "it lands")


def test_ranks_that_load_different_pages_as_one_step_are_told_apart(
    guests: Callable[[], Guest],
) -> None:
    first, second = guests(), guests()
    first.enter(world_size=2)
    second.enter(rank=1, world_size=2, device="host:1")
    ranks = (first, second)
    for seq, name in enumerate(("one", "other")):
        for rank in ranks:
            rank.say(raw(rank.flush(1, 2, seq=seq, keys=b"".join(keys(name, 2)))))
        for rank in ranks:
            answer = rank.hear()
            assert isinstance(answer, messages.Acks)
            assert answer.results == b"\1"
    for rank in ranks:
        rank.segment.restore_ring[:2] = [3, 4]
    assert restored(first, b"".join(keys("one", 2)), generation=1)
    assert not restored(second, b"".join(keys("other", 2)), generation=1)
    for rank in ranks:
        assert restored(rank, b"".join(keys("other", 2)), generation=2)


def test_ranks_that_divide_the_same_pages_differently_are_told_apart(
    guests: Callable[[], Guest],
) -> None:
    first, second = guests(), guests()
    first.enter(world_size=2)
    second.enter(rank=1, world_size=2, device="host:1")
    names = keys("divided", 2)
    for rank in (first, second):
        rank.say(raw(rank.flush(1, 2, keys=b"".join(names))))
    for rank in (first, second):
        answer = rank.hear()
        assert isinstance(answer, messages.Acks)
        assert answer.results == b"\1"
        rank.segment.restore_ring[:2] = [3, 4]
    assert restored(first, b"".join(names), generation=1)
    halves = [messages.RestoreItem(rid, [Part(0, 1, at)]) for at, rid in enumerate("rs")]
    message = msgspec.structs.replace(a_restore(b"".join(names), 1, 0), items=halves)
    second.segment.awaited[0] = 1
    second.segment.ready[1] = 1
    second.say(raw(message))
    eventually(lambda: second.segment.get_verdict(0, 1), "the verdict")
    assert second.segment.get_verdict(0, 1) == 2
    for rank in (first, second):
        assert restored(rank, b"".join(names), generation=2)


@pytest.mark.parametrize("ring", [(1 << 63) - 1, (1 << 62) + 1])
def test_positions_that_no_ring_comes_to_are_refused(guest: Guest, ring: int) -> None:
    guest.enter()
    assert "`ring`" in guest.error(guest.flush(1, 2, ring=[ring]))
    assert guest.hear() == messages.Acks(first_seq=0, results=b"\0")
    load = [messages.RestoreItem("r", [Part(0, 2, ring)])]
    message = msgspec.structs.replace(a_restore(b"".join(keys("x", 2)), 1, 0), items=load)
    guest.segment.awaited[0] = 1
    assert "`ring`" in guest.error(message)
    assert guest.segment.get_verdict(0, 1) == 2


def test_what_a_stranger_says_is_quoted_as_one_short_line(daemon: Daemon, guest: Guest) -> None:
    guest.enter()
    forged = "x\n2026-01-31T12:00:00.000Z ERROR tierd.control: all is lost \x1b[31m" + "y" * 9000
    reason = guest.error(msgspec.msgpack.encode({"op": forged}))
    assert len(reason) <= 1000
    assert reason.isprintable()
    assert not any(line.startswith("2026-01-31T12") for line in daemon.log.splitlines())
    assert guest.kept(guest.flush(1, 2))


def test_a_rank_that_goes_on_making_no_sense_does_not_fill_the_log(
    daemon: Daemon, guest: Guest
) -> None:
    guest.enter(instance="a babbler")
    before = daemon.status()["counters"]["errors"]
    for _ in range(200):
        assert "not a valid message" in guest.error(b"nonsense")
    assert daemon.status()["counters"]["errors"] == before + 200, "each one counts"
    lines = [line for line in daemon.log.splitlines() if "engine a babbler" in line]
    lines = [line for line in lines if "bad message" in line]
    assert len(lines) == 8
    assert "bad message number 128 " in lines[-1]
