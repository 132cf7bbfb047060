"""What memory a daemon may claim: sizes as people write them, bounds as the kernel gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.memory.limits import available_memory, format_size, parse_size
from tierd.wire.errors import ConfigError

GIB = 1 << 30
V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


class Machine:
    """The files that a kernel would show, in a directory."""

    def __init__(self, root: Path, *, available: int) -> None:
        self.root = root
        meminfo = f"MemTotal: {1 << 30} kB\nMemAvailable: {available // 1024} kB\n"
        self.write("proc/meminfo", meminfo)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def in_group(self, cgroup: str, mountinfo: str) -> None:
        self.write("proc/self/cgroup", cgroup + "\n")
        self.write("proc/self/mountinfo", mountinfo + "\n")

    def v2_level(self, path: str, limit: int | str, used: int, page_cache: int = 0) -> None:
        base = f"sys/fs/cgroup/{path}".rstrip("/")
        self.write(f"{base}/memory.max", f"{limit}\n")
        self.write(f"{base}/memory.current", f"{used}\n")
        self.write(f"{base}/memory.stat", f"anon 1\ninactive_file {page_cache}\n")

    def v1_level(self, path: str, limit: int, used: int, page_cache: int = 0) -> None:
        base = f"sys/fs/cgroup/memory/{path}".rstrip("/")
        self.write(f"{base}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{base}/memory.stat", f"cache 7\ntotal_inactive_file {page_cache}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, available=100 * GIB)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 * GIB),
        ("1.5 TiB", 3 * GIB << 9),
        ("500MB", 500_000_000),
        ("2g", 2 * GIB),
        ("1073741824", GIB),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "64 gigs", "1e9", "0x10", "1.GiB", "64GiBB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="write one like 64GiB"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_a_printed_size_reads_back_within_its_rounding(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.06)


def test_without_cgroups_the_machine_is_the_bound(machine: Machine) -> None:
    assert available_memory(machine.root) == (100 * GIB, "the machine")


def test_the_tightest_of_nested_v2_groups_is_the_bound(machine: Machine) -> None:
    machine.in_group("0::/pod/engine", V2_MOUNT.format(root="/"))
    machine.v2_level("pod/engine", "max", used=5 * GIB)
    machine.v2_level("pod", 40 * GIB, used=10 * GIB, page_cache=2 * GIB)
    nbytes, bound = available_memory(machine.root)
    assert nbytes == 32 * GIB
    assert bound == "the cgroup at /sys/fs/cgroup/pod"


def test_a_v1_group_is_found_beside_a_v2_mount_without_controllers(machine: Machine) -> None:
    machine.in_group(
        "4:memory:/docker/abc\n0::/", V1_MOUNT.format(root="/") + "\n" + V2_MOUNT.format(root="/")
    )
    machine.v1_level("docker/abc", 8 * GIB, used=3 * GIB, page_cache=GIB)
    machine.v1_level("", (1 << 63) - 4096, used=50 * GIB)
    assert available_memory(machine.root).nbytes == 6 * GIB


def test_in_a_container_the_mounted_group_is_its_own_though_the_path_is_the_hosts(
    machine: Machine,
) -> None:
    machine.in_group("4:memory:/docker/abc", V1_MOUNT.format(root="/docker/abc"))
    machine.v1_level("", 8 * GIB, used=3 * GIB)
    assert available_memory(machine.root).nbytes == 5 * GIB


def test_a_path_outside_the_mount_falls_back_to_the_mount(machine: Machine) -> None:
    machine.in_group("0::/../other", V2_MOUNT.format(root="/"))
    machine.v2_level("", 8 * GIB, used=GIB)
    assert available_memory(machine.root).nbytes == 7 * GIB


def test_a_group_over_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.in_group("0::/", V2_MOUNT.format(root="/"))
    machine.v2_level("", 4 * GIB, used=5 * GIB)
    assert available_memory(machine.root).nbytes == 0


def test_this_machine_has_some_memory() -> None:
    assert 0 < available_memory().nbytes < 1 << 60
