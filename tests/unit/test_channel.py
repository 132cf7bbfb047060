"""Messages and descriptors over a real socket pair, and what a bad peer can do: nothing."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from descriptors import descriptors_left, open_descriptors, opened_since
from hypothesis import given, settings
from hypothesis import strategies as st

from tierd.channel import READS, Channel, ChannelClosed, close_all
from tierd.wire import codec, limits
from tierd.wire.errors import OutOfStepError, ProtocolError
from tierd.wire.messages import AddChunk, Done, ToLifeline

PATIENCE_S = 120.0
Ends = tuple["Channel[ToLifeline]", "Channel[ToLifeline]"]


def open_pair(*, max_queued: int = 64 << 20) -> Ends:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return (
        Channel(ours, codec.TO_LIFELINE, max_queued=max_queued),
        Channel(theirs, codec.TO_LIFELINE),
    )


@pytest.fixture
def no_leak() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert opened_since(before) == [], "a descriptor was leaked"


@pytest.fixture
def ends(no_leak: None) -> Iterator[Ends]:
    pair = open_pair()
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def raw(no_leak: None) -> Iterator[tuple[socket.socket, Channel[ToLifeline]]]:
    """A peer that says what it likes, and the channel that listens to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(theirs, codec.TO_LIFELINE)
    yield ours, channel
    ours.close()
    channel.close()


def note(number: int, nbytes: int = 0) -> Done:
    """A message that can be told from others, of about so many bytes."""
    return Done(detail={"number": number} | {f"{i:_>1000}": i for i in range(nbytes // 1000)})


def memory(text: str) -> int:
    fd = os.memfd_create(text)
    os.write(fd, text.encode())
    return fd


def content(fd: int) -> str:
    return os.pread(fd, 100, 0).decode()


# --- whole messages ---------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 10, 3_000, 300_000]), st.integers(0, 4)),
        min_size=1,
        max_size=8,
    )
)
def test_messages_and_their_descriptors_arrive_whole_and_in_order(
    sent: list[tuple[int, int]],
) -> None:
    writer, reader = open_pair()
    got: list[tuple[ToLifeline, list[str]]] = []

    def read() -> None:
        while len(got) < len(sent):
            for message, fds in reader.wait(PATIENCE_S):
                got.append((message, [content(fd) for fd in fds]))
                close_all(fds)

    thread = threading.Thread(target=read)
    thread.start()
    expected = []
    for number, (padding, count) in enumerate(sent):
        fds = [memory(f"{number}.{i}") for i in range(count)]
        writer.send(note(number, padding), fds)
        close_all(fds)  # the channel has its own
        expected.append((note(number, padding), [f"{number}.{i}" for i in range(count)]))
    writer.drain(PATIENCE_S)
    thread.join()
    assert got == expected
    writer.close()
    reader.close()


def test_to_read_a_small_message_takes_little_memory(ends: Ends) -> None:
    """What is taken large and given back small, for each message, makes a heap grow."""
    writer, reader = ends
    writer.send(note(1))
    assert len(reader.receive()) == 1  # what the first one imports and keeps
    writer.send(note(2))
    tracemalloc.start()
    try:
        assert len(reader.receive()) == 1
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 << 10


def test_as_many_descriptors_as_a_message_may_have(ends: Ends) -> None:
    writer, reader = ends
    one = memory("one")
    writer.send(note(1), [one] * limits.MAX_FDS)
    ((message, fds),) = reader.wait(PATIENCE_S)
    assert message == note(1)
    assert {content(fd) for fd in fds} == {"one"}
    assert len(set(fds)) == limits.MAX_FDS
    close_all(fds)
    with pytest.raises(ProtocolError, match=f"takes {limits.MAX_FDS}"):
        writer.send(note(2), [one] * (limits.MAX_FDS + 1))
    os.close(one)


def test_a_descriptor_that_is_none_costs_no_other(ends: Ends) -> None:
    writer, reader = ends
    good = memory("good")
    with pytest.raises(OSError, match="Bad file descriptor"):
        writer.send(note(1), [good, 1 << 20])
    writer.send(note(2), [good])  # the conversation goes on
    ((message, fds),) = reader.wait(PATIENCE_S)
    assert message == note(2)
    close_all([good, *fds])


def test_without_a_descriptor_left_a_message_that_carries_one_ends_the_channel(ends: Ends) -> None:
    writer, reader = ends
    kept = memory("kept")
    writer.send(note(1))
    with descriptors_left(1), pytest.raises(ChannelClosed):
        writer.send(note(2), [kept, kept])
    assert writer.closed, "the other side would never hear of it"
    ((message, fds),) = reader.wait(PATIENCE_S)
    assert (message, fds) == (note(1), [])
    with pytest.raises(ChannelClosed):
        reader.wait(PATIENCE_S)
    os.close(kept)


def test_waiting_ends_in_time_when_nothing_comes(ends: Ends) -> None:
    assert ends[0].wait(0.01) == []
    assert ends[0].receive() == []


def test_waiting_writes_what_is_still_queued(ends: Ends) -> None:
    writer, reader = ends
    large = note(1, 2_000_000)
    writer.send(large)
    assert writer.wants_write

    def answer() -> None:
        assert [message for message, _ in reader.wait(PATIENCE_S)] == [large]
        reader.send(note(2))

    thread = threading.Thread(target=answer)
    thread.start()
    assert [message for message, _ in writer.wait(PATIENCE_S)] == [note(2)]
    assert not writer.wants_write
    thread.join()


@pytest.mark.parametrize("count", [READS - 1, READS, READS + 1])
def test_what_has_been_read_is_not_kept_for_later(ends: Ends, count: int) -> None:
    writer, reader = ends
    kept = memory("kept")
    for number in range(count):  # a read for each of them, because of its descriptor
        writer.send(note(number), [kept])
    received: list[ToLifeline] = []
    while select.select([reader], [], [], 0)[0]:
        for message, fds in reader.receive():
            received.append(message)
            close_all(fds)
    assert received == [note(number) for number in range(count)]
    os.close(kept)


def test_a_sender_that_never_pauses_is_read_in_turns(ends: Ends) -> None:
    writer, reader = ends
    finished = threading.Event()

    def flood() -> None:
        try:
            while not finished.is_set():
                writer.send(note(1, 100_000))
                writer.drain(1)
        except ChannelClosed:
            pass

    thread = threading.Thread(target=flood)
    thread.start()
    total = 0
    while total < 100:
        total += len(reader.receive())  # returns, again and again
    finished.set()
    while thread.is_alive():
        reader.wait(0.01)
        thread.join(0.001)


def test_messages_can_be_taken_one_at_a_time(ends: Ends) -> None:
    writer, reader = ends
    kept = memory("kept")
    for number in range(3):
        writer.send(note(number), [kept] * number)
    for number in range(3):
        received = reader.next()
        assert received is not None
        message, fds = received
        assert (message, len(fds)) == (note(number), number)
        close_all(fds)
    assert not reader.has_message
    assert reader.next() is None
    writer.send(note(3))
    writer.send(note(4))
    assert reader.next() == (note(3), [])
    assert reader.has_message, "although the socket has nothing to read"
    writer.close()
    assert reader.ended
    assert reader.next() == (note(4), [])
    with pytest.raises(ChannelClosed):
        reader.next()
    assert reader.closed
    os.close(kept)


# --- the end ----------------------------------------------------------------------------------


def test_what_was_sent_before_the_end_is_received_before_it(ends: Ends) -> None:
    writer, reader = ends
    writer.send(note(1))
    writer.close()
    writer.close()
    assert [message for message, _ in reader.wait(PATIENCE_S)] == [note(1)]
    with pytest.raises(ChannelClosed):
        reader.wait(PATIENCE_S)
    assert reader.closed
    for use in (reader.receive, lambda: reader.send(note(2)), lambda: writer.send(note(2))):
        with pytest.raises(ChannelClosed):
            use()


def test_writing_to_a_peer_that_has_gone_ends_the_channel(ends: Ends) -> None:
    writer, reader = ends
    reader.close()
    with pytest.raises(ChannelClosed):
        writer.send(note(1))
    assert writer.closed


def test_a_peer_that_stops_reading_is_given_up_and_its_descriptors_are_closed(
    no_leak: None,
) -> None:
    writer, reader = open_pair(max_queued=1 << 20)
    kept = memory("kept")

    def send_on_and_on() -> None:
        for number in range(1000):
            writer.send(note(number, 50_000), [kept])

    with pytest.raises(ChannelClosed):
        send_on_and_on()
    assert writer.closed
    assert not writer.wants_write
    received = 0
    while not reader.closed:
        with contextlib.suppress(ChannelClosed):
            for _, fds in reader.wait(PATIENCE_S):
                received += len(fds)
                close_all(fds)
    assert 0 < received < 1000
    os.close(kept)


def test_many_small_messages_count_as_what_they_cost() -> None:
    writer, reader = open_pair(max_queued=1 << 20)
    with contextlib.suppress(ChannelClosed):
        for _ in range(10_000):
            writer.send(note(1))
    assert writer.closed, "at a tenth of that many bytes"
    reader.close()


def test_draining_ends_in_time_when_the_peer_does_not_read(ends: Ends) -> None:
    ends[0].send(note(1, 5_000_000))
    ends[0].drain(0.01)
    assert ends[0].wants_write


def test_the_credentials_are_those_of_the_other_process(ends: Ends) -> None:
    assert ends[0].peer() == (os.getpid(), os.getuid(), os.getgid())


# --- bad peers --------------------------------------------------------------------------------


def rights(fds: list[int]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]


GOOD = codec.encode(note(1))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (codec.frame(b"\xc1"), "not a valid message"),
        (codec.frame(codec.encode(AddChunk(chunk=1, size=1))), "add_chunk"),
        (codec.frame(GOOD, 3), "announces 3 descriptors; 1 came"),
        (b"\xff" * 8, "over the limit"),
        (b"\0\0\0\0" + b"\xff" * 4, "descriptors; the limit"),
    ],
)
def test_nonsense_is_an_error_and_leaks_no_descriptor(
    raw: tuple[socket.socket, Channel[ToLifeline]], sent: bytes, reason: str
) -> None:
    peer, channel = raw
    fd = memory("sent along")
    # A good message before it: its descriptor must not be lost with it.
    peer.sendmsg([codec.frame(GOOD, 1)], rights([fd]))
    peer.sendmsg([sent], rights([fd]))
    os.close(fd)
    with pytest.raises(ProtocolError, match=reason):
        channel.receive()


def test_after_one_message_that_makes_no_sense_the_next_one_may(
    raw: tuple[socket.socket, Channel[ToLifeline]],
) -> None:
    peer, channel = raw
    fd = memory("sent along")
    peer.sendmsg([codec.frame(b"\xc1", 1)], rights([fd]))
    peer.sendall(codec.frame(GOOD) + b"\xff" * 8)
    os.close(fd)
    with pytest.raises(ProtocolError, match="not a valid message") as error:
        channel.next()
    assert not isinstance(error.value, OutOfStepError)
    assert channel.next() == (note(1), [])
    for _ in range(2):
        with pytest.raises(OutOfStepError):
            channel.next()


def test_more_descriptors_than_a_message_may_have_are_an_error(
    raw: tuple[socket.socket, Channel[ToLifeline]],
) -> None:
    peer, channel = raw
    fd = memory("many")
    peer.sendmsg([codec.frame(GOOD, 1)], rights([fd] * 200))
    os.close(fd)
    with pytest.raises(ProtocolError, match="too many"):
        channel.receive()


def test_descriptors_that_no_message_announces_are_not_hoarded(
    raw: tuple[socket.socket, Channel[ToLifeline]],
) -> None:
    peer, channel = raw
    fd = memory("stray")
    frame = codec.frame(codec.encode(note(1, 100_000)))

    def send_byte_by_byte() -> None:
        for at in range(1000):
            peer.sendmsg([frame[at : at + 1]], rights([fd] * 20))
            channel.receive()

    with pytest.raises(ProtocolError, match="no message announces"):
        send_byte_by_byte()
    channel.close()
    os.close(fd)


def test_half_a_message_and_then_the_end_is_the_end(
    raw: tuple[socket.socket, Channel[ToLifeline]],
) -> None:
    peer, channel = raw
    peer.sendall(codec.frame(GOOD)[:-1])
    assert channel.receive() == []
    peer.close()
    with pytest.raises(ChannelClosed):
        channel.receive()
