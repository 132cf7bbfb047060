"""Messages that almost make sense: valid ones with a few things changed, by a seed.

Works on decoded msgpack (maps, lists, ints, blobs, text), so that most of what comes out gets past
the first check and is refused, or not, by a later one. Some is then damaged as bytes, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

EDGES = [
    *(0, 1, -1, 2, 3, 7, 63, 64, 255, 4096),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**62 + 1),
    *(2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
]
"""Integers that msgpack can carry, at which something ends."""
TEXTS = ["", "a", "\0", "x" * 256, "x" * 257, "x" * 5000, "host:0", "GPU-0", "é" * 300, "../.."]
SHALLOW = 20
BLOB_SIZES = [0, 1, 7, 8, 31, 32, 33, 63, 64, 65, 4096]
NESTED = 100
"""Lists in a list that one change makes. All changes of a message together must be no deeper than
what changes and encodes them may call itself."""
DEEP = b"\x91" * 3000
"""The beginning of a list in a list, encoded, deeper than anything decodes."""


class Mutator:
    """Changes values; the same seed makes the same changes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def message(self, template: Any, donors: Sequence[Any] = ()) -> bytes:
        """A template with one to four changes, encoded.

        Args:
            donors: Other messages, of which parts may be taken.
        """
        rng = self._rng
        value = _copy(template)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            kind = rng.random()
            if kind < 0.4:
                self._leaf(value, donors)
            elif kind < 0.5:
                self._shift(value)
            else:
                value = self._somewhere(value, donors)
        data = msgspec.msgpack.encode(value)
        return self.damage(data) if rng.random() < 0.1 else data

    def flip(self, data: bytes) -> bytes:
        """One byte is another one."""
        at = int(self._rng.random() * len(data))
        return data[:at] + bytes([int(self._rng.random() * 256)]) + data[at + 1 :]

    def damage(self, data: bytes) -> bytes:
        """Bytes changed, dropped, doubled, inserted, cut off, or nested."""
        rng = self._rng
        spoilt = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(spoilt) + 1)
            kind = rng.randrange(6)
            if kind == 0 and at < len(spoilt):
                spoilt[at] = rng.randrange(256)
            elif kind == 1:
                del spoilt[at : at + rng.randint(1, 9)]
            elif kind == 2:
                spoilt[at:at] = spoilt[at : at + rng.randint(1, 9)]
            elif kind == 3:
                spoilt[at:at] = rng.randbytes(rng.randint(1, 5))
            elif kind == 4:
                spoilt[at:at] = DEEP
            else:
                del spoilt[at:]
        return bytes(spoilt)

    def _leaf(self, value: Any, donors: Sequence[Any]) -> None:
        """Change a number, a text or a blob, each as likely as any other."""
        leaves = list(_leaves(value)) if isinstance(value, dict | list) else []
        if leaves:
            holder, place = self._rng.choice(leaves)
            holder[place] = self._change(holder[place], donors)

    def _shift(self, value: Any) -> None:
        """Take something from a number and add it to the one that stands in its place in the next
        row: the sum stays, and what depends on it."""
        rows = [
            (row, following, column)
            for table in _lists(value)
            for row, following in pairwise(table)
            if isinstance(row, list) and isinstance(following, list)
            for column in range(min(len(row), len(following)))
            if type(row[column]) is int and type(following[column]) is int
            if row[column] > -(2**62) and following[column] < 2**62
        ]
        if rows:
            row, following, column = self._rng.choice(rows)
            row[column] -= 1
            following[column] += 1

    def _somewhere(self, value: Any, donors: Sequence[Any]) -> Any:
        """Change one value, anywhere in a tree of them."""
        rng = self._rng
        holder: Any = None
        place: Any = None
        here = value
        while isinstance(here, dict | list) and here and (holder is None or rng.random() < 0.8):
            holder = here
            place = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
            here = here[place]
        changed = self._change(here, donors)
        if holder is None:
            return changed
        kind = rng.randrange(12)
        if isinstance(holder, dict) and kind == 0:
            del holder[place]
        elif isinstance(holder, dict) and kind == 1:
            holder[rng.choice(["x", "op", "protocol", "keys"])] = changed
        elif isinstance(holder, list) and kind == 0:
            del holder[place]
        elif isinstance(holder, list) and kind < 3:
            holder[place:place] = [here] * rng.choice((1, 1, 2, 33, 300))
        else:
            holder[place] = changed
        return value

    def _change(self, value: Any, donors: Sequence[Any]) -> Any:
        rng = self._rng
        if rng.random() < 0.05:
            return self._anything(donors)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            near = value + rng.choice((-1, 1, 2, 64, -value))
            return near if rng.random() < 0.5 and -(2**63) <= near < 2**64 else rng.choice(EDGES)
        if isinstance(value, str):
            return rng.choice([*TEXTS, value[:-1], value + "x"])
        if isinstance(value, bytes):
            cut = rng.randrange(len(value) + 1)
            return rng.choice(
                [value[:cut], value[cut:], value * 2, value[32:], value + bytes(32), bytes(cut)]
            )
        if isinstance(value, float):
            return rng.choice([0.0, -1.0, 1e308, float("inf"), float("nan")])
        return self._anything(donors)

    def _anything(self, donors: Sequence[Any]) -> Any:
        rng = self._rng
        makers: list[Callable[[], Any]] = [
            lambda: rng.choice(EDGES),
            lambda: rng.choice(TEXTS),
            lambda: bytes(rng.choice(BLOB_SIZES)),
            lambda: None,
            list,
            dict,
            lambda: [rng.choice(EDGES) for _ in range(3)],
            lambda: 1.5,
            lambda: _nest(rng.choice((3, NESTED))),
            lambda: _copy(rng.choice(donors)) if donors else None,
        ]
        return rng.choice(makers)()


def is_shallow(value: Any) -> bool:
    """Is this nested so little that it can be changed by functions that call themselves?"""
    here = [value]
    for _ in range(SHALLOW):
        here = [
            inner
            for each in here
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return not here


def _leaves(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, place) of every value that holds no others."""
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for place, each in places:
        if isinstance(each, dict | list):
            yield from _leaves(each)
        else:
            yield value, place


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _lists(each)


def _nest(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _copy(value: Any) -> Any:
    """A copy whose maps and lists can be changed."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copy(each) for each in value]
    return value
