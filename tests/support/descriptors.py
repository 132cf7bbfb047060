"""Which descriptors this process holds, so that a test can tell those that it left behind.

Numbers alone do not tell: what earlier tests dropped is closed whenever it is collected, and
would make the count fall while another one leaks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

Open = frozenset[tuple[int, str]]


def open_descriptors(having: str = "") -> Open:
    """Number and file of each open descriptor with this in its file's name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that the folder is read through
            found.append((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return frozenset(one for one in found if having in one[1])


def opened_since(before: Open, having: str = "") -> list[tuple[int, str]]:
    """Those that were not open before, or not of that file, and are not garbage."""
    if open_descriptors(having) - before:
        gc.collect()
    return sorted(open_descriptors(having) - before)


@contextmanager
def descriptors_left(more: int) -> Iterator[None]:
    """This process may open so many more descriptors, and no others: nor does it close any that
    are garbage meanwhile."""
    gc.disable()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(number for number, _ in open_descriptors())
    plugs = [os.dup(0)]
    while plugs[-1] <= highest:
        plugs.append(os.dup(0))
    first_free = plugs.pop()
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.enable()
        for fd in plugs:
            os.close(fd)
