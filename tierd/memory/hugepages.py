"""Huge pages: which ones the machine has set aside, which a daemon's chunks lie in, and whether the
kernel makes more of them from ordinary memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tierd.memory.limits import format_size
from tierd.wire.geometry import CHUNK_BYTES

MIB_2, GIB_1 = 2 << 20, 1 << 30
SHMEM_POLICY = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
CHOICES = ("auto", "off", "2MiB", "1GiB")
GIANT_CHUNKS = 16
"""`auto` takes pages of 1 GiB, and so chunks of that size, where a device has this many."""


class Reserved(NamedTuple):
    """Huge pages of one size: how many there are, and those that nobody has been promised."""

    total: int
    free: int


class PagePlan(NamedTuple):
    """What chunks lie in.

    `huge`: sizes of huge pages to try in this order before ordinary pages, each with the bytes to
    take of them at most. `chunk_bytes`: the unit of claims. `note`: what to tell the user, if
    anything; `short` if it is not what was asked for.
    """

    huge: tuple[tuple[int, int], ...] = ()
    chunk_bytes: int = CHUNK_BYTES
    note: str = ""
    short: bool = False

    @property
    def huge_bytes(self) -> int:
        """How much of the memory is in huge pages."""
        return sum(nbytes for _, nbytes in self.huge)


def reserved_pages(root: Path = Path("/")) -> dict[int, Reserved]:
    """By size in bytes, the huge pages of this machine. Those that it would make on demand
    (nr_overcommit_hugepages) do not count: to find unbroken memory for them can take seconds."""
    found = {}
    for directory in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        counts = {
            name: int((directory / f"{name}_hugepages").read_text())
            for name in ("nr", "free", "resv")
        }
        size = int(directory.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
        found[size] = Reserved(counts["nr"], max(0, counts["free"] - counts["resv"]))
    return found


def plan_pages(
    choice: str, memory_bytes: int, devices: int, reserved: Mapping[int, Reserved]
) -> PagePlan:
    """Choose the pages of chunks.

    Args:
        choice: One of CHOICES.
        memory_bytes: Of all chunks together.
        devices: Among which the memory is divided.
        reserved: What the machine has, by size.
    """
    if choice == "off":
        return PagePlan()
    free = {size: reserved.get(size, Reserved(0, 0)).free * size for size in (MIB_2, GIB_1)}
    roomy = memory_bytes >= GIANT_CHUNKS * GIB_1 * devices
    giant = choice == "1GiB" or (choice == "auto" and roomy and free[GIB_1] >= memory_bytes)
    wanted = GIB_1 if giant else MIB_2
    tried = (GIB_1, MIB_2) if giant else (MIB_2,)
    sizes = tuple(size for size in tried if free[size] >= max(size, CHUNK_BYTES))
    chunk_bytes = max((CHUNK_BYTES, *sizes))
    huge: list[tuple[int, int]] = []
    left = memory_bytes
    for size in sizes:
        nbytes = min(left, free[size]) // chunk_bytes * chunk_bytes
        huge.append((size, nbytes))
        left -= nbytes
    plan = PagePlan(tuple(huge), chunk_bytes)
    whole = memory_bytes // chunk_bytes * chunk_bytes
    if dict(huge).get(wanted, 0) == whole:
        return plan
    missing = whole - min(whole, free[wanted])
    total = reserved.get(wanted, Reserved(0, 0)).total
    note = (
        f"huge pages: {format_size(plan.huge_bytes)} of {format_size(whole)} are reserved, "
        f"the rest is pinned in ordinary pages. "
        f"To reserve what is missing: `{how_to_reserve(wanted, total + -(-missing // wanted))}`"
    )
    return plan._replace(note=note, short=choice != "auto")


def how_to_reserve(size: int, pages: int) -> str:
    """The command, as root. Early after boot it finds unbroken memory; for pages of 1 GiB the
    kernel's command line (`hugepagesz=1G hugepages=N`) is surer."""
    kib = size // 1024
    return f"echo {pages} > /sys/kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages"


def joined_pages(root: Path = Path("/")) -> str:
    """The kernel's policy for joining shared memory to huge pages: "never", "advise" (chunks ask
    for it), "always" ...; "never" too where it cannot."""
    try:
        choices = (root / SHMEM_POLICY).read_text().split()
    except OSError:
        return "never"
    return next((word[1:-1] for word in choices if word.startswith("[")), "never")


def joining_note(policy: str) -> str:
    """What to tell the user of memory that is not in reserved huge pages.

    Args: `policy`: as `joined_pages` has it.
    """
    if policy in ("never", "deny"):
        return (
            "the kernel does not join shared memory to huge pages: that of a large daemon that is "
            "killed takes seconds to be free again. To let it, where memory is unbroken: "
            f"`echo advise > /{SHMEM_POLICY}`"
        )
    return f"the kernel joins shared memory to huge pages where it is unbroken ({policy})"
