"""What an engine gets from a daemon: its pages back, byte for byte, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tier_harness import Daemon, Engine, Shape, eventually, keys, running
from tierd_client import PoolPages

from tierd.wire.limits import MAX_ITEMS_PER_RESTORE

Engines = Callable[..., Engine]

ONE_TOKEN = Shape("kv", page_tokens=1, pages=256, layers=3, row_bytes=512)
LARGE = Shape("kv", page_tokens=64, pages=16, layers=2, row_bytes=1024)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "shapes",
    [
        [ONE_TOKEN],
        [LARGE],
        [Shape("kv", 16, 24, 4, 256), Shape("swa", 16, 24, 1, 64), Shape("mamba", 16, 24, 2, 5000)],
    ],
    ids=["one-token pages", "64-token pages", "three pools"],
)
def test_what_is_backed_up_comes_back_byte_for_byte(
    daemon2: Daemon, engines: Engines, shapes: list[Shape], world_size: int
) -> None:
    engine = engines(daemon2.socket, shapes, world_size=world_size)
    pages = min(shape.pages for shape in shapes) // 2
    assert engine.lookup("a", pages) == 0
    assert engine.back_up("a", pages)
    assert engine.lookup("a", pages + 3) == pages
    assert engine.restored("a", pages, at=pages)
    status = daemon2.status()
    assert [s["rank"] for s in status["sessions"]] == list(range(world_size))
    assert [pool["pages"] for pool in status["pools"]] == [pages] * len(shapes)
    assert [pool["shards"] for pool in status["pools"]] == [world_size] * len(shapes)


def test_a_chain_that_grows_is_kept_page_by_page_and_restored_as_one(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    for turn in range(4):
        assert engine.back_up("a", 2 * turn + 2, first=2 * turn)
    assert engine.back_up("a", 8), "what is here already is kept without a copy"
    assert daemon.status()["copiers"][0]["backup_pages"] == 8
    assert engine.restored("a", 8, at=16)


def test_acks_come_in_order_and_name_the_node(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    seqs = [engine.offer(name, 3, at=4 * n) for n, name in enumerate("abcd")]
    assert engine.settled(seqs[-1])
    assert [(ack.seq, ack.node_id, ack.kept) for ack in engine.acks] == [
        (seq, 3, True) for seq in seqs
    ]
    engine.step()
    assert engine.client.acks() == []


def test_a_page_is_not_visible_before_every_rank_has_it(daemon2: Daemon, engines: Engines) -> None:
    engine = engines(daemon2.socket, world_size=2)
    seq = engine.offer("a", 4)
    engine.ranks[0].client.flush()
    eventually(lambda: daemon2.status()["queue"]["backups"] == 1, "rank 0 has reported")
    assert engine.lookup("a", 4) == 0
    assert engine.settled(seq)
    assert engine.lookup("a", 4) == 4


def test_what_one_rank_never_reports_is_kept_by_none(tmp_path: Path, engines: Engines) -> None:
    # A second for the last rank's report.
    with running(tmp_path / "hasty", devices="host:2", patience=0.5) as daemon:
        engine = engines(daemon.socket, world_size=2)
        engine.offer("a", 4)
        first, second = (rank.client for rank in engine.ranks)
        first.flush()

        def acked() -> bool:
            first.flush()
            engine.acks += first.acks()
            return bool(engine.acks)

        eventually(acked, "rank 0 is told, although rank 1 is silent")
        assert not engine.acks[0].kept
        second.flush()
        eventually(lambda: (second.flush(), second.acks())[1], "rank 1 is told that it is late")
        assert engine.lookup("a", 4) == 0
        eventually(lambda: engine.back_up("a", 4), "what both report in time is kept")


def test_a_full_tier_evicts_the_oldest_chain_from_its_end(tmp_path: Path, engines: Engines) -> None:
    shape = Shape("kv", page_tokens=64, pages=64, layers=2, row_bytes=16 << 10)
    with running(tmp_path / "small", memory="64MiB") as daemon:
        engine = engines(daemon.socket, [shape])
        assert engine.back_up("probe", 1)
        (pool,) = daemon.status()["pools"]
        total = pool["slots_total"]
        assert total < 20
        assert engine.back_up("old", total - 1)
        assert engine.back_up("young", total - 5)
        left = engine.lookup("old", total - 1, rid="load")
        assert left == 5, "its beginning is still there, without a hole"
        assert engine.restored("old", left)
        assert engine.restored("young", total - 5)
        (pool,) = daemon.status()["pools"]
        assert pool["evictions"] == 1 + total - 1 - 5
        assert pool["slots_used"] == total


def test_a_lease_keeps_its_pages_until_they_are_loaded(tmp_path: Path, engines: Engines) -> None:
    shape = Shape("kv", page_tokens=64, pages=64, layers=2, row_bytes=16 << 10)
    with running(tmp_path / "small", memory="64MiB") as daemon:
        engine = engines(daemon.socket, [shape])
        assert engine.back_up("leased", 4)
        assert engine.lookup("leased", 4, rid="r") == 4
        total = daemon.status()["pools"][0]["slots_total"]
        for n in range(3):
            assert engine.back_up(f"flood {n}", total - 4)
        assert engine.restored("leased", 4, rid="r")
        assert engine.back_up("flood 3", total - 4)
        assert engine.back_up("flood 4", total - 4)
        assert engine.lookup("leased", 4) == 0, "the load has ended the lease"


def test_a_cancelled_request_holds_nothing(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    assert engine.lookup("a", 4, rid="r") == 4
    assert daemon.status()["pools"][0]["leased"] == 4
    engine.client.cancel("r")
    eventually(lambda: daemon.status()["pools"][0]["leased"] == 0, "the lease has ended")


@pytest.mark.parametrize(
    "rid", ["", "r" * 300, "lone \ud800 surrogate"], ids=["empty", "long", "no Unicode"]
)
def test_a_request_may_have_any_name(daemon: Daemon, engines: Engines, rid: str) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    assert engine.lookup("a", 4, rid=rid) == 4
    assert engine.restored("a", 4, rid=rid)
    assert engine.lookup("a", 4, rid=rid) == 4
    engine.client.cancel(rid)
    eventually(lambda: not any(p["leased"] for p in daemon.status()["pools"]), "nothing is held")
    assert daemon.status()["counters"]["errors"] == 0


def test_more_than_the_whole_tier_costs_no_page(tmp_path: Path, engines: Engines) -> None:
    shape = Shape("kv", page_tokens=64, pages=64, layers=2, row_bytes=16 << 10)
    with running(tmp_path / "small", memory="64MiB") as daemon:
        engine = engines(daemon.socket, [shape])
        assert engine.back_up("a", 4)
        assert not engine.back_up("huge", 40)
        assert engine.lookup("a", 4) == 4


def test_two_engines_of_one_namespace_share_pages(daemon: Daemon, engines: Engines) -> None:
    first = engines(daemon.socket, instance="first")
    second = engines(daemon.socket, instance="second")
    assert first.back_up("a", 6)
    assert second.lookup("a", 6) == 6
    assert second.restored("a", 6, at=9)
    assert second.back_up("a", 8, first=6)
    assert first.restored("a", 8, at=9)


def test_pages_outlive_the_engine_that_left_them(daemon: Daemon, engines: Engines) -> None:
    first = Engine(daemon.socket, instance="first")
    assert first.back_up("a", 6)
    first.close()
    eventually(lambda: daemon.status()["sessions"] == [], "the first engine is gone")
    assert engines(daemon.socket, instance="second").restored("a", 6)


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": {"model": "m", "weights": "other"}},
        {"shapes": [Shape(layers=3)]},
        {"shapes": [Shape(page_tokens=8, row_bytes=128)]},
        {"world_size": 2},
    ],
    ids=["weights", "layers", "page size", "world size"],
)
def test_engines_of_different_namespaces_never_share(
    daemon2: Daemon, engines: Engines, other: dict[str, object]
) -> None:
    mine = engines(daemon2.socket, instance="mine")
    assert mine.back_up("a", 6)
    theirs = engines(daemon2.socket, instance="theirs", **other)
    assert theirs.lookup("a", 6) == 0
    assert not theirs.restored("a", 6)
    assert theirs.back_up("a", 6)
    assert theirs.restored("a", 6)
    assert mine.restored("a", 6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_reset_nothing_that_was_kept_is_found_and_nothing_new_is_shared(
    daemon2: Daemon, engines: Engines, world_size: int
) -> None:
    engine = engines(daemon2.socket, world_size=world_size, instance="resets")
    other = engines(daemon2.socket, world_size=world_size, instance="other")
    assert engine.back_up("a", 4)
    for rank in engine.ranks:
        rank.client.reset()
    assert engine.lookup("a", 4) == 0
    assert not engine.restored("a", 4)
    assert engine.back_up("b", 4)
    assert engine.restored("b", 4, at=8)
    assert other.lookup("b", 4) == 0, "an epoch belongs to one engine"
    assert other.lookup("a", 4) == 4, "other engines keep theirs"
    for rank in engine.ranks:
        rank.client.reset()
    assert engine.lookup("b", 4) == 0, "nor does an epoch come back"
    eventually(
        lambda: sum(pool["pages"] for pool in daemon2.status()["pools"]) == 4,
        "the memory of the epoch that was left is given back",
    )


def test_an_epoch_ends_with_its_engine(daemon: Daemon, engines: Engines) -> None:
    engine = Engine(daemon.socket, instance="short-lived")
    engine.client.reset()
    assert engine.back_up("a", 4)
    claimed = daemon.status()["memory"]["claimed_bytes"]
    assert claimed > 0
    engine.close()
    eventually(lambda: daemon.status()["memory"]["claimed_bytes"] == 0, "its memory is back")
    assert daemon.status()["pools"] == []


def test_a_namespace_is_forgotten_once_nobody_uses_it_and_none_of_its_pages_is_left(
    tmp_path: Path, engines: Engines
) -> None:
    large = [Shape(row_bytes=64 << 10)]  # 1 MiB a page, 63 in a chunk
    with running(tmp_path / "small", memory="128MiB") as daemon:

        def namespaces() -> int:
            return len(daemon.status()["pools"])

        engines(daemon.socket, instance="one", namespace={"model": "one"}).close()
        eventually(lambda: namespaces() == 0, "the one that has kept nothing is forgotten")
        old = engines(daemon.socket, large, instance="two", namespace={"model": "two"})
        assert old.back_up("a", 4)
        old.close()
        new = engines(daemon.socket, large, instance="three", namespace={"model": "three"})
        assert namespaces() == 2, "pages outlive their engine"
        chains = iter(range(1000))

        def forgotten() -> bool:
            new.back_up(f"chain {next(chains)}", 30)
            return namespaces() == 1

        eventually(forgotten, "the one whose memory others have taken is forgotten")
        assert daemon.status()["counters"]["pages_evicted"] >= 4, "what has gone still counts"


def test_reset_with_work_under_way_keeps_none_of_it(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    offered = [engine.offer(name, 3, at=3 * n) for n, name in enumerate("abc")]
    engine.client.flush()
    engine.client.reset(keep_pending=True)
    acks = engine.client.acks()
    assert [ack.seq for ack in acks] == offered[len(engine.acks) :]
    assert not any(ack.kept for ack in acks)
    assert engine.back_up("d", 3)
    for name in "abc":
        assert engine.lookup(name, 3) == 0


def test_reset_without_pending_gives_no_acks(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    engine.offer("a", 3)
    engine.client.reset()
    assert engine.client.acks() == []
    assert engine.back_up("b", 3)
    assert [ack.seq for ack in engine.acks] == [1]


def test_while_paused_lookups_miss_and_backups_are_shed_for_as_long_as_it_takes(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket, [ONE_TOKEN])
    assert engine.back_up("a", 4)
    daemon.pause(True)
    assert engine.lookup("a", 4) == 0
    # More than the ring of token slots holds: what is shed must not use it up.
    many = 1 << 18
    slots = torch.zeros(many, dtype=torch.int64)
    names = torch.arange(many * 4, dtype=torch.int64).numpy().tobytes()
    for _ in range(5):
        assert not engine.settled(engine.client.backup([PoolPages("kv", names, slots)]))
    daemon.pause(False)
    assert engine.lookup("a", 4) == 4
    assert engine.back_up("b", 4)


def test_clear_drops_what_nobody_is_about_to_load(daemon: Daemon, engines: Engines) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    assert engine.back_up("b", 4, at=8)
    assert engine.lookup("a", 4, rid="r") == 4
    assert daemon.clear() == 4
    assert engine.lookup("b", 4) == 0
    assert engine.restored("a", 4, rid="r")


def test_a_restore_of_pages_that_are_not_here_fails_with_a_verdict(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    assert not engine.restored("never", 4)
    assert not engine.restored("a", 5)
    (restore,) = engine.start_restore("never", 4)
    restore.wait_layer(0)
    restore.wait_layer(1)
    assert not restore.finish()
    assert engine.restored("a", 4)


def test_one_missing_page_fails_the_step_and_the_next_one_goes_on(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 4)
    pages = engine.ranks[0].pages["kv"]
    loads = {
        "good": [pages.named(keys("a", 4), range(8, 12))],
        "bad": [pages.named(keys("b", 2), range(12, 14))],
    }
    assert not engine.client.restore(loads).finish()
    del loads["bad"]
    assert engine.client.restore(loads).finish()
    assert pages.wrong(keys("a", 4), range(8, 12)) == 0


def test_a_step_of_more_requests_than_a_message_carries_fails_at_once(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 1)
    page = engine.ranks[0].pages["kv"].named(keys("a", 1), [0])
    most = [f"request {n}" for n in range(MAX_ITEMS_PER_RESTORE)]
    assert engine.client.restore({rid: [page] for rid in most}).finish()
    assert not engine.client.restore({rid: [page] for rid in [*most, "one more"]}).finish()
    assert daemon.status()["counters"]["errors"] == 0
    assert engine.restored("a", 1)


def test_as_many_restores_as_a_rank_may_have_run_side_by_side(
    daemon: Daemon, engines: Engines
) -> None:
    engine = engines(daemon.socket)
    assert engine.back_up("a", 3)
    for _ in range(5):
        under_way = [engine.start_restore("a", 3, at=3 * n, rid=f"r{n}")[0] for n in range(8)]
        assert all(restore.finish() for restore in under_way)
        for n in range(8):
            assert engine.ranks[0].pages["kv"].wrong(keys("a", 3), range(3 * n, 3 * n + 3)) == 0
