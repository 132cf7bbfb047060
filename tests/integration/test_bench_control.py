"""`tierd bench control` measures what it says, on a real daemon."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tier_harness import running
from typer.testing import CliRunner

from tierd.bench.control import Load, as_table, measure
from tierd.bench.plots import documents
from tierd.bench.wire_rank import connect
from tierd.cli.main import app
from tierd.wire.limits import KEY_BYTES


def test_pages_are_taken_in_and_lookups_answered_under_a_load(tmp_path: Path) -> None:
    with running(tmp_path / "d", memory="128MiB", devices="host:2") as daemon:
        load = Load("turns", 2, 2000, 50, full=False)
        for seconds in (0.5, 5.0, 50.0):  # on a busy machine too little may happen in half a second
            result = measure(daemon.socket, daemon.status, load, seconds)
            if min(result.pages_s, result.lookups, result.control_cores) > 0:
                break
        kept = daemon.status()["pools"][0]["pages"]
    assert 0 < result.pages_s * seconds <= kept
    assert result.lookups > 0
    assert result.lookup_p50_us <= result.lookup_p99_us <= result.lookup_max_us
    assert result.control_cores > 0
    assert as_table([result]).row_count == 1
    drawn = documents.picture(json.dumps([dataclasses.asdict(result)]).encode(), "it")
    assert drawn.command == "control"


def test_a_backup_is_kept_whole_and_can_be_looked_up(tmp_path: Path) -> None:
    with running(tmp_path / "d", memory="128MiB") as daemon:
        (rank,) = connect(daemon.socket, "one", 1)
        keys = b"".join(n.to_bytes(KEY_BYTES, "little") for n in range(1, 5001))
        rank.back_up(keys, 5000)
        while rank.in_flight:
            rank.read(30.0)
        assert rank.kept == 5000
        _, longest = rank.look_up("r", keys)
        assert longest == 5000
        rank.close()


@pytest.mark.slow
def test_the_command_prints_a_row_for_every_load() -> None:
    done = CliRunner().invoke(
        app, ["bench", "control", "--ranks", "1", "--seconds", "0.3", "--json"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["load"]["name"] for row in rows] == [
        "idle",
        "lookups alone",
        *["bursts", "turns"] * 2,
    ]
    assert all(row["pages_s"] > 0 for row in rows if row["load"]["rate"] != 0)
