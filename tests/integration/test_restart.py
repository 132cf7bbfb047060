"""The daemon dies, ends or is upgraded, and its successor has the pages; the engine notices a
pause."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tier_harness import (
    Daemon,
    Engine,
    RankProcess,
    Shape,
    eventually,
    freeze,
    is_dead,
    keys,
    running,
    shared_files,
)

from tierd.wire import geometry, layout

Engines = Callable[..., Engine]


@pytest.fixture
def pages() -> Iterator[Path]:
    """A directory in memory."""
    directory = Path(tempfile.mkdtemp(prefix="tierd-test-", dir="/dev/shm"))
    yield directory / "pages"
    shutil.rmtree(directory)


@pytest.fixture
def lasting(tmp_path: Path, pages: Path) -> Iterator[Daemon]:
    """A daemon whose pages outlive it."""
    with running(tmp_path / "run", persist=pages) as daemon:
        yield daemon


def restarted(daemon: Daemon, *engines: Engine) -> None:
    """Start the daemon again; its engines find it by themselves."""
    daemon.start()
    for engine in engines:
        eventually(engine.connected, "the new daemon is used")
        eventually(lambda e=engine: e.back_up("warm", 1, at=31), "it serves again")


@pytest.mark.parametrize("death", ["killed", "ended"])
def test_a_new_daemon_has_the_pages_of_the_last_one(
    lasting: Daemon, engines: Engines, death: str
) -> None:
    engine = engines(lasting.socket)
    assert engine.back_up("a", 6)
    assert engine.back_up("a", 10, first=6)
    assert engine.back_up("b", 4, at=16)
    before = lasting.status()["pools"]
    if death == "killed":
        lasting.kill()
    else:
        lasting.stop()
    eventually(lambda: not engine.connected(), "the engine notices")
    restarted(lasting, engine)
    assert engine.lookup("a", 10) == 10
    assert engine.restored("a", 10)
    assert engine.restored("b", 4)
    assert engine.lookup("c", 4) == 0
    (pool,) = lasting.status()["pools"]
    assert (pool["pages"], pool["slots_used"]) == (15, 15)
    assert pool["namespace"] == before[0]["namespace"]
    assert "took over 14 pages" in lasting.log


@pytest.mark.slow
def test_pages_are_there_before_any_engine_comes(lasting: Daemon, engines: Engines) -> None:
    engine = engines(lasting.socket)
    assert engine.back_up("a", 6)
    engine.close()
    lasting.kill()
    lasting.start()
    (pool,) = lasting.status()["pools"]
    assert (pool["pool"], pool["pages"], pool["page_tokens"]) == ("kv", 6, 4)
    another = engines(lasting.socket, instance="another")
    eventually(lambda: another.lookup("a", 6) == 6, "its copier has pinned the old chunks")
    assert another.restored("a", 6)
    assert engines(lasting.socket, namespace={"model": "other"}, instance="o").lookup("a", 6) == 0


def test_what_was_under_way_is_dropped_and_can_come_again(
    lasting: Daemon, engines: Engines
) -> None:
    engine = engines(lasting.socket)
    assert engine.back_up("a", 4)
    freeze(lasting.copier_pid())
    engine.offer("b", 4, at=8)
    engine.step()
    eventually(lambda: lasting.status()["queue"]["backup_pages"] == 4, "it is under way")
    (copier,) = lasting.kill()
    copier.resume()
    eventually(lambda: not engine.connected(), "the engine notices")
    restarted(lasting, engine)
    assert engine.lookup("b", 4) == 0
    (pool,) = lasting.status()["pools"]
    assert pool["slots_used"] == 5
    assert engine.back_up("b", 4, at=8)
    assert engine.restored("a", 4)
    assert engine.restored("b", 4, at=8)


def test_a_stopped_copier_of_the_last_daemon_never_writes_into_what_the_next_one_has(
    tmp_path: Path, lasting: Daemon, pages: Path, engines: Engines
) -> None:
    engine = engines(lasting.socket)
    assert engine.back_up("a", 4)
    freeze(lasting.copier_pid())
    engine.offer("late", 4, at=8)
    engine.step()
    eventually(lambda: lasting.status()["queue"]["backup_pages"] == 4, "it is under way")
    (copier,) = lasting.kill()
    assert not is_dead(copier.pid)
    eventually(lambda: not engine.connected(), "the engine notices")
    with running(tmp_path / "run", persist=pages, patience=0.2) as daemon:
        assert is_dead(copier.pid), "it could still have written"
        assert f"copier of the last daemon (pid {copier.pid}) does not end" in daemon.log
        eventually(engine.connected, "the new daemon is used")
        eventually(lambda: engine.restored("a", 4), "its copier has pinned the old chunks")
        assert engine.lookup("late", 4) == 0


def test_two_ranks_get_their_own_shards_back(tmp_path: Path, pages: Path, engines: Engines) -> None:
    with running(tmp_path / "run", devices="host:2", persist=pages) as daemon:
        engine = engines(daemon.socket, world_size=2)
        assert engine.back_up("a", 6)
        daemon.kill()
        eventually(lambda: not engine.connected(), "the engine notices")
        restarted(daemon, engine)
        assert engine.restored("a", 6)


def test_windows_come_back_with_their_chains(lasting: Daemon, engines: Engines) -> None:
    shapes = [Shape(), Shape(name="swa", layers=1)]
    engine = engines(lasting.socket, shapes)
    assert engine.back_up("a", 6)
    lasting.kill()
    eventually(lambda: not engine.connected(), "the engine notices")
    restarted(lasting, engine)
    assert engine.restored("a", 6)
    assert {pool["pool"]: pool["pages"] for pool in lasting.status()["pools"]} == {
        "kv": 7,
        "swa": 7,
    }


@pytest.mark.slow
def test_a_smaller_memory_keeps_a_part(tmp_path: Path, pages: Path, engines: Engines) -> None:
    # Pages of 4 MiB: some 15 in a chunk.
    shapes = [Shape(pages=48, layers=2, row_bytes=256 << 10)]
    with running(tmp_path / "run", persist=pages, memory="256MiB") as daemon:
        engine = engines(daemon.socket, shapes)
        assert engine.back_up("a", 40)
        daemon.stop()
    with running(tmp_path / "run", persist=pages, memory="64MiB") as daemon:
        assert "there is no room for them" in daemon.log
        (status,) = daemon.status()["pools"]
        assert 10 < status["pages"] < 16
        engine = engines(daemon.socket, shapes, instance="next")
        found = engine.lookup("a", 40)
        assert 5 <= found < 16  # leases hold half of a pool at most
        assert engine.restored("a", found)
        assert len(list(pages.glob("*.chunk"))) == 1


def test_pages_of_an_epoch_of_one_engine_alone_are_not_taken_over(
    lasting: Daemon, engines: Engines
) -> None:
    engine = engines(lasting.socket)
    assert engine.back_up("a", 4)
    engine.client.reset()
    assert engine.back_up("mine", 4, at=8)
    lasting.kill()
    eventually(lambda: not engine.connected(), "the engine notices")
    restarted(lasting, engine)
    assert engine.lookup("mine", 4) == 0
    assert "those of an epoch of one engine alone" in lasting.log
    other = engines(lasting.socket, instance="other")
    eventually(lambda: other.lookup("a", 4) == 4, "its copier has pinned the old chunks")
    assert other.restored("a", 4)


def overwrite(file: Path, offset: int, value: bytes) -> None:
    with file.open("r+b") as chunk:
        chunk.seek(offset)
        chunk.write(value)


NONSENSE = {
    "version": "of layout version",
    "namespace": "nothing says of which namespace",
    "slots": "lie in another way",
    "magic": "that nobody had used",
    "world_size": "a shard that their namespace does not have",
    "pool": "has no such pool",
}


def test_chunks_that_do_not_fit_are_dropped_and_it_is_said_why(
    lasting: Daemon, pages: Path, engines: Engines
) -> None:
    names = ["good", *NONSENSE]
    models = [engines(lasting.socket, instance=n, namespace={"model": n}) for n in names]
    for engine in models:
        assert engine.back_up("a", 4)
    lasting.stop()
    for chunk in pages.glob("*.chunk"):
        data = chunk.read_bytes()[: layout.CHUNK_HEADER.itemsize]
        digest = layout.chunk_header(bytearray(data))["namespace"][0].tobytes()
        (model,) = [
            name for name, engine in zip(names, models, strict=True) if engine.digest() == digest
        ]
        if model in NONSENSE:
            dtype, offset = layout.CHUNK_HEADER.fields[model][:2]
            overwrite(chunk, offset, b"\x07" * min(dtype.itemsize, 32))
    for engine in models:
        eventually(lambda e=engine: not e.connected(), "the engine notices")
    restarted(lasting, *models)
    for reason in NONSENSE.values():
        assert reason in lasting.log
    assert [engine.lookup("a", 4) for engine in models] == [4] + [0] * len(NONSENSE)
    assert models[0].restored("a", 4)


def test_slots_that_make_no_sense_are_dropped_and_the_others_served(
    lasting: Daemon, pages: Path, engines: Engines
) -> None:
    engine = engines(lasting.socket)
    assert engine.back_up("a", 4)
    assert engine.back_up("b", 4, at=8)
    lasting.stop()
    (chunk,) = pages.glob("*.chunk")
    size = layout.SLOT_HEADER.itemsize
    with chunk.open("r+b") as file:
        headers = geometry.layout.slot_headers(bytearray(file.read(layout.PAGE + 64 * size)), 64)
        slot = {bytes(h["key"]): n for n, h in enumerate(headers) if h["state"]}
        # One page of "b" follows itself; another has the key of one of "a".
        own, double = (layout.PAGE + slot[key] * size for key in keys("b", 4)[2:])
        file.seek(own + layout.SLOT_HEADER.fields["parent"][1])
        file.write(keys("b", 4)[2])
        file.seek(double + layout.SLOT_HEADER.fields["key"][1])
        file.write(keys("a", 4)[0])
    eventually(lambda: not engine.connected(), "the engine notices")
    restarted(lasting, engine)
    assert engine.lookup("b", 4) == 2
    (pool,) = lasting.status()["pools"]
    assert pool["slots_used"] == pool["pages"] == 7
    assert engine.lookup("a", 4) == 4


def test_with_checksums_pages_are_compared_before_anybody_is_served(
    tmp_path: Path, pages: Path, engines: Engines
) -> None:
    with running(tmp_path / "run", persist=pages, verify="always") as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 6)
        daemon.stop()
        (chunk,) = pages.glob("*.chunk")
        host = geometry.host_layout([4 * 256] * 4)
        overwrite(chunk, host.data_offset + 3 * 4 * 256, b"damaged")  # slot 3, first row
        eventually(lambda: not engine.connected(), "the engine notices")
        restarted(daemon, engine)
        assert engine.lookup("a", 6) == 3
        assert daemon.status()["counters"]["pages_corrupt"] == 1
        assert engine.restored("a", 3)


def test_without_persist_a_new_daemon_starts_empty_and_leaves_no_file(
    tmp_path: Path, engines: Engines
) -> None:
    with running(tmp_path / "run") as daemon:
        engine = engines(daemon.socket)
        assert engine.back_up("a", 4)
        pids = [daemon.pid]
        for copier in daemon.kill():
            pids.append(copier.pid)
            eventually(lambda c=copier: is_dead(c.pid), "it goes with its control")
        assert shared_files(pids) == []
        eventually(lambda: not engine.connected(), "the engine notices")
        restarted(daemon, engine)
        assert engine.lookup("a", 4) == 0


def test_engine_and_daemon_are_upgraded_one_under_the_other(lasting: Daemon) -> None:
    old = RankProcess(lasting.socket, instance="old")
    old.do("offer", "a", 6)
    old.do("ack", "a")
    assert old.do("restore", "a", 6)
    new = RankProcess(lasting.socket, instance="new")
    old.close()
    assert new.do("restore", "a", 6), "a new engine under the same daemon"
    lasting.stop()
    lasting.start()
    new.do("reconnect", "")
    eventually(lambda: new.do("lookup", "a", 6) == 6, "memory is pinned")
    assert new.do("restore", "a", 6), "a new daemon under the same engine"
    new.close()


@pytest.mark.slow
def test_the_daemon_is_upgraded_again_and_again_under_a_running_engine(
    lasting: Daemon, engines: Engines
) -> None:
    engine = engines(lasting.socket)
    for turn in range(4):
        assert engine.back_up(f"turn {turn}", 4, at=4 * turn)
        if turn % 2:
            lasting.kill()
        else:
            lasting.stop()
        eventually(lambda: not engine.connected(), "the engine notices")
        restarted(lasting, engine)
        for earlier in range(turn + 1):
            assert engine.restored(f"turn {earlier}", 4, at=4 * earlier)
    assert [ack.seq for ack in engine.acks] == list(range(len(engine.acks)))


def test_a_second_daemon_does_not_get_a_live_one_s_pages(
    tmp_path: Path, lasting: Daemon, pages: Path
) -> None:
    second = Daemon(tmp_path, persist=pages)
    with pytest.raises(AssertionError, match="another daemon keeps its pages there"):
        second.start()
    second.stop()
    assert lasting.status()["pools"] == []
