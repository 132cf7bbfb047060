"""What `tierd serve` runs with: flags over a TOML file over defaults, checked on the machine."""

from __future__ import annotations

import grp
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierd.meeting import check_socket, default_socket
from tierd.memory.hugepages import CHOICES, PagePlan, Reserved, plan_pages
from tierd.memory.limits import Available, format_size, parse_size
from tierd.memory.placement import PIN_THREADS
from tierd.wire.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOG_LEVELS = ("debug", "info", "warning", "error")
VERIFY = ("off", "sample", "always")
MAX_HOST_DEVICES = 64
MIN_PATIENCE, MAX_PATIENCE = 0.05, 100.0
MIN_GBPS = 0.5
"""Slower, and the largest restores would not be done before they are given up."""
MAX_PIN_THREADS = 64
_TYPES: Mapping[str, type] = {
    "memory_check": bool,
    "pool": tuple,
    "patience": float,
    "max_gbps": float,
    "pin_threads": int,
}


@dataclass(frozen=True)
class ServeConfig:
    """A daemon's settings, complete and checked.

    Attributes:
        socket: The lifeline's Unix socket; the ZeroMQ socket lies beside it, as `<socket>.zmq`.
        memory_bytes: Host memory for pages, a multiple of `pages.chunk_bytes`.
        devices: One copier each: GPU UUIDs ("GPU-..."), or "host:0", "host:1", ...
        log_level: One of `LOG_LEVELS`.
        pool_shares: For each pool that has a cap, by name: the share of the memory that its pages
            take at most, all engines together. 0 < share <= 1.
        patience: Multiplies every deadline of `tierd.control.deadlines`.
        max_gbps: What a device's copies take at most in either direction, in GB/s (1e9 bytes).
            None: no cap.
        pages: What host memory is made of.
        pin_ahead_bytes: How much of it is pinned before anybody needs it, all devices together.
        pin_threads: How many chunks a copier touches and pins at a time.
        group: The id of a group of users who are served as we are; None: nobody else but root.
        persist: Where the pages outlive the daemon; None: they do not.
        verify: Which pages get checksums, one of `VERIFY`.
    """

    socket: Path
    memory_bytes: int
    devices: tuple[str, ...]
    log_level: str
    pool_shares: Mapping[str, float] = field(default_factory=dict)
    patience: float = 1.0
    max_gbps: float | None = None
    pages: PagePlan = field(default_factory=PagePlan)
    pin_ahead_bytes: int = 0
    pin_threads: int = PIN_THREADS
    group: int | None = None
    persist: Path | None = None
    verify: str = "off"


@dataclass(frozen=True)
class ServeOptions:
    """What was asked for, by flags or by a file. A field that is None was not said.

    `memory_check` false: take `memory` at its word, on a machine whose memory grows with use.
    """

    socket: str | None = None
    memory: str | None = None
    memory_check: bool | None = None
    devices: str | None = None
    log_level: str | None = None
    pool: tuple[str, ...] | None = None
    patience: float | None = None
    max_gbps: float | None = None
    hugepages: str | None = None
    pin_ahead: str | None = None
    pin_threads: int | None = None
    group: str | None = None
    persist: str | None = None
    verify: str | None = None

    def over(self, other: ServeOptions) -> ServeOptions:
        """These options, with `other`'s where nothing was said here."""
        names = self.__dataclass_fields__
        mine = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return ServeOptions(**{name: getattr(other, name) for name in names} | mine)


def parse_toml(text: str) -> ServeOptions:
    """The options in a config file. Its keys are the flags' names: `socket`, `memory`,
    `memory-check`, `devices`, `log-level`, `pool`, `patience`, `max-gbps`, `hugepages`,
    `pin-ahead`, `pin-threads`, `group`, `persist`, `verify`.

    Raises: ConfigError: not TOML, an unknown key, or a value of the wrong type; it names the key.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    types: Mapping[str, type] = {
        name.replace("_", "-"): _TYPES.get(name, str) for name in ServeOptions.__dataclass_fields__
    }
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in types:
            raise ConfigError(f"unknown key `{key}`; the keys are {', '.join(types)}")
        if key == "devices" and isinstance(value, list):
            if not all(isinstance(item, str | int) for item in value):
                raise ConfigError("`devices` must be a string, or a list of GPU UUIDs or numbers")
            value = ",".join(str(item) for item in value)
        if key == "pool" and isinstance(value, list) and all(isinstance(v, str) for v in value):
            value = tuple(value)
        if types[key] is float and type(value) is int:
            value = float(value)
        if not isinstance(value, types[key]) or (types[key] is int and value is True):
            kind = {
                bool: "true or false",
                float: "a number",
                int: "a whole number",
                str: 'a string in quotes, "..."',
                tuple: 'a list of strings, ["swa=20%"]',
            }[types[key]]
            raise ConfigError(f"`{key}` must be {kind}, not {value!r}")
        values[key.replace("-", "_")] = value
    return ServeOptions(**values)


def read_toml(file: Path) -> ServeOptions:
    """Raises: ConfigError: as `parse_toml`, or the file cannot be read; it names the file."""
    try:
        return parse_toml(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {file}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def resolve(
    options: ServeOptions,
    *,
    available: Callable[[], Available],
    visible_gpus: Callable[[], Sequence[str]],
    reserved: Callable[[], Mapping[int, Reserved]],
) -> ServeConfig:
    """Fill in the defaults and check the whole against the machine.

    Args:
        available: Asked for the memory that is left, if it matters.
        visible_gpus: Asked for the UUIDs of the GPUs, in CUDA's order, if it matters.
        reserved: Asked for the huge pages that the machine has, by size, if it matters.

    Raises: ConfigError: a setting that cannot work; it names the flag and what to do.
    """
    log_level = options.log_level or "info"
    if log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level {log_level}: choose one of {', '.join(LOG_LEVELS)}")
    hugepages = options.hugepages or ("off" if options.persist else "auto")
    if options.persist and hugepages != "off":
        raise ConfigError(
            f"--hugepages {hugepages}: with --persist pages lie in what its directory is made of; "
            "leave it out, and mount a hugetlbfs for huge pages"
        )
    if hugepages not in CHOICES:
        raise ConfigError(f"--hugepages {hugepages}: choose one of {', '.join(CHOICES)}")
    verify = options.verify or "off"
    if verify not in VERIFY:
        raise ConfigError(f"--verify {verify}: choose one of {', '.join(VERIFY)}")
    devices = resolve_devices(options.devices or "all", visible_gpus)
    huge = {} if hugepages == "off" else reserved()
    memory_bytes, pages = _resolve_memory(options, available, len(devices), hugepages, huge)
    return ServeConfig(
        socket=check_socket(Path(options.socket) if options.socket else default_socket()),
        memory_bytes=memory_bytes,
        devices=devices,
        log_level=log_level,
        pool_shares=dict(map(parse_pool_share, options.pool or ())),
        patience=_check_patience(1.0 if options.patience is None else options.patience),
        max_gbps=_check_max_gbps(options.max_gbps),
        pages=pages,
        pin_ahead_bytes=_resolve_pin_ahead(options.pin_ahead, memory_bytes, devices),
        pin_threads=_check_pin_threads(options.pin_threads),
        group=None if options.group is None else _resolve_group(options.group),
        persist=Path(os.path.abspath(options.persist)) if options.persist else None,
        verify=verify,
    )


def _check_max_gbps(rate: float | None) -> float | None:
    if rate is not None and not MIN_GBPS <= rate < float("inf"):
        raise ConfigError(f"--max-gbps {rate:g}: choose {MIN_GBPS:g} GB/s or more, or leave it out")
    return rate


def _resolve_group(name: str) -> int:
    """A group's id, by its name or its number."""
    try:
        return grp.getgrnam(name).gr_gid
    except (KeyError, ValueError):
        if name.isascii() and name.isdigit() and int(name) < 2**32 - 1:
            return int(name)
    raise ConfigError(f"--group {name}: there is no such group; `getent group` lists them")


def _check_patience(factor: float) -> float:
    if not MIN_PATIENCE <= factor <= MAX_PATIENCE:  # which nan is not, either
        raise ConfigError(
            f"--patience {factor:g}: choose a factor from {MIN_PATIENCE:g} to {MAX_PATIENCE:g}"
        )
    return factor


def _resolve_pin_ahead(wanted: str | None, memory_bytes: int, devices: Sequence[str]) -> int:
    """By default all of it for GPUs; the host backend pins nothing, and touches what it uses."""
    if wanted is None:
        wanted = "0" if devices[0].startswith("host:") else "all"
    if wanted == "all":
        return memory_bytes
    try:
        return min(parse_size(wanted), memory_bytes)
    except ConfigError:
        raise ConfigError(
            f"--pin-ahead {wanted}: write `all` or a size such as 64GiB; 0 pins memory when it is "
            "first needed"
        ) from None


def _check_pin_threads(threads: int | None) -> int:
    if threads is None:
        return PIN_THREADS
    if not 1 <= threads <= MAX_PIN_THREADS:
        raise ConfigError(f"--pin-threads {threads}: choose from 1 to {MAX_PIN_THREADS}")
    return threads


def parse_pool_share(text: str) -> tuple[str, float]:
    """A pool's cap: "swa=20%" is ("swa", 0.2).

    Raises: ConfigError: not of that form, or a share that is not above 0 and up to 100%.
    """
    name, _, share = text.partition("=")
    try:
        value = float(share.removesuffix("%")) / 100 if share.endswith("%") else 0.0
    except ValueError:
        value = 0.0
    if not name or not 0.0 < value <= 1.0:
        raise ConfigError(f"--pool {text}: write a pool's name and its share, as in swa=20%")
    return name, value


def resolve_devices(wanted: str, visible_gpus: Callable[[], Sequence[str]]) -> tuple[str, ...]:
    """The devices that `--devices` names.

    "all": every visible GPU, or one host device where there is none; "host", "host:N": one or N
    devices of the host backend, named "host:0", "host:1", ...; else GPU UUIDs or numbers in
    CUDA's order, with commas between.

    Raises: ConfigError: a GPU that is not visible or named twice, or not a device at all.
    """
    if wanted == "all":
        return tuple(visible_gpus()) or ("host:0",)
    kind, _, count = wanted.partition(":")
    if kind == "host":
        number = int(count) if count.isdigit() else 0 if ":" in wanted else 1
        if not 1 <= number <= MAX_HOST_DEVICES:
            raise ConfigError(
                f"--devices {wanted}: host:N is N host devices, 1 to {MAX_HOST_DEVICES}"
            )
        return tuple(f"host:{i}" for i in range(number))
    gpus = list(visible_gpus())
    by_name = {gpu.lower(): gpu for gpu in gpus} | {str(i): gpu for i, gpu in enumerate(gpus)}
    devices: list[str] = []
    for name in (part.strip() for part in wanted.split(",")):
        gpu = by_name.get(name.lower())
        if gpu is None:
            seen = ", ".join(f"{i} = {gpu}" for i, gpu in enumerate(gpus)) or "none"
            raise ConfigError(
                f"--devices {wanted}: there is no GPU {name!r}. Visible GPUs: {seen}. "
                "Or choose `all`, `host` or `host:N`"
            )
        if gpu in devices:
            raise ConfigError(f"--devices {wanted}: {gpu} is named twice")
        devices.append(gpu)
    return tuple(devices)


def _resolve_memory(
    options: ServeOptions,
    available: Callable[[], Available],
    devices: int,
    hugepages: str,
    reserved: Mapping[int, Reserved],
) -> tuple[int, PagePlan]:
    """Bytes for pages, in whole chunks, and what those are made of: what `--memory` says, or half
    of what is available."""
    check = options.memory_check is not False
    left: Available | None = None
    if check or options.memory is None:
        left = available()
    if options.memory is not None:
        nbytes, said = parse_size(options.memory), f"--memory {options.memory}"
    else:
        assert left is not None
        nbytes, said = left.nbytes // 2, f"half of the memory that {left.bound} has left"
    pages = plan_pages(hugepages, nbytes, devices, reserved)
    least = devices * pages.chunk_bytes
    if nbytes < least:
        raise ConfigError(
            f"{said} is {format_size(nbytes)}, too little: {devices} device(s) need at least one "
            f"chunk of {format_size(pages.chunk_bytes)} each, {format_size(least)}"
        )
    # Huge pages have been taken out of what the machine calls available.
    if left is not None and nbytes - pages.huge_bytes > left.nbytes:
        raise ConfigError(
            f"{said} is more than the {format_size(left.nbytes)} that {left.bound} has left; "
            "ask for less, or free some. On a machine whose memory grows with use, "
            "--no-memory-check takes the figure at its word"
        )
    return nbytes - nbytes % pages.chunk_bytes, pages
