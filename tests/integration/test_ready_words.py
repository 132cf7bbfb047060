"""A flush that waits for its answer keeps its ready words, whatever is loaded meanwhile."""

from __future__ import annotations

from pathlib import Path

from tier_harness import DEADLINE_S, Engine, eventually, keys, running

from tierd.wire.layout import TICKETS


def test_behind_a_flush_that_is_not_acked_lookups_miss_before_words_run_out(
    tmp_path: Path,
) -> None:
    with running(tmp_path, devices="host:2", patience=30.0) as daemon:
        engine = Engine(daemon.socket, world_size=2, ack_timeout_s=600.0)
        first, second = engine.ranks
        assert engine.back_up("a", 4)
        # The other rank does not report this one yet.
        seq = engine.offer("b", 4, at=8)
        first.client.flush()
        waiting = first.client._tickets.last

        def move_on(left: int) -> None:
            """As if so many flushes and restores had followed."""
            first.client._tickets.last = waiting + TICKETS - 1 - left

        blob = b"".join(keys("a", 4))
        assert first.client.lookup("r", blob), "there are words enough"
        move_on(10)
        assert first.client.lookup("r", blob) == []
        assert first.client.lookup("another", blob) == []
        move_on(3)
        restores = [engine.start_restore("a", 4, rid=f"load {n}") for n in range(4)]
        assert [mine.finish() for mine, _ in restores] == [True] * 3 + [False]
        for _, others in restores:
            others.finish()
        assert first.client._tickets.last == waiting + TICKETS - 1
        second.client.flush()
        assert engine.settled(seq), "its ready words were left alone"
        eventually(lambda: engine.lookup("a", 4) == 4, "words are free again", DEADLINE_S)
        assert engine.restored("b", 4, at=8)
        engine.close()
