"""`tierd bench plot`: what is drawn of a measurement, and that it is there to be read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from drawings import texts
from tierd_client.bench.copy import LayerRow, RateRow
from tierd_client.bench.interference import Row
from typer.testing import CliRunner

from tierd.bench.control import Load
from tierd.bench.control import Result as ControlResult
from tierd.bench.plots import documents
from tierd.bench.plots.picture import Bar, Bars, Lines, Picture
from tierd.bench.plots.results import INCOMPLETE, NothingMeasuredError
from tierd.bench.startup import Start
from tierd.cli.main import app
from tierd.wire.errors import ConfigError, TierdError

GIB = 1 << 30
MACHINE = {"gpu": "Some GPU", "cpus": 4, "python": "3.12.3", "torch": "2.9", "cuda": "13.0"}
LINK = {"to_host": 50.0, "to_device": 40.0, "both": 80.0}


def rates(**changes: Any) -> dict[str, Any]:
    row = RateRow(
        model="Qwen3-8B",
        placement="arena",
        path="strided",
        page_tokens=64,
        run=1,
        pages=85,
        nbytes=765 << 20,
        to_host=45.0,
        to_device=36.0,
        both=60.0,
        backup_s=0.02,
        restore_s=0.018,
    )
    return {**asdict(row), **changes}


def layers(**changes: Any) -> dict[str, Any]:
    row = LayerRow(
        model="Qwen3-8B",
        placement="arena",
        page_tokens=64,
        tokens=8192,
        nbytes=400_000_000,
        landed_s=[0.004, 0.004, 0.009, 0.011],
        first_group=2,
        verdict_s=0.012,
    )
    return {**asdict(row), **changes}


def copies(**changes: Any) -> dict[str, Any]:
    """As `tierd bench copy --json` prints them."""
    stock = rates(placement="stock", to_host=25.0, to_device=20.0, both=40.0)
    result = {
        "link": LINK,
        "rates": [rates(), rates(pages=1, nbytes=9 << 20), stock, rates(model="DeepSeek-V3")],
        "layers": [layers(), layers(placement="stock"), layers(tokens=128)],
        "left_out": [],
        "complete": True,
        "machine": MACHINE,
    }
    return {**result, **changes}


def traffic(
    way: str, gbps: float, slowdowns: list[float], page_tokens: int = 64, placement: str = "arena"
) -> dict[str, Any]:
    """A row of `tierd bench interference`. `way`: "backups", "restores" or both."""
    return asdict(
        Row(
            placement=placement,
            path="strided",
            page_tokens=page_tokens,
            run=1,
            backups="backups" in way,
            restores="restores" in way,
            wanted_gbps=None,
            backup_gbps=gbps if "backups" in way else 0.0,
            restore_gbps=2 * gbps if "restores" in way else 0.0,
            step_ms=4.0,
            quiet_ms=[4.0],
            slowdown=sorted(slowdowns)[len(slowdowns) // 2],
            slowdowns=slowdowns,
            control_cores=0.1,
            copier_cores=0.2,
        )
    )


def slower(**changes: Any) -> dict[str, Any]:
    """As `tierd bench interference --json` prints it."""
    rows = [
        traffic("backups", 10.0, [0.002, 0.001, 0.004]),
        traffic("backups", 1.5, [-0.001, 0.0, 0.001]),
        traffic("restores", 5.0, [0.006]),
        traffic("backups, restores", 20.0, [0.02]),
        traffic("restores", 0.5, [0.001], page_tokens=1, placement="stock"),
    ]
    return {"rows": rows, "complete": True, "machine": MACHINE, **changes}


def start(threads: int, hugepages: str = "off", free_s: float | None = 1.5) -> dict[str, Any]:
    """A row of `tierd bench startup`."""
    return asdict(
        Start(
            memory_bytes=3 * GIB,
            devices=1,
            hugepages=hugepages,
            threads=threads,
            by_page={"4096": 3 * GIB},
            ready_s=1.25,
            pinned_s={"1": 1.5, "2": 2.0},
            all_pinned_s=3.0,
            rate_gibps=9.14,
            gone_s=0.5,
            free_s=free_s,
        )
    )


def load(name: str, rate: int | None, ranks: int = 1, lookups: int = 100) -> dict[str, Any]:
    """A row of `tierd bench control`."""
    return asdict(
        ControlResult(
            load=Load(name, ranks, rate, 64, lookups=bool(lookups)),
            pages_s=42_000.0 if rate != 0 else 0.0,
            evicted_s=0.0,
            control_cores=0.5,
            copier_cores=0.25,
            wakeups_s=400.0,
            lookups=lookups,
            lookup_p50_us=300.0,
            lookup_p99_us=900.0,
            lookup_max_us=2000.0,
        )
    )


LOADS = [load("idle", 0, lookups=0), load("turns", 40_000), load("turns", None, ranks=2)]


def picture(document: Any) -> Picture:
    return documents.picture(json.dumps(document).encode(), "it")


def bars(panel: Any) -> list[tuple[str, str, list[Bar]]]:
    assert isinstance(panel, Bars)
    return [(group.heading, group.label, list(group.bars)) for group in panel.groups]


def lines(panel: Any) -> dict[str, list[tuple[float, float]]]:
    assert isinstance(panel, Lines)
    return {
        line.label: [(pytest.approx(x), pytest.approx(y)) for x, y in line.points]
        for line in panel.lines
    }


def limits(panel: Any) -> list[list[tuple[float, float]]]:
    assert isinstance(panel, Lines)
    return [[(round(x, 3), y) for x, y in limit.points] for limit in panel.limits]


def plot(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, ["bench", "plot", *arguments], input=stdin)


def test_rates_are_fractions_of_the_contiguous_copies_by_kind_of_pages() -> None:
    band, _ = picture(copies()).bands
    to_host, to_device, both = band.panels
    assert [panel.title for panel in band.panels] == [
        "to the host (D2H): 1.0 is 50.0 GB/s",
        "to the device (H2D): 1.0 is 40.0 GB/s",
        "both at once: 1.0 is 80.0 GB/s",
    ]
    whole, single, other = bars(to_host)
    arena, stock = "one allocation (arena)", "one a layer (stock)"
    assert whole == (
        "Qwen3-8B",
        "64-token pages, shuffled",
        [Bar(arena, 0, 0.9, 0.95), Bar(stock, 1, 0.5, 0.84)],
    )
    assert single == ("", "64-token pages, shuffled, batch of 1", [Bar(arena, 0, 0.9)])
    assert other == ("DeepSeek-V3", "64-token pages, shuffled", [Bar(arena, 0, 0.9)])
    assert bars(to_device)[0][2] == [Bar(arena, 0, 0.9, 0.95), Bar(stock, 1, 0.5, 0.83)]
    assert bars(both)[0][2] == [Bar(arena, 0, 0.75, 0.90), Bar(stock, 1, 0.5)]


def test_a_restores_layers_land_beside_the_ideal_and_what_was_promised() -> None:
    _, band = picture(copies()).bands
    known, short = band.panels
    landed = [(0, 0), (4, 1), (4, 2), (9, 3), (11, 4)]
    assert lines(known) == {
        "ideal: bytes over the contiguous rate": [(0, 0), (10, 4)],
        "one allocation (arena)": landed,
        "one a layer (stock)": landed,
    }
    # 1.3 x 200 MB at 40 GB/s and 0.6 ms; 1.1 x 400 MB at 36 and at 20 GB/s and 0.6 ms.
    assert limits(known) == [
        [(7.1, 0), (7.1, 2)],
        [(12.822, 2), (12.822, 4)],
        [(7.1, 0), (7.1, 2)],
        [(22.6, 2), (22.6, 4)],
    ]
    assert limits(short) == [], "nothing is promised of so few tokens"


def test_in_memory_nothing_is_promised() -> None:
    rate_band, layer_band = picture(copies(machine={**MACHINE, "gpu": None})).bands
    assert all(bar.limit is None for panel in rate_band.panels for bar in bars(panel)[0][2])
    assert all(limits(panel) == [] for panel in layer_band.panels)


def test_the_loop_is_slowed_over_what_flowed_by_kind_of_pages_and_direction() -> None:
    (band,) = picture(slower()).bands
    backups, restores, both = band.panels
    wide = "64-token pages, shuffled, one allocation"
    single = "1-token pages, shuffled, one a layer"
    assert lines(backups) == {wide: [(1.5, 0.0), (10.0, 0.2)]}
    assert lines(restores) == {wide: [(10.0, 0.6)], single: [(1.0, 0.1)]}
    assert lines(both) == {wide: [(30.0, 2.0)]}
    assert isinstance(backups, Lines)
    assert backups.lines[0].spans == [(-0.1, 0.1), (0.1, 0.4)]
    assert limits(backups) == [[(0.0, 0.3), (1.5, 0.3), (1.5, 1.0), (10.0, 1.0)]]


def test_memory_is_pinned_over_time_and_free_after_a_kill() -> None:
    drawn = picture([start(8), start(2), start(2, hugepages="2MiB", free_s=None)])
    pinned, killed = drawn.bands[0].panels
    points = [(1.5, 1), (2, 2), (3, 3)]
    assert lines(pinned) == {
        "2 threads, hugepages off: 9.1 GiB/s": points,
        "8 threads, hugepages off: 9.1 GiB/s": points,
        "2 threads, hugepages 2MiB: 9.1 GiB/s": points,
    }
    assert isinstance(pinned, Lines)
    assert [(line.style, line.dash) for line in pinned.lines] == [(0, 0), (1, 0), (0, 1)]
    assert [mark.point for mark in pinned.marks] == [(1.25, 0.0)] * 3
    assert [[bar.value for bar in found] for _, _, found in bars(killed)] == [
        [0.5, 1.5],
        [0.5, 1.5],
        [0.5],
    ]


def test_memory_that_was_pinned_at_once_is_one_point() -> None:
    small = {**start(1), "memory_bytes": GIB // 4, "pinned_s": {}, "rate_gibps": None}
    pinned, _ = picture([small]).bands[0].panels
    assert lines(pinned) == {"1 thread": [(3.0, 0.25)]}


def test_loads_stand_by_ranks_with_what_was_promised_at_one_rate() -> None:
    pages, lookups, cores = picture(LOADS).bands[0].panels
    assert [(heading, label) for heading, label, _ in bars(pages)] == [
        ("1 rank", "idle"),
        ("", "turns of 64, 40,000/s"),
        ("2 ranks", "turns of 64, all it takes"),
    ]
    assert [[bar.limit for bar in found] for _, _, found in bars(pages)] == [[None], [40], [None]]
    assert [[bar.value for bar in found] for _, _, found in bars(lookups)] == [
        [],
        [0.3, 0.9],
        [0.3, 0.9],
    ]
    assert bars(lookups)[1][2][1].limit == 1.0
    assert [bar.value for bar in bars(cores)[0][2]] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (copies(complete=False, layers=[]), [INCOMPLETE]),
        (copies(complete=False, rates=[], left_out=["too large"]), [INCOMPLETE, "too large"]),
        (slower(complete=False, rows=slower()["rows"][:1]), [INCOMPLETE]),
    ],
)
def test_of_a_measurement_that_was_cut_off_what_there_is_is_drawn(
    tmp_path: Path, document: Any, said: list[str]
) -> None:
    done = plot("-", "-o", str(tmp_path / "cut.svg"), stdin=json.dumps(document))
    assert done.exit_code == 0, done.output
    assert set(said) <= set(done.stderr.splitlines())
    assert set(said) <= set(texts(tmp_path / "cut.svg"))


@pytest.mark.parametrize(
    "document",
    [
        copies(link=None, rates=[], layers=[], complete=False),
        copies(rates=[], layers=[], complete=False),
        {"rows": [], "complete": False},
        [],
    ],
)
def test_where_nothing_was_measured_nothing_is_drawn(document: Any) -> None:
    with pytest.raises(NothingMeasuredError, match="run it again"):
        picture(document)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("| model | pages |", "is not JSON"),
        (json.dumps(copies()) * 2, "is not JSON"),
        ("3", "no measurement that has a picture"),
        ('{"rows": [{"tier": "tierd", "metric": "offload"}]}', "no measurement that has a picture"),
        ('[{"trace": "chat", "hit_rates": {}}]', "no measurement that has a picture"),
        (json.dumps(copies(link={"to_host": 0.0})), r"\$.link"),
        (json.dumps(copies(rates=[rates(placement="elsewhere")])), r"\$.rates\[0\].placement"),
        (json.dumps([{**start(1), "pinned_s": {"much": 1.0}}]), r"\$\[0\].pinned_s"),
    ],
)
def test_what_is_no_measurement_is_said_and_what_to_give_instead(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^it .*{said}.*give it what `tierd bench copy.*--json`"):
        documents.picture(text.encode(), "it")


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            copies(),
            [
                "tierd bench copy: Some GPU, 4 cores, torch 2.9",
                "to the host (D2H): 1.0 is 50.0 GB/s",
                "Qwen3-8B",
                "64-token pages, shuffled, batch of 1",
                "DeepSeek-V3",
                "one allocation (arena)",
                "one a layer (stock)",
                "promised on an H200: at least",
                "Qwen3-8B, 64-token pages: 8,192 tokens, 400 MB",
                "ideal: bytes over the contiguous rate",
                "promised on an H200: by then",
            ],
        ),
        (
            slower(),
            [
                "tierd bench interference: Some GPU, 4 cores, torch 2.9",
                "backups (D2H)",
                "restores (H2D)",
                "both at once",
                "loop slower by, %",
                "64-token pages, shuffled, one allocation",
                "1-token pages, shuffled, one a layer",
                "promised on an H200: at most",
            ],
        ),
        (
            [start(1), start(4)],
            [
                "tierd bench startup: 3.0 GiB of host memory, 1 device",
                "1 thread: 9.1 GiB/s",
                "4 threads: 9.1 GiB/s",
                "ready to serve",
                "seconds from the start on",
                "no process is left",
                "the memory is free",
            ],
        ),
        (
            LOADS,
            [
                "tierd bench control",
                "2 ranks",
                "turns of 64, 40,000/s",
                "kept",
                "lookup, p99",
                "copiers",
            ],
        ),
    ],
)
def test_a_drawing_says_what_is_in_it(tmp_path: Path, document: Any, expected: list[str]) -> None:
    result = tmp_path / "found.json"
    result.write_text(json.dumps(document))
    done = plot(str(result))
    assert done.exit_code == 0, done.output
    assert done.stdout == f"wrote {tmp_path / 'found.svg'}: {expected[0]}\n"
    said = texts(tmp_path / "found.svg")
    assert [text for text in expected if text not in said] == []


def test_the_same_measurement_is_the_same_file(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plot("-", "-o", str(tmp_path / name), stdin=json.dumps([start(1)]))
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF")])
def test_it_is_drawn_as_the_name_says_over_what_was_there(
    tmp_path: Path, name: str, magic: bytes
) -> None:
    (tmp_path / name).write_text("something old")
    done = plot("-", "--output", str(tmp_path / name), stdin=json.dumps([start(1)]))
    assert done.exit_code == 0, done.output
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_what_was_read_from_stdin_is_named_after_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote startup.svg" in plot("-", stdin=json.dumps([start(1)])).stdout
    assert texts(tmp_path / "startup.svg")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["there.json", "-o", "a.jpg"], "ends in .svg, .png or .pdf"),
        (["there.json", "-o", "no/such/place.svg"], "cannot write no/such/place.svg"),
        (["not_there.json"], "cannot read not_there.json: No such file"),
        (["there.svg"], "--output"),
    ],
)
def test_what_cannot_be_read_or_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("there.json", "there.svg"):
        (tmp_path / name).write_text(json.dumps([start(1)]))
    done = plot(*arguments)
    assert isinstance(done.exception, TierdError)
    assert said in str(done.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.json", "there.svg"]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as the import system marks what is not
    done = plot("-", stdin="[]")
    assert isinstance(done.exception, ConfigError)
    assert "pip install 'tierd[plot]'" in str(done.exception)


def test_no_other_command_imports_matplotlib() -> None:
    program = """
import sys
from typer.testing import CliRunner
from tierd.cli.main import app
assert CliRunner().invoke(app, ["bench", "plot", "--help"]).exit_code == 0
assert "tierd.cli.bench_plot" in sys.modules
assert "matplotlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
