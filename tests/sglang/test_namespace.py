"""Which engines share pages, and which must not. Needs no SGLang, except to check its fields."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tierd_client.sglang.namespace import ARGUMENTS, namespace, process_start_s


@dataclass
class Arguments:
    """The fields of SGLang's `ServerArgs` that these tests set."""

    model_path: str
    revision: str | None = None
    load_format: str = "auto"
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    tp_size: int = 1
    random_seed: int | None = 1
    lora_paths: list[Any] | None = None
    weight_cache_mode: str = "off"
    quantization_param_path: str | None = None
    custom_weight_loader: list[str] = field(default_factory=list)
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None


@dataclass
class Adapter:
    """As SGLang's `LoRARef`."""

    lora_name: str
    lora_path: str


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


def checkpoint(directory: Path, weights: bytes = b"weights", age_s: float = 3600) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    write_weights(directory, weights, age_s)
    os.utime(directory / "config.json", (time.time() - 3600,) * 2)
    return directory


def write_weights(directory: Path, weights: bytes, age_s: float) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(weights)
    os.utime(file, (time.time() - age_s,) * 2)


def name(arguments: Arguments | None, instance: str = "one", **changes: Any) -> dict[str, str]:
    settings = {"formats": {"kv": "MHA torch.bfloat16 nhd"}, "started_s": time.time() - 60}
    return namespace(arguments, instance=instance, **{**settings, **changes})


def test_two_engines_of_one_model_share(model: Path) -> None:
    one, two = name(Arguments(str(model)), "one"), name(Arguments(str(model)), "two")
    assert one == two
    assert "private" not in one


def test_a_link_to_the_model_is_the_model(model: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(model)
    assert name(Arguments(str(tmp_path / "latest"))) == name(Arguments(str(model)))


def test_a_model_trained_on_in_place_is_another(model: Path) -> None:
    before = name(Arguments(str(model)))
    write_weights(model, b"WEIGHTS", age_s=1800)  # the same size
    after = name(Arguments(str(model)))
    assert before != after
    assert "private" not in after


def test_files_that_changed_after_the_engine_began_vouch_for_nothing(model: Path) -> None:
    write_weights(model, b"newer", age_s=0)
    one, two = name(Arguments(str(model)), "one"), name(Arguments(str(model)), "two")
    assert one["private"] != two["private"]
    assert "changed since the engine was started" in one["private"]


def test_notes_beside_the_weights_do_not_count(model: Path) -> None:
    before = name(Arguments(str(model)))
    (model / "README.md").write_text("about this model")
    assert name(Arguments(str(model))) == before


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "v2"},
        {"load_format": "dummy"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"tp_size": 2},
    ],
)
def test_what_changes_the_kv_changes_the_namespace(model: Path, change: dict[str, Any]) -> None:
    assert name(Arguments(str(model), **change)) != name(Arguments(str(model)))


def test_pools_that_differ_do_not_share(model: Path) -> None:
    ours = name(Arguments(str(model)))
    assert name(Arguments(str(model)), formats={"kv": "MHA torch.bfloat16 hnd"}) != ours
    assert name(Arguments(str(model)), formats={"kv": "MHA torch.float8_e4m3fn nhd"}) != ours


def test_a_draft_model_counts_with_its_files(model: Path, tmp_path: Path) -> None:
    draft = checkpoint(tmp_path / "draft")
    arguments = Arguments(
        str(model), speculative_algorithm="EAGLE3", speculative_draft_model_path=str(draft)
    )
    before = name(arguments)
    assert before != name(Arguments(str(model)))
    write_weights(draft, b"WEIGHTS", age_s=1800)
    after = name(arguments)
    assert before["files"] == after["files"]
    assert before["draft"] != after["draft"]
    assert "private" not in after


def test_the_seed_of_dummy_weights_counts_and_no_other(model: Path) -> None:
    def seeded(load_format: str, seed: int) -> dict[str, str]:
        return name(Arguments(str(model), load_format=load_format, random_seed=seed))

    assert seeded("dummy", 1) != seeded("dummy", 2)
    assert seeded("auto", 1) == seeded("auto", 2)


def test_an_adapter_trained_on_in_place_is_another(model: Path, tmp_path: Path) -> None:
    adapter = checkpoint(tmp_path / "adapter")
    arguments = Arguments(str(model), lora_paths=[Adapter("french", str(adapter))])
    before = name(arguments)
    write_weights(adapter, b"WEIGHTS", age_s=1800)
    after = name(arguments)
    assert before["files"] == after["files"]
    assert before["adapters"] != after["adapters"]
    assert "private" not in after


def test_adapters_count_in_every_form_of_the_flag(model: Path, tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path / "adapter"))
    forms: list[Any] = [
        [Adapter("a", path)],
        [f"a={path}"],
        [{"lora_name": "a", "lora_path": path}],
        {"a": path},
    ]
    names = [name(Arguments(str(model), lora_paths=form)) for form in forms]
    assert all(other == names[0] for other in names)
    assert names[0] != name(Arguments(str(model)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"load_format": "remote_instance"}, "weights from elsewhere"),
        ({"weight_cache_mode": "client"}, "another process"),
        ({"custom_weight_loader": ["my.loader"]}, "weights from elsewhere"),
        ({"quantization_param_path": "/nowhere/scales.json"}, "cannot be read"),
        ({"lora_paths": [Adapter("a", "/nowhere/adapter")]}, "no files of adapter a"),
        ({"speculative_draft_model_path": "/nowhere/draft"}, "no files of the draft model"),
    ],
)
def test_weights_that_files_cannot_vouch_for_are_private(
    model: Path, change: dict[str, Any], reason: str
) -> None:
    one = name(Arguments(str(model), **change), "one")
    two = name(Arguments(str(model), **change), "two")
    assert one != two
    assert reason in one["private"]


def test_a_model_that_is_not_here_is_private(tmp_path: Path) -> None:
    assert "no files of" in name(Arguments(str(tmp_path / "gone")))["private"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no files" in name(Arguments(str(empty)))["private"]


def test_no_server_shares_nothing() -> None:
    assert name(None, "one") != name(None, "two")


def test_a_long_argument_still_counts_to_its_last_letter(model: Path) -> None:
    def overridden(text: str) -> dict[str, str]:
        arguments = Arguments(str(model))
        arguments.json_model_override_args = text  # type: ignore[attr-defined]
        return name(arguments)

    one, two = overridden("x" * 5000 + "1"), overridden("x" * 5000 + "2")
    assert one != two
    assert all(len(value) <= 512 for value in one.values())


def test_a_process_knows_when_it_began() -> None:
    with open("/proc/uptime") as file:
        booted = time.time() - float(file.read().split()[0])
    assert booted < process_start_s() < time.time()


@pytest.mark.sglang
def test_sglang_still_has_every_field_that_is_looked_at() -> None:
    from tierd_client.sglang.imports import stand_in_for_torchvision

    stand_in_for_torchvision()
    from sglang.srt.server_args import ServerArgs
    from tierd_client.sglang.support import ARGUMENTS as SUPPORT_ARGUMENTS

    known = set(ServerArgs.__struct_fields__)
    assert set(ARGUMENTS) <= known
    assert set(SUPPORT_ARGUMENTS) <= known
