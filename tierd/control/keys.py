"""Page keys in bulk: as one blob, and as an index from key to slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from tierd.eviction.columns import column, grown
from tierd.eviction.policy import Slots
from tierd.wire.limits import KEY_BYTES

MISSING = -1

SHARDS = 256
"""A dictionary that outgrows its table is rebuilt at once: 100 ms for three million pages, a
fraction of one in each of so many parts."""
LOOK = 8
"""Keys that are looked up one by one before the next ones are expected in the slots that follow."""
LONGEST_SEARCH = 256
"""Where none of some keys is here, so many of the next ones are looked up one by one at most."""
FIRST_RUN, LONGEST_RUN = 128, 4096
"""Keys that are compared at once with those of a run of slots, at first and at most."""
_WORDS = KEY_BYTES // 8


class Keys(Sequence[bytes]):
    """Keys of pages in chain order, without an object for each.

    Args: `blob`: KEY_BYTES for each key.
    """

    __slots__ = ("blob",)

    def __init__(self, blob: bytes) -> None:
        self.blob = blob

    @staticmethod
    def of(keys: Iterable[bytes]) -> Keys:
        """These keys in a row."""
        return Keys(b"".join(keys))

    def __len__(self) -> int:
        return len(self.blob) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Keys: ...
    def __getitem__(self, index: int | slice) -> bytes | Keys:
        if isinstance(index, slice):
            first, end, step = index.indices(len(self))
            if step != 1:
                raise ValueError("keys come in chain order")
            return Keys(self.blob[first * KEY_BYTES : max(first, end) * KEY_BYTES])
        first = range(len(self))[index] * KEY_BYTES
        return self.blob[first : first + KEY_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.split())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self.blob == other.blob

    def __hash__(self) -> int:
        return hash(self.blob)

    def __repr__(self) -> str:
        return f"Keys({len(self)})"

    @property
    def rows(self) -> npt.NDArray[np.uint64]:
        """A key a row, as words of 64 bits. Shape: (len(self), KEY_BYTES // 8)."""
        return np.frombuffer(self.blob, np.uint64).reshape(-1, _WORDS)

    def split(self) -> list[bytes]:
        """Each key as an object of its own."""
        blob = self.blob
        return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]

    def has_repeats(self) -> bool:
        """Is a key there twice?"""
        return len(set(self.split())) < len(self)

    def where(self, mask: npt.NDArray[np.bool_]) -> Keys:
        """Those that a mask of shape (len(self),) names."""
        return self if mask.all() else Keys(self.rows[mask].tobytes())


class KeyIndex:
    """Which slot each page lies in.

    Pages of a chain mostly lie in a run of slots: once some do, the rest is compared with the keys
    of the slots that follow, which costs a tenth of looking it up.

    Args: `most`: how many slots to expect.
    """

    def __init__(self, most: int = 0) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._keys: npt.NDArray[np.uint64] = column(np.uint64, most, width=_WORDS)
        self._used: npt.NDArray[np.bool_] = column(np.bool_, most)

    def grow(self, capacity: int) -> None:
        """Slots 0 .. capacity - 1 may be used from now on."""
        self._keys = grown(self._keys, capacity)
        self._used = grown(self._used, capacity)

    def get(self, key: bytes) -> int | None:
        """The slot of one key; None if it is not here."""
        return self._shards[key[0]].get(key)

    def key_of(self, slot: int) -> bytes:
        """The key of a slot that is in use."""
        key: bytes = self._keys[slot].tobytes()
        return key

    def keys_of(self, slots: Slots) -> Keys:
        """The keys of slots that are in use."""
        return Keys(self._keys[slots].tobytes())

    def find(self, keys: Keys) -> Slots:
        """The slot of each key, MISSING where there is none. Shape: (len(keys),)."""
        return self._find(keys, to_first_missing=False)

    def prefix(self, keys: Keys) -> Slots:
        """The slots of the keys up to the first that is missing. Shape: (how many those are,)."""
        return self._find(keys, to_first_missing=True)

    def add(self, keys: Keys, slots: Slots) -> None:
        """Different keys that are not here yet get slots that are free."""
        shards = self._shards
        for key, slot in zip(keys.split(), slots.tolist(), strict=True):
            shards[key[0]][key] = slot
        self._keys[slots] = keys.rows
        self._used[slots] = True

    def remove(self, slots: Slots) -> Keys:
        """These slots are free again; returns the keys that they had."""
        keys = self.keys_of(slots)
        shards = self._shards
        for key in keys.split():
            del shards[key[0]][key]
        self._used[slots] = False
        return keys

    def _find(self, keys: Keys, *, to_first_missing: bool) -> Slots:
        shards, blob, count = self._shards, keys.blob, len(keys)
        # Slots that were looked up one by one, and before them whole runs.
        single: list[int] = []
        found: list[Slots] = []
        at, look = 0, 1
        while at < count:
            first, end = at * KEY_BYTES, min(at + look, count) * KEY_BYTES
            some = [
                shards[blob[i]].get(blob[i : i + KEY_BYTES], MISSING)
                for i in range(first, end, KEY_BYTES)
            ]
            at += len(some)
            if to_first_missing and MISSING in some:
                single += some[: some.index(MISSING)]
                break
            single += some
            start = some[0]
            if start == MISSING:
                look = max(LOOK, min(2 * look, LONGEST_SEARCH))
                continue
            look = LOOK
            follow = start + len(some)
            if some == list(range(start, follow)) and (run := self._run(keys, at, follow)):
                del single[-len(some) :]
                if single:
                    found.append(np.array(single, np.int64))
                found.append(np.arange(start, follow + run))
                single = []
                at += run
        if single or not found:
            found.append(np.array(single, np.int64))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _run(self, keys: Keys, at: int, slot: int) -> int:
        """How many keys from number `at` on lie in the slots from `slot` on, one after the
        other."""
        most = min(len(keys) - at, len(self._used) - slot)
        blob, run, look = keys.blob, 0, FIRST_RUN
        while run < most:
            look = min(look, most - run)
            here = slice(slot + run, slot + run + look)
            first = (at + run) * KEY_BYTES
            # As bytes: of a few keys, that is a fraction of what any array operation costs.
            mine, theirs = self._keys[here].tobytes(), blob[first : first + look * KEY_BYTES]
            unused = self._used[here].tobytes().find(0)
            if mine != theirs or unused >= 0:
                alike = _alike(mine, theirs)
                return run + (alike if unused < 0 else min(alike, unused))
            run += look
            look = min(4 * look, LONGEST_RUN)
        return run


def _alike(one: bytes, other: bytes) -> int:
    """How many keys two blobs of one length begin with in common."""
    same = np.frombuffer(one, np.uint64) == np.frombuffer(other, np.uint64)
    return len(same) // _WORDS if same.all() else int(same.argmin()) // _WORDS
