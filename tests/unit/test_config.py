"""What a daemon runs with: flags over a file over defaults, and errors that say what to do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tierd.config import ServeConfig, ServeOptions, parse_toml, read_toml, resolve
from tierd.meeting import default_socket, prepare_socket_directory
from tierd.memory.hugepages import Reserved
from tierd.memory.limits import Available
from tierd.wire.errors import ConfigError
from tierd.wire.geometry import CHUNK_BYTES

GIB = 1 << 30
GPU_A = "GPU-00000000-0000-4000-8000-00000000000a"
GPU_B = "GPU-00000000-0000-4000-8000-00000000000b"


def settle(
    options: ServeOptions,
    *,
    available: int = 100 * GIB,
    gpus: Sequence[str] = (),
    huge: dict[int, Reserved] | None = None,
) -> ServeConfig:
    """The settings on a machine with so much memory left and these GPUs."""
    return resolve(
        options,
        available=lambda: Available(available, "the machine"),
        visible_gpus=lambda: gpus,
        reserved=lambda: huge or {},
    )


def test_flags_win_over_the_file_and_the_file_over_defaults() -> None:
    file = parse_toml('memory = "8GiB"\ndevices = "host:2"\nlog-level = "debug"\n')
    config = settle(ServeOptions(memory="4GiB").over(file))
    assert config.memory_bytes == 4 * GIB
    assert config.devices == ("host:0", "host:1")
    assert config.log_level == "debug"
    assert config.socket == default_socket()


def test_a_flag_that_says_no_wins_over_a_file_that_says_yes() -> None:
    file = parse_toml("memory-check = true")
    assert ServeOptions(memory_check=False).over(file).memory_check is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('memroy = "8GiB"', "unknown key `memroy`.*memory"),
        ("memory = 8", "`memory` must be a string"),
        ('memory-check = "no"', "`memory-check` must be true or false"),
        ("devices = [1.5]", "`devices` must be"),
        ("[serve]\nmemory = 1", "unknown key `serve`"),
        ("memory = ", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_naming_the_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_toml(text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_toml(tmp_path / "nowhere.toml")


def test_by_default_every_gpu_gets_a_copier_and_half_of_the_memory_is_for_pages() -> None:
    config = settle(ServeOptions(), available=10 * GIB + 5, gpus=[GPU_A, GPU_B])
    assert config.devices == (GPU_A, GPU_B)
    assert config.memory_bytes == 5 * GIB


def test_without_a_gpu_the_host_backend_stands_in() -> None:
    assert settle(ServeOptions()).devices == ("host:0",)


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        ("1", (GPU_B,)),
        ("1,0", (GPU_B, GPU_A)),
        (f"{GPU_B.upper()}, 0", (GPU_B, GPU_A)),
        ("all", (GPU_A, GPU_B)),
        ("host", ("host:0",)),
        ("host:3", ("host:0", "host:1", "host:2")),
    ],
)
def test_devices_are_named_by_number_uuid_or_kind(wanted: str, devices: tuple[str, ...]) -> None:
    assert settle(ServeOptions(devices=wanted), gpus=[GPU_A, GPU_B]).devices == devices


def test_a_list_of_gpu_numbers_in_the_file_is_a_list_of_devices() -> None:
    assert settle(parse_toml("devices = [1, 0]"), gpus=[GPU_A, GPU_B]).devices == (GPU_B, GPU_A)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("2", f"no GPU '2'. Visible GPUs: 0 = {GPU_A}"),
        ("0,", "no GPU ''"),
        (f"0,{GPU_A}", "named twice"),
        ("host:0", "host:N is N host devices"),
        ("host:x", "host:N is N host devices"),
        ("host:", "host:N is N host devices"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(ServeOptions(devices=wanted), gpus=[GPU_A])


def test_more_memory_than_is_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--memory 8GiB is more than the 4\.0 GiB that the mach"):
        settle(ServeOptions(memory="8GiB"), available=4 * GIB)


def test_on_a_machine_whose_memory_grows_the_figure_can_be_taken_at_its_word() -> None:
    options = ServeOptions(memory="8GiB", memory_check=False)
    assert settle(options, available=4 * GIB).memory_bytes == 8 * GIB


def test_every_device_needs_a_chunk() -> None:
    options = ServeOptions(memory="64MiB", devices="host:2")
    with pytest.raises(ConfigError, match=r"too little: 2 device.*128\.0 MiB"):
        settle(options)
    assert settle(ServeOptions(memory="64MiB", devices="host")).memory_bytes == CHUNK_BYTES


def test_memory_is_counted_in_whole_chunks() -> None:
    assert settle(ServeOptions(memory="200MiB")).memory_bytes == 3 * CHUNK_BYTES


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        settle(ServeOptions(socket="/tmp/" + "x" * 100))


def test_the_default_socket_is_the_users_own(tmp_path: Path) -> None:
    uid = os.getuid()
    by_environment = default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}, tmp_path)
    assert by_environment == Path("/run/user/7/tierd/tierd.sock")
    assert default_socket({}, tmp_path).parent.name == f"tierd-{uid}"
    (tmp_path / str(uid)).mkdir()
    assert default_socket({}, tmp_path) == tmp_path / str(uid) / "tierd" / "tierd.sock"


def test_the_socket_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    socket = tmp_path / "a" / "b" / "tierd.sock"
    prepare_socket_directory(socket)
    prepare_socket_directory(socket)
    assert socket.parent.stat().st_mode & 0o777 == 0o700


def test_a_socket_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        prepare_socket_directory(tmp_path / "tierd.sock")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_socket_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        prepare_socket_directory(tmp_path / "tierd.sock")


def test_a_pool_can_be_capped_by_flag_and_by_file() -> None:
    assert settle(ServeOptions(pool=("swa=20%", "mamba=7.5%"))).pool_shares == {
        "swa": 0.2,
        "mamba": 0.075,
    }
    assert settle(parse_toml('pool = ["swa=20%"]')).pool_shares == {"swa": 0.2}
    assert settle(ServeOptions()).pool_shares == {}


@pytest.mark.parametrize("text", ["swa", "swa=", "swa=20", "=20%", "swa=0%", "swa=101%", "swa=x%"])
def test_a_cap_that_makes_no_sense_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"as in swa=20%"):
        settle(ServeOptions(pool=(text,)))


@pytest.mark.parametrize("value", ['"swa=20%"', "[1]"])
def test_caps_in_a_file_are_a_list_of_strings(value: str) -> None:
    with pytest.raises(ConfigError, match="`pool` must be a list of strings"):
        parse_toml(f"pool = {value}")


@pytest.mark.parametrize(
    ("text", "rate"), [("", None), ("max-gbps = 10", 10.0), ("max-gbps = 0.5", 0.5)]
)
def test_copies_can_have_a_cap(text: str, rate: float | None) -> None:
    assert settle(parse_toml(text)).max_gbps == rate


@pytest.mark.parametrize("rate", [0.0, -1.0, 0.4, float("inf"), float("nan")])
def test_a_cap_that_cannot_work_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="--max-gbps"):
        settle(ServeOptions(max_gbps=rate))


@pytest.mark.parametrize(("text", "patience"), [("", 1.0), ("patience = 2", 2.0)])
def test_deadlines_can_be_stretched(text: str, patience: float) -> None:
    assert settle(parse_toml(text)).patience == patience


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_deadlines_that_pass_at_once_or_never_are_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="--patience"):
        settle(ServeOptions(patience=factor))


def test_gpus_have_all_memory_pinned_ahead_and_the_host_backend_none() -> None:
    assert settle(ServeOptions(memory="8GiB"), gpus=[GPU_A]).pin_ahead_bytes == 8 * GIB
    assert settle(ServeOptions(memory="8GiB")).pin_ahead_bytes == 0
    some = ServeOptions(memory="8GiB", pin_ahead="2GiB")
    assert settle(some).pin_ahead_bytes == 2 * GIB
    more = ServeOptions(memory="8GiB", pin_ahead="16GiB")
    assert settle(more).pin_ahead_bytes == 8 * GIB
    with pytest.raises(ConfigError, match=r"--pin-ahead much: write `all` or a size"):
        settle(ServeOptions(pin_ahead="much"))


def test_threads_that_pin_are_bounded() -> None:
    assert settle(ServeOptions(pin_threads=8)).pin_threads == 8
    with pytest.raises(ConfigError, match="--pin-threads 0: choose from 1"):
        settle(ServeOptions(pin_threads=0))


def test_memory_in_huge_pages_need_not_be_available_besides() -> None:
    huge = {2 << 20: Reserved(total=4096, free=4096)}
    config = settle(ServeOptions(memory="8GiB"), available=1 * GIB, huge=huge)
    assert config.pages.huge_bytes == 8 * GIB
    with pytest.raises(ConfigError, match=r"more than the 1\.0 GiB"):
        settle(ServeOptions(memory="8GiB", hugepages="off"), available=1 * GIB, huge=huge)
    with pytest.raises(ConfigError, match="--hugepages 4MiB: choose one of auto"):
        settle(ServeOptions(hugepages="4MiB"))


def test_memory_is_counted_in_chunks_of_the_largest_pages() -> None:
    huge = {1 << 30: Reserved(total=4, free=4)}
    options = ServeOptions(memory="3.5GiB", hugepages="1GiB")
    config = settle(options, huge=huge)
    assert (config.memory_bytes, config.pages.chunk_bytes) == (3 * GIB, GIB)
    with pytest.raises(ConfigError, match=r"one chunk of 1\.0 GiB each"):
        settle(ServeOptions(memory="1GiB", hugepages="1GiB", devices="host:2"), huge=huge)


def test_a_group_is_named_or_numbered() -> None:
    assert settle(ServeOptions(group="root")).group == 0
    assert settle(parse_toml('group = "12345"')).group == 12345
    assert settle(ServeOptions()).group is None


@pytest.mark.parametrize("group", ["no such group", "-1", "", "4294967295", "x\0"])
def test_a_group_that_is_not_there_is_refused(group: str) -> None:
    with pytest.raises(ConfigError, match="getent group"):
        settle(ServeOptions(group=group))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to any group")
def test_the_socket_directory_lets_the_group_in(tmp_path: Path) -> None:
    socket = tmp_path / "a" / "tierd.sock"
    prepare_socket_directory(socket, 12345)
    prepare_socket_directory(socket, 12345)
    assert socket.parent.stat().st_mode & 0o777 == 0o750
    assert socket.parent.stat().st_gid == 12345


def test_a_directory_that_the_group_cannot_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="chmod g"):
        prepare_socket_directory(tmp_path / "tierd.sock", 12345)
