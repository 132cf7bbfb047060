"""How much memory this process may use, by the machine and by its cgroups, and sizes as people
write them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from tierd.wire.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Available(NamedTuple):
    """Memory that can still be claimed, and what sets that bound."""

    nbytes: int
    bound: str


def parse_size(text: str) -> int:
    """Bytes of a size such as "64GiB", "1.5 TiB", "500MB" or "1073741824".

    KiB, MiB, GiB ... count in 1024, KB, MB, GB ... in 1000; a bare K, M, G ... is KiB, MiB, GiB.

    Raises: ConfigError: not a size.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size; write one like 64GiB, 500MB or 1073741824")
    return int(Decimal(match[1]) * factor)


def format_size(nbytes: float) -> str:
    """A size for people: "64.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def available_memory(root: Path = Path("/")) -> Available:
    """What can still be claimed: the least of the machine's MemAvailable and the headroom of
    every cgroup, v1 or v2, from this process's own up to the top one that it can see.

    Args:
        root: Where `proc` and the cgroup mounts are found.

    Page cache that the kernel would drop counts as free in both.
    """
    bounds = [Available(_mem_available(root), "the machine")]
    for directory, limit, usage, cache in _memory_cgroups(root):
        maximum = _number(directory / limit)
        used = _number(directory / usage)
        if maximum is None or used is None:
            continue
        reclaimable = _field(directory / "memory.stat", cache) or 0
        name = "/" + str(directory.relative_to(root))
        bounds.append(Available(max(0, maximum - used + reclaimable), f"the cgroup at {name}"))
    return min(bounds, key=lambda bound: bound.nbytes)


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable; tierd needs Linux 3.14 or later")


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Each level's directory, with its names for limit, usage and reclaimable page cache."""
    v1, v2 = _own_cgroups(root)
    mountinfo = root / "proc/self/mountinfo"
    for line in mountinfo.read_text().splitlines() if mountinfo.exists() else ():
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(maxsplit=2)
        mounted, at = (_unescape(field) for field in mount.split()[3:5])
        if kind == "cgroup2" and v2 is not None:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from ((level, *names) for level in _levels(root, at, mounted, v2))
        elif kind == "cgroup" and v1 is not None and "memory" in options.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from ((level, *names) for level in _levels(root, at, mounted, v1))


def _own_cgroups(root: Path) -> tuple[str | None, str | None]:
    """This process's paths in the v1 memory hierarchy and in the v2 one."""
    v1 = v2 = None
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            v2 = path
        elif "memory" in controllers.split(","):
            v1 = path
    return v1, v2


def _levels(root: Path, at: str, mounted: str, path: str) -> Iterator[Path]:
    """Directories from a cgroup up to the one that is mounted.

    A container may see the host's path of its group while only the group itself is mounted: what
    lies outside the mount cannot be read, and the mount point is then its own group.
    """
    top = root / at.lstrip("/")
    prefix = mounted.rstrip("/")
    inside = path[len(prefix) :] if path == prefix or path.startswith(prefix + "/") else ""
    level = top / inside.lstrip("/")
    if ".." in level.parts or not level.is_dir():
        level = top
    while True:
        yield level
        if level == top:
            return
        level = level.parent


def _number(file: Path) -> int | None:
    """A cgroup file's number; None if there is none, or no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(v) for k, _, v in (line.partition(" ") for line in lines) if k == name), None)


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
