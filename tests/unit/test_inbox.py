"""What a rank reports waits in order, and in bounded memory."""

from __future__ import annotations

from flushes import Row, columns

from tierd.control.groups import INBOX_BYTES, Inbox
from tierd.wire.limits import KEY_BYTES
from tierd.wire.messages import Flush, Part

PAGES = 1 << 15


def a_step(seq: int) -> Flush:
    return a_flush(Row(seq, [Part(0, PAGES, 0)]), keys=bytes(PAGES * KEY_BYTES))


def a_flush(*rows: Row, keys: bytes = b"") -> Flush:
    return Flush(epoch="", ticket=1, fence=0, keys=keys, **columns(rows))


def test_a_full_inbox_takes_nothing_until_something_has_been_looked_at() -> None:
    inbox = Inbox()
    taken = 0
    while inbox.add(a_step(taken)):
        taken += 1
    assert taken == -(-INBOX_BYTES // (PAGES * KEY_BYTES))
    assert inbox.unseen == taken
    inbox.pop()
    assert inbox.add(a_step(taken))
    assert not inbox.add(a_step(taken + 1))
    for seq in range(1, taken + 1):
        message = inbox.first.message
        assert isinstance(message, Flush)
        assert message.seqs == [seq]
        inbox.pop()
    assert not inbox


def test_small_steps_count_too() -> None:
    inbox, nothing = Inbox(), a_flush()
    for _ in range(INBOX_BYTES):
        if not inbox.add(nothing):
            break
    else:
        raise AssertionError("it has no bound")
