"""What a rank reports waits in order, and in bounded memory."""

from __future__ import annotations

from tierd.control.groups import INBOX_BYTES, Inbox
from tierd.wire.limits import KEY_BYTES
from tierd.wire.messages import BackupItem, Flush, Part

PAGES = 1 << 15


def a_step(seq: int) -> Flush:
    parts = [Part(0, PAGES, 0)]
    return Flush("", 1, 0, [BackupItem(seq, False, parts)], bytes(PAGES * KEY_BYTES))


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
        assert message.items[0].seq == seq
        inbox.pop()
    assert not inbox


def test_small_steps_count_too() -> None:
    inbox, nothing = Inbox(), Flush("", 1, 0, [], b"")
    for _ in range(INBOX_BYTES):
        if not inbox.add(nothing):
            break
    else:
        raise AssertionError("it has no bound")
