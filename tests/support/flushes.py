"""Backups a row each, as tests name them, turned into the columns of a `Flush`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tierd.wire.messages import Part


class Row(NamedTuple):
    """A backup. Without parts it is a tombstone."""

    seq: int
    parts: Sequence[Part] = ()
    parent: bytes | None = None


def columns(rows: Iterable[Row]) -> dict[str, Any]:
    """All columns of a flush, whose `keys` are those of each part in turn."""
    rows = list(rows)
    parts = [part for row in rows for part in row.parts]
    pages = [part.pages for part in parts]
    return {
        "seqs": [row.seq for row in rows],
        "parts": [len(row.parts) for row in rows],
        "parents": [row.parent for row in rows],
        "pools": [part.pool for part in parts],
        "pages": pages,
        "ring": [part.ring for part in parts],
        "first": list(accumulate(pages, initial=0))[: len(pages)],
    }
