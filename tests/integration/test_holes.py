"""What the tier evicted while the device still held it comes back with the next backup after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tier_harness import Daemon, Engine, eventually, keys, running

Engines = Callable[..., Engine]


def answer(engine: Engine, name: str, pages: int) -> list[int]:
    """One step, in which every rank names the first pages of a chain if it is asked for them.

    Returns: the numbers that some rank was asked about.
    """
    engine.step()
    asked = []
    for rank in engine.ranks:
        for need in rank.client.needs():
            asked.append(need.seq)
            named = [pool.named(keys(name, pages), range(pages)) for pool in rank.pages.values()]
            rank.client.supply(need.seq, named)
    return asked


def ends(engine: Engine, seq: int, name: str, pages: int) -> bool:
    """Step and answer until a backup is acked on every rank; whether it was kept."""

    def acked() -> list[bool]:
        answer(engine, name, pages)
        return [ack.kept for ack in (*engine.acks, *engine.others_acks) if ack.seq == seq]

    eventually(lambda: len(acked()) == len(engine.ranks), f"backup {seq} is acked")
    (kept,) = set(acked())
    return kept


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_prefix_that_was_evicted_is_copied_again_with_what_comes_after_it(
    daemon2: Daemon, engines: Engines, world_size: int
) -> None:
    engine = engines(daemon2.socket, world_size=world_size, supplies=True)
    assert engine.back_up("a", 4)
    daemon2.clear()
    assert engine.lookup("a", 4) == 0
    seq = engine.offer("a", 8, first=4)
    assert ends(engine, seq, "a", 4)
    assert daemon2.status()["counters"]["pages_healed"] == 4
    assert engine.lookup("a", 8, rid="load") == 8
    assert engine.restored("a", 8, rid="load")


def test_only_what_is_missing_is_copied(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket, supplies=True)
    assert engine.back_up("a", 4)
    daemon.clear()
    assert engine.back_up("a", 2)
    seq = engine.offer("a", 6, first=4)
    assert ends(engine, seq, "a", 4)
    assert daemon.status()["counters"]["pages_healed"] == 2
    assert engine.restored("a", 6)


def test_nobody_is_asked_where_nothing_is_missing(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket, supplies=True)
    assert engine.back_up("a", 4)
    seq = engine.offer("a", 8, first=4)
    asked = []

    def acked() -> bool:
        asked.extend(answer(engine, "a", 4))
        return any(ack.seq == seq for ack in engine.acks)

    eventually(acked, "the backup is acked")
    assert asked == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_does_not_answer_costs_the_prefix_and_nothing_else(
    tmp_path: Path, engines: Engines, world_size: int
) -> None:
    # Two seconds for the answer, and for the last rank's report.
    with running(tmp_path / "hasty", devices="host:2", patience=1.0) as daemon:
        engine = engines(daemon.socket, world_size=world_size, supplies=True)
        eventually(lambda: engine.back_up("a", 4), "it is kept")
        daemon.clear()
        eventually(lambda: engine.back_up("a", 8, first=4), "it is kept without what precedes it")
        assert engine.lookup("a", 8) == 0
        assert daemon.status()["counters"]["pages_healed"] == 0
        eventually(lambda: engine.back_up("b", 4), "the next backup is not held up")


def test_a_prefix_that_cannot_be_named_any_more_is_given_up_at_once(
    tmp_path: Path, engines: Engines
) -> None:
    # More time for the answer than this test has.
    with running(tmp_path / "patient", patience=100.0) as daemon:
        engine = engines(daemon.socket, supplies=True)
        assert engine.back_up("a", 4)
        daemon.clear()
        seq = engine.offer("a", 8, first=4)

        def asked() -> bool:
            engine.step()
            for need in engine.client.needs():
                engine.client.supply(need.seq, [])
                return True
            return False

        eventually(asked, "the rank is asked")
        assert engine.settled(seq)


def test_an_engine_that_cannot_answer_is_not_asked(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    daemon.clear()
    seq = engine.offer("a", 8, first=4)
    assert ends(engine, seq, "a", 4)
    assert daemon.status()["counters"]["pages_healed"] == 0
