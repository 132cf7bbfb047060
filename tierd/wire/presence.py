"""The presence table: which pages the tier holds, in shared memory that every rank can read.

It lets a lookup miss without a message. It may say yes of a page that is not there, and then the
rank asks; of a page that is there and settled it does not say no.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tierd.wire.errors import ProtocolError
from tierd.wire.layout import PAGE
from tierd.wire.limits import KEY_BYTES

MAGIC = 0x6C62745F64726574
WIDTH = 8
"""Fingerprints of a bucket. The ninth word counts those that found no place in it."""
FEW = 16
"""Keys that are quicker done one by one."""
_WORDS = WIDTH + 1
_HEARTBEAT, _SUPERSEDED = 2, 3
"""Their words in the header."""
_MASK = 2**64 - 1


class Salt:
    """What makes one pool of one namespace differ from another: part of every fingerprint."""

    def __init__(self, namespace: bytes, pool: str) -> None:
        digest = hashlib.blake2b(namespace + pool.encode(), digest_size=16).digest()
        self.high = int.from_bytes(digest[:8], "little")
        self.low = int.from_bytes(digest[8:], "little")


def nbytes(buckets: int) -> int:
    """The size of a table of so many buckets, a power of two."""
    return PAGE + buckets * _WORDS * 8


def buckets_for(pages: int) -> int:
    """How many buckets hold so many pages with few spills: half full."""
    return max(1024, 1 << (2 * pages // WIDTH).bit_length())


class PresenceTable:
    """A view of a table. Only control writes; a reader may see a write half done, which is a miss
    or a question too many, never a wrong page.

    Args:
        buffer: Mapped memory of `nbytes(buckets)` at least.

    Raises: ProtocolError: not a table, or shorter than it says.
    """

    def __init__(self, buffer: Any) -> None:
        words = memoryview(buffer).cast("B").cast("Q")
        if len(words) * 8 < PAGE or words[0] != MAGIC:
            raise ProtocolError("the descriptor is not a presence table")
        buckets = words[1]
        if buckets & (buckets - 1) or not 1 <= buckets <= 1 << 40:
            raise ProtocolError(f"a presence table of {buckets} buckets")
        if len(words) * 8 < nbytes(buckets):
            raise ProtocolError(f"a presence table of {buckets} buckets in {len(words) * 8} bytes")
        self._head = words[: PAGE // 8]
        self._words = words[PAGE // 8 :]
        self.buckets = buckets
        self._mask = buckets - 1
        self._table: npt.NDArray[np.uint64] = np.frombuffer(
            self._words, np.uint64, count=buckets * _WORDS
        ).reshape(buckets, _WORDS)

    @staticmethod
    def format(buffer: Any, buckets: int) -> PresenceTable:
        """Make an empty table of zeroed memory."""
        words = memoryview(buffer).cast("B").cast("Q")
        words[1] = buckets
        words[0] = MAGIC
        return PresenceTable(buffer)

    @property
    def heartbeat_s(self) -> float:
        """When control's loop went round last, seconds of its monotonic clock."""
        return self._head[_HEARTBEAT] / 1e9

    def beat(self, now_s: float) -> None:
        """Control's loop goes round."""
        self._head[_HEARTBEAT] = int(now_s * 1e9)

    def supersede(self) -> None:
        """Another table takes its place: from now on this one is sure of nothing."""
        self._head[_SUPERSEDED] = 1

    def may_have(self, key: bytes, salt: Salt) -> bool:
        """False: the page is not in the tier."""
        if self._head[_SUPERSEDED]:
            return True
        at, fingerprint = self._place(key, salt)
        bucket = self._words[at : at + _WORDS].tolist()
        return bool(bucket[WIDTH]) or fingerprint in bucket[:WIDTH]

    def add(self, keys: bytes, salt: Salt) -> None:
        """Pages can be hit from now on. `keys`: one after the other, 32 bytes each."""
        if len(keys) <= FEW * KEY_BYTES:
            for i in range(0, len(keys), KEY_BYTES):
                at, fingerprint = self._place(keys[i : i + KEY_BYTES], salt)
                self._exchange(at, 0, fingerprint, spilled=1)
            return
        buckets, fingerprints = self._places(keys, salt)
        self._exchange_all(buckets, np.zeros_like(fingerprints), fingerprints, spilled=1)

    def remove(self, keys: bytes, salt: Salt) -> None:
        """Pages that were added are gone."""
        if len(keys) <= FEW * KEY_BYTES:
            for i in range(0, len(keys), KEY_BYTES):
                at, fingerprint = self._place(keys[i : i + KEY_BYTES], salt)
                self._exchange(at, fingerprint, 0, spilled=-1)
            return
        buckets, fingerprints = self._places(keys, salt)
        self._exchange_all(buckets, fingerprints, np.zeros_like(fingerprints), spilled=-1)

    def release(self) -> None:
        """Let go of the buffer."""
        del self._table
        self._words.release()
        self._head.release()

    def _places(
        self, keys: bytes, salt: Salt
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The bucket of each key, and its fingerprint. Shapes: (keys,)."""
        words = np.frombuffer(keys, "<u8").reshape(-1, 4)
        buckets = (words[:, 0] ^ np.uint64(salt.low)) & np.uint64(self._mask)
        fingerprints = np.maximum(words[:, 1] ^ np.uint64(salt.high), np.uint64(1))
        return buckets.view(np.int64), fingerprints

    def _exchange_all(
        self,
        buckets: npt.NDArray[np.int64],
        old: npt.NDArray[np.uint64],
        new: npt.NDArray[np.uint64],
        *,
        spilled: int,
    ) -> None:
        """`_exchange` in many buckets."""
        theirs = self._table.take(buckets, axis=0)[:, :WIDTH] == old[:, None]
        found, where = theirs.any(axis=1), theirs.argmax(axis=1)
        if found.all() and len(set(buckets.tolist())) == len(buckets):
            self._table[buckets, where] = new
            return
        # What has been seen of a bucket holds for the first one in it; the others are done one
        # by one, as are those that spill.
        first = np.zeros(len(buckets), np.bool_)
        first[np.unique(buckets, return_index=True)[1]] = True
        at_once = found & first
        self._table[buckets[at_once], where[at_once]] = new[at_once]
        for i in np.flatnonzero(~at_once).tolist():
            self._exchange(int(buckets[i]) * _WORDS, int(old[i]), int(new[i]), spilled=spilled)

    def _exchange(self, at: int, old: int, new: int, *, spilled: int) -> None:
        """In the bucket that begins at word `at`, put a fingerprint in another's place; if that
        is not there, count one `spilled`."""
        for i in range(at, at + WIDTH):
            if self._words[i] == old:
                self._words[i] = new
                return
        self._words[at + WIDTH] += spilled

    def _place(self, key: bytes, salt: Salt) -> tuple[int, int]:
        """A page's first word, and its fingerprint, which is never 0. Keys are SHA-256 sums: any
        of their bits are as good as others."""
        bucket = (int.from_bytes(key[:8], "little") ^ salt.low) & self._mask
        fingerprint = (int.from_bytes(key[8:16], "little") ^ salt.high) & _MASK
        return bucket * _WORDS, fingerprint or 1
