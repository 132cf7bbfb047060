"""`tierd bench copy` and `interference`: what they say, and a miniature run from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from drawings import texts
from tierd_client.bench.copy import GPU, HOST, cases
from tierd_client.bench.models import DEEPSEEK_V3, GPT_OSS_20B, QWEN3_8B, QWEN3_NEXT, DeviceMemory

from tierd.bench import copy as report
from tierd.bench import interference
from tierd.bench.interference_plan import FULL, QUICK, Windows, expected_s, traffics
from tierd.cli.gpus import visible_gpus

LINK = {"to_host": 50.0, "to_device": 40.0, "both": 80.0}
MACHINE = {"gpu": "Some GPU", "cpus": 4, "torch": "2.9"}


def rate_row(**changes: Any) -> dict[str, Any]:
    row = {
        "model": "Qwen3-8B",
        "placement": "arena",
        "path": "strided",
        "page_tokens": 64,
        "run": 1,
        "pages": 85,
        "nbytes": 768 << 20,
        "to_host": 45.0,
        "to_device": 36.0,
        "both": 60.0,
        "backup_s": 0.02,
        "restore_s": 0.018,
    }
    return {**row, **changes}


def lines(table: Any) -> list[list[str]]:
    """The cells of each row."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def tierd(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tierd", *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=500, check=False
    )


def test_rates_are_fractions_of_the_contiguous_copies_side_by_side() -> None:
    stock = rate_row(placement="stock", to_host=25.0, to_device=20.0, both=40.0)
    tokens = rate_row(page_tokens=1, run=64, pages=5440)
    first, second = lines(report.rate_table([rate_row(), tokens, stock], LINK))
    assert first[:4] == ["Qwen3-8B", "64 tokens", "shuffled", "85"]
    assert first[4:] == ["0.90", "0.90", "0.75", "0.50", "0.50", "0.50"]
    assert second == ["", "1 token", "runs of 64", "5,440", "0.90", "0.90", "0.75", "", "", ""]


def test_layers_stand_beside_what_the_link_allows() -> None:
    row = {
        "model": "Qwen3-8B",
        "placement": "arena",
        "page_tokens": 64,
        "tokens": 8192,
        "nbytes": 40_000_000,
        "landed_s": [0.0005, 0.0005, 0.0008, 0.0012],
        "first_group": 2,
        "verdict_s": 0.0015,
    }
    (cells,) = lines(report.layer_table([row], LINK))
    assert cells[3:] == ["8,192 tok", "2: 0.50", "0.50", "1.20", "1.00", "1.50"]


def test_a_loops_slowdown_is_said_with_its_spread() -> None:
    row = {
        "placement": "stock",
        "path": "rows",
        "page_tokens": 1,
        "run": 64,
        "backups": True,
        "restores": False,
        "wanted_gbps": None,
        "backup_gbps": 40.04,
        "restore_gbps": 0.0,
        "step_ms": 3.5,
        "slowdown": 0.004,
        "slowdowns": [0.004, 0.001, 0.005],
        "control_cores": 0.25,
        "copier_cores": 0.5,
    }
    (cells,) = lines(interference.as_table([row]))
    assert cells == [
        *("stock", "rows", "1 tok in runs of 64", "backups", "flat out", "40.0", ""),
        *("0.4%", "0.1% - 0.5%", "0.25", "0.50"),
    ]
    assert "3.500 to 3.500 ms" in interference.loop_line([row], MACHINE)


@pytest.mark.parametrize("scale", [GPU, HOST])
def test_every_batch_fits_on_the_device(scale: Any) -> None:
    for case in cases(scale, quick=False):
        pages = case.prompts * case.pages
        assert pages * case.page_tokens <= scale.tokens
        assert pages % case.run == 0
        assert case.prompts <= scale.states or case.model is not QWEN3_NEXT


@pytest.mark.parametrize("model", [QWEN3_8B, GPT_OSS_20B, DEEPSEEK_V3, QWEN3_NEXT])
def test_memory_is_one_allocation_a_pool_or_one_a_layer(model: Any) -> None:
    cpu = torch.device("cpu")
    for placement in ("arena", "stock"):
        memory = DeviceMemory(model, placement, tokens=64, states=2, device=cpu)  # type: ignore[arg-type]
        for shape, pool in zip(model.pools, memory.pools(16), strict=True):
            tensors = [buffer.tensor for buffer in pool.buffers]
            bases = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            one = len(shape.rows) if shape.is_state else 1
            assert len(bases) == (
                one if placement == "arena" or shape.is_state else len(shape.layers)
            )
            row_bytes = sum(tensor.shape[1] for tensor in tensors)
            assert row_bytes == shape.unit_bytes
            assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def test_a_miniature_runs_without_a_gpu_and_can_be_drawn(tmp_path: Path) -> None:
    arguments = ["bench", "copy", "--device", "host", "--quick", "--rounds", "1"]
    done = tierd(*arguments, "--tokens", "2048", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["left_out"] == []
    assert {(row["placement"], row["path"]) for row in result["rates"]} == {
        ("arena", "rows"),  # 64 tokens make rows of 128 KiB
        ("arena", "strided"),
        ("stock", "rows"),
    }
    assert all(row["to_host"] > 0 and row["to_device"] > 0 for row in result["rates"])
    for row in result["layers"]:
        assert len(row["landed_s"]) == 36
        assert row["landed_s"] == sorted(row["landed_s"])
        assert row["landed_s"][-1] <= row["verdict_s"]

    drawn = tierd("bench", "plot", "-", "-o", str(tmp_path / "copy.svg"), stdin=done.stdout)
    assert drawn.returncode == 0, drawn.stderr
    said = texts(tmp_path / "copy.svg")
    # Two legends name the two ways in which memory is allocated, one for rates and one for layers.
    assert said.count("one allocation (arena)") == said.count("one a layer (stock)") == 2
    kinds = {"64-token pages, shuffled", "1-token pages, runs of 64", "1-token pages, shuffled"}
    assert kinds <= set(said)
    assert "Qwen3-8B, 64-token pages: 128 tokens, 19 MB" in said


@pytest.mark.skipif(bool(visible_gpus()), reason="there is a GPU")
@pytest.mark.parametrize("command", ["copy", "interference"])
def test_without_a_gpu_it_says_so(command: str) -> None:
    done = tierd("bench", command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "CUDA sees none here" in done.stderr


@pytest.mark.skipif(bool(visible_gpus()), reason="there is a GPU")
@pytest.mark.parametrize(("options", "windows"), [([], FULL), (["--quick"], QUICK)])
def test_interference_says_what_it_will_take(options: list[str], windows: Windows) -> None:
    seconds = expected_s(traffics(bool(options)), windows)
    assert f"takes about {seconds:.0f} s\n" in tierd("bench", "interference", *options).stderr


def test_what_interference_takes_is_known_before_and_quick_is_quick() -> None:
    assert expected_s(traffics(True), QUICK) < 50
    assert expected_s(traffics(False), FULL) < 300
    # Windows are what it consists of: twice as many of them take nearly twice as long.
    twice = expected_s(traffics(False), Windows(FULL.seconds, 2 * FULL.count))
    assert 1.5 < twice / expected_s(traffics(False), FULL) < 2


def test_a_run_that_is_cut_off_still_prints_what_it_has_measured() -> None:
    command = [sys.executable, "-m", "tierd", "bench", "control", "--ranks", "1", "--json"]
    process = subprocess.Popen(
        [*command, "--seconds", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    while not (line := process.stderr.readline()).startswith("{"):
        assert line, "it ended before its first row"
    first = json.loads(line)
    process.terminate()
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == 128 + 15
    assert json.loads(printed)[0] == first
