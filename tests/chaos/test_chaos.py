"""Whatever dies or stops: nothing wrong is restored, nothing stays held, all come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from world import FAULTS, running_world

SHORT = [
    "rank killed in a restore",
    "copier killed",
    "engine killed and a new one at once",
    "control and copiers killed while a restore is awaited",
]


def blow(world, name: str) -> None:  # type: ignore[no-untyped-def]
    with world.timed(name):
        FAULTS[name](world)
        world.check()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_few_deaths_under_load(tmp_path: Path, world_size: int, seed: int, device: str) -> None:
    with running_world(tmp_path / "w", world_size=world_size, seed=seed, device=device) as world:
        for name in SHORT[world_size - 1 :: 2]:
            blow(world, name)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_few_deaths_under_load_on_a_gpu(tmp_path: Path, world_size: int, seed: int) -> None:
    with running_world(tmp_path / "w", world_size=world_size, seed=seed, device="cuda:0") as world:
        for name in SHORT:
            blow(world, name)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("world_size", [1, 2])
def test_hundreds_of_deaths_and_stops_at_random_moments(
    tmp_path: Path, world_size: int, seed: int, cycles: int, device: str
) -> None:
    names = sorted(FAULTS)
    with running_world(tmp_path / "w", world_size=world_size, seed=seed, device=device) as world:
        for _ in range(-(-cycles // len(names))):
            world.rng.shuffle(names)
            for name in names:
                blow(world, name)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_each_fault_by_itself(
    tmp_path: Path, name: str, world_size: int, seed: int, device: str
) -> None:
    with running_world(tmp_path / "w", world_size=world_size, seed=seed, device=device) as world:
        for _ in range(3):
            blow(world, name)
