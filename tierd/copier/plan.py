"""Which bytes a job moves: pages, slots and a pool's geometry in, copy operations out.

Chooses a pool's copy path, the size of pieces and the groups of layers; the arithmetic is in
`operations`. Pure numpy, no device. A pool's geometry is worked out once, when its rank attaches
(`PoolPlan`); a job costs a handful of vectorised steps.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tierd.copier.operations import (
    I64,
    NO_OPS,
    PROGRESSIONS,
    U64,
    Records,
    cut,
    first_rows,
    merge,
    one_by_one,
    one_page_runs,
    operations,
    progressions,
    split_rows,
)
from tierd.wire.errors import TierdError
from tierd.wire.geometry import HostLayout
from tierd.wire.messages import PoolSpec

BOX_DEPTH = 8
"""Rows that a box needs to be worth its price: one operation of the 3D batch call costs 2.5-3.3 us,
one row of the 1D call 0.43 us (README)."""
NARROW_ROW_BYTES = 32 << 10
"""Host-to-device rows below this never go through the 1D batch call: measured at 2 KiB, it slows
the engine by a third."""
WIDE_ROW_BYTES = 96 << 10
"""Rows of this and more always do, in both directions: it carries about a row a microsecond, so
that the link sets the pace (0.97 of it, where boxes of such rows come to 0.93), and rows, unlike
boxes, can be cut into layer groups for nothing."""

PIECE_BYTES = 64 << 20
PIECE_BOXES = 1024
PIECE_ROWS = 4096
"""What is submitted at a time: one to three milliseconds of work, so that a restore never waits
long behind a backup and little is on the wire when a process has to go."""
FIRST_PIECE_BYTES = 8 << 20
"""The first piece of a job that finds the wire idle; each may be twice the one before. A call that
takes many rows has its first byte on the wire late: this much is submitted while the wire would
stand still, and is on it for as long as it takes to prepare the next."""

MOST_GROUPS = 8
GROUP_BYTES = 4 << 20
"""A restore has at most so many layer groups, and as many as leave each at least so much."""
BOX_BYTES = 160 << 10
"""What the link carries in the 3 us that a box costs beside its bytes (README)."""
GROUPING_SHARE = 1 / 12
"""Each group cuts every box once more. All those together may cost this share of a restore."""


class PlanError(TierdError):
    """A job that names what its rank did not register. The text names the field."""


class Direction(enum.IntEnum):
    """The value is the index of `Segment.consumed`."""

    BACKUP = 0
    RESTORE = 1


class Path(enum.Enum):
    """How a pool's rows reach the copy engine."""

    STRIDED = "strided"
    ROWS = "rows"


class Group:
    """Some layers of a pool: how to reach their rows.

    Args:
        progressions: dtype PROGRESSIONS.
        page_bytes: How many bytes a page has there.

    Attributes:
        rows: Rows of one page.
        narrowest: Bytes of its narrowest row; 0 if it has none.
        single_rows: The same rows, a progression each (dtype PROGRESSIONS); None where rows may
            turn out to be one longer row, which they could not be then.
    """

    def __init__(self, progressions: Records, page_bytes: int) -> None:
        row_bytes = progressions["row_bytes"]
        self.progressions = progressions
        self.page_bytes = page_bytes
        self.rows = int(progressions["depth"].sum())
        self.narrowest = min(row_bytes.tolist(), default=0)
        self.single_rows = _single_rows(progressions)
        # How many pages side by side make a row of WIDE_ROW_BYTES.
        self._wide_pages: U64 = (np.uint64(WIDE_ROW_BYTES - 1) + row_bytes) // row_bytes

    def narrow_boxes(self, lengths: U64) -> int:
        """How many boxes it takes to restore runs of pages.

        Args: `lengths`: pages of each run, ascending.
        """
        return int(np.searchsorted(lengths, self._wide_pages).sum())


@dataclass(frozen=True)
class Batch:
    """Operations that a backend submits together. Shape: (n,), dtype OPS, each.

    `boxes` go through a call that takes strided operations; `rows` all have a depth of 1 and go
    through a call for plain ranges.
    """

    boxes: Records
    rows: Records

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return int((self.boxes["width"] * self.boxes["depth"]).sum() + self.rows["width"].sum())


class PoolPlan:
    """What a pool's geometry decides once: its copy path, and the progressions of any layers.

    Args:
        pool: As registered; `check_pools` has passed it.
        addresses: Where each of the rank's allocations begins, as the backend mapped it.
        host: How the pool's slots lie in host memory.
    """

    def __init__(self, pool: PoolSpec, addresses: Sequence[int], host: HostLayout) -> None:
        self.pool = pool
        self.host = host
        self.layers = 1 + max(buffer.layer for buffer in pool.buffers)
        packed = all(buffer.page_stride == buffer.row_bytes for buffer in pool.buffers)
        # Adjacent pages are adjacent bytes in every buffer, and may be adjacent in a block.
        self._merges = packed and host.block_slots > 1
        self._addresses = tuple(addresses)
        self._groups: dict[tuple[int, int], Group] = {}
        whole = self.group(0, self.layers)
        self.wide = whole.narrowest >= WIDE_ROW_BYTES
        """All rows go one by one, whichever way."""
        deep = len(whole.progressions) * BOX_DEPTH <= whole.rows
        self.path = Path.STRIDED if deep and not self.wide else Path.ROWS
        # Rows of so many bytes go one by one, by direction.
        restored = WIDE_ROW_BYTES if self.path is Path.STRIDED else NARROW_ROW_BYTES
        self._single_bytes = (restored if self.path is Path.STRIDED else 0, restored)
        self._per_block = np.uint64(host.block_slots)
        self._block_bytes = np.uint64(host.block_slots * host.slot_bytes)
        self._data_offset = np.uint64(host.data_offset)
        # From a page's first token slot to its first and its last.
        self._ends: I64 = np.array([0, pool.page_tokens - 1])

    def prepare(self, layers: int) -> None:
        """Work out every group of layers that a job of a rank with so many layers may ask for:
        none is to wait for that."""
        for groups in groupings(layers):
            for first, end in groups:
                self.group(first, end)

    @property
    def path_text(self) -> str:
        """The copy path in words, for `tierd status`."""
        whole = self.group(0, self.layers)
        if self.path is Path.STRIDED:
            return f"strided: {whole.rows} rows a page in {len(whole.progressions)} boxes"
        narrow = whole.narrowest < NARROW_ROW_BYTES
        aside = f"; restores of narrow rows in {len(whole.progressions)} boxes" if narrow else ""
        return f"rows: {whole.rows} rows a page{aside}"

    def group(self, first: int, end: int) -> Group:
        """The part of the pool in layers `first` to `end` (exclusive)."""
        group = self._groups.get((first, end))
        if group is None:
            chosen = [n for n, b in enumerate(self.pool.buffers) if first <= b.layer < end]
            group = Group(
                np.array(list(self._fold(chosen)), PROGRESSIONS),
                sum(self.pool.buffers[n].row_bytes for n in chosen),
            )
            self._groups[first, end] = group
        return group

    def runs(self, pages: I64, chunks: U64, slots: U64) -> Records:
        """Check a job's pages and slots, and merge neighbours where the geometry allows it.

        Args:
            pages: Page numbers, a private copy of what the rank wrote. Shape: (n,).
            chunks: Address of each page's chunk. Shape: (n,).
            slots: Slot of each page within its chunk. Shape: (n,).

        Returns: dtype RUNS.
        Raises: PlanError: a page that the pool does not have, or a slot outside its chunk.
        """
        check_range("page number", pages, self.pool.num_pages)
        check_range("slot", slots, self.host.chunk_slots)
        numbers = pages.view(np.uint64)
        if self._per_block == 1:
            blocks = chunks + slots * self._block_bytes + self._data_offset
            return one_page_runs(numbers, blocks, 0)
        inside, positions = np.divmod(slots, self._per_block)
        blocks = chunks + inside * self._block_bytes + self._data_offset
        return (merge if self._merges else one_page_runs)(numbers, blocks, positions)

    def batch(self, group: Group, runs: Records, direction: Direction) -> Batch:
        """The operations that move these runs of pages, for some layers of the pool."""
        if group.single_rows is not None and self._all_rows(group, runs, direction):
            return Batch(boxes=NO_OPS, rows=first_rows(group.single_rows, runs).reshape(-1))
        ops = operations(group.progressions, runs)
        plain = ops["depth"] == 1
        if self.path is Path.ROWS:
            plain[:] = True
        plain |= ops["width"] >= WIDE_ROW_BYTES
        if direction is Direction.RESTORE:
            plain &= ops["width"] >= NARROW_ROW_BYTES
        return Batch(boxes=ops[~plain], rows=split_rows(ops[plain]))

    def _all_rows(self, group: Group, runs: Records, direction: Direction) -> bool:
        """Whether every operation that `batch` makes of these goes through the row call."""
        least = self._single_bytes[direction]
        if group.narrowest >= least:
            return True
        return len(runs) > 0 and int(runs["pages"].min()) * group.narrowest >= least

    def pieces(self, group: Group, runs: Records, direction: Direction) -> Iterator[Batch]:
        """`batch`, cut so that each piece is a short time's work."""
        for piece in self.cut(group, runs):
            yield self.batch(group, piece, direction)

    def cut(self, group: Group, runs: Records, *, begins: bool = False) -> Iterator[Records]:
        """Slices of `runs`, dtype RUNS, each of which is to be one piece, in order. `begins`: a
        job does, so that the first ones are shorter."""
        if not group.rows:
            return iter(())
        if self.path is Path.ROWS:
            most_runs = max(1, PIECE_ROWS // group.rows)
        else:
            most_runs = max(1, PIECE_BOXES // len(group.progressions))
        return cut(
            runs,
            np.cumsum(runs["pages"]) if self._merges else range(1, len(runs) + 1),
            group.page_bytes,
            most_runs=most_runs,
            most_bytes=PIECE_BYTES,
            first_bytes=FIRST_PIECE_BYTES if begins else PIECE_BYTES,
        )

    def pages(self, ring: I64, firsts: I64) -> I64:
        """The pages whose token slots begin at these positions of a ring, of a copy of the token
        slots: what is checked must be what is used. Shape: (n,).

        Raises: PlanError: first and last token slots that are not those of one page.
        """
        if self.pool.page_tokens == 1:
            slots: I64 = ring[firsts % len(ring)]
            return slots
        return whole_pages(ring[(firsts[:, None] + self._ends) % len(ring)], self._ends)

    def _fold(self, chosen: Sequence[int]) -> Iterator[tuple[int, ...]]:
        host = self.host
        alike: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for number in chosen:
            buffer = self.pool.buffers[number]
            device = self._addresses[buffer.allocation] + buffer.offset
            offset = host.block_slots * host.row_offsets[number]
            alike[buffer.allocation, buffer.row_bytes, buffer.page_stride].append((device, offset))
        merged = min(host.block_slots, self.pool.num_pages) if self._merges else 1
        for (_, row_bytes, page_stride), points in alike.items():
            for members in progressions(sorted(points), merged * row_bytes):
                (device, offset), (beyond, further) = members[0], members[min(1, len(members) - 1)]
                yield (
                    device,
                    offset,
                    row_bytes,
                    page_stride,
                    len(members),
                    beyond - device,
                    further - offset,
                )


def _single_rows(folded: Records) -> Records | None:
    """See `Group`."""
    deep = folded["depth"] > 1
    if (folded["device_stride"] == folded["host_stride"])[deep].any():
        return None
    single, step = one_by_one(folded)
    single["device"] += step * single["device_stride"]
    single["host_offset"] += step * single["host_stride"]
    return single


def check_range(what: str, values: I64 | U64, end: int) -> None:
    """Raises: PlanError: a value below 0, or not below `end`."""
    # As unsigned numbers, those below 0 are beyond every end.
    if len(values) and int(values.view(np.uint64).max()) >= end:
        outside = values[values.view(np.uint64) >= end]
        raise PlanError(f"{what} {int(outside[0])} is out of range; the end is {end}")


def whole_pages(slots: I64, ends: I64) -> I64:
    """The numbers of pages. Shape: (n,).

    Args:
        slots: The first and the last token slot of each. Shape: (n, 2).
        ends: Those of page 0.

    Raises: PlanError: slots that no page begins or ends with.
    """
    tokens = int(ends[1]) + 1
    pages: I64 = slots[:, 0] // tokens
    astray = slots != pages[:, None] * tokens + ends
    if astray.any():
        first, last = slots[astray.any(axis=1).argmax()].tolist()
        raise PlanError(f"token slots {first} to {last} are no page of {tokens}")
    return pages


def groupings(layers: int) -> Iterator[list[tuple[int, int]]]:
    """The ways to cut a rank's layers into groups of one size, the most of them first; the last is
    not to cut them. Each is (first, end) of its groups in order, which cover 0 to `layers`."""
    for wanted in range(min(MOST_GROUPS, layers), 0, -1):
        yield list(pairwise(layers * n // wanted for n in range(wanted + 1)))


def layer_groups(
    work: Sequence[tuple[PoolPlan, Records]], layers: int, nbytes: int
) -> list[tuple[int, int]]:
    """Cut a restore's layers into groups of one size: as many as its geometry allows.

    An engine that computes as fast as the link carries is done one group after the last byte, so
    many are better, and equal ones best; but where layers fold into boxes, each cut makes more of
    them, and the whole restore later.

    Args:
        work: Each pool of the restore with its runs.
        layers: Layers of the rank; a group may have layers without bytes.
        nbytes: What they move together.

    Returns: (first, end) of each group, in order, covering 0 to `layers`.
    """
    boxed = [(plan, np.sort(runs["pages"])) for plan, runs in work if not plan.wide]

    def boxes(groups: list[tuple[int, int]]) -> int:
        return sum(
            plan.group(first, end).narrow_boxes(pages)
            for plan, pages in boxed
            for first, end in groups
        )

    uncut = boxes([(0, layers)])

    def may_be(groups: list[tuple[int, int]]) -> bool:
        if len(groups) > 1 and len(groups) * GROUP_BYTES > nbytes:
            return False
        # Where the whole takes no box, all rows are wide, and so are those of any part.
        return not uncut or (boxes(groups) - uncut) * BOX_BYTES <= nbytes * GROUPING_SHARE

    return next(filter(may_be, groupings(layers)))
