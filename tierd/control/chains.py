"""Pages in any order, put back into chains. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def chains(keys: Sequence[bytes], parents: Sequence[bytes | None]) -> Iterator[list[int]]:
    """The pages as runs in which each follows the one before it; a run whose first page follows
    one that is here comes after the run that holds that one.

    Left out: a page whose key another one has, and pages that follow each other in a ring.

    Args:
        keys: Of each page.
        parents: The key of the page before it; b"" if there is none, None if that is not known.

    Yields: indices of pages.
    """
    here: dict[bytes, int] = {}
    for i, key in enumerate(keys):
        here.setdefault(key, i)
    follower: dict[bytes, int] = {}
    branches: dict[bytes, list[int]] = {}
    starts: list[int] = []
    for i in here.values():
        parent = parents[i]
        if not parent or parent not in here:
            starts.append(i)
        elif follower.setdefault(parent, i) != i:
            branches.setdefault(parent, []).append(i)
    starts.reverse()
    while starts:
        page: int | None = starts.pop()
        run: list[int] = []
        while page is not None:
            run.append(page)
            key = keys[page]
            if key in branches:
                starts += branches[key]
            page = follower.get(key)
        yield run
