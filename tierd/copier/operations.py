"""The arithmetic of copies, on arrays: pages merged into runs, rows at one stride folded into
progressions, and from both the operations. Pure numpy; knows addresses, and no pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Records = npt.NDArray[np.void]

OPS = np.dtype(
    [
        ("device", "<u8"),
        ("host", "<u8"),
        ("width", "<u8"),
        ("depth", "<u8"),
        ("device_stride", "<u8"),
        ("host_stride", "<u8"),
    ]
)
"""One strided copy: row i of `depth` rows, `width` bytes wide, lies at device + i * device_stride
and at host + i * host_stride. Both strides are at least `width` where `depth` is over 1."""

NO_OPS = np.zeros(0, OPS)

RUNS = np.dtype([("page", "<u8"), ("block", "<u8"), ("position", "<u8"), ("pages", "<u8")])
"""`pages` consecutive pages from `page` on, at consecutive positions of the host block at address
`block`."""

PROGRESSIONS = np.dtype(
    [
        ("device", "<u8"),
        ("host_offset", "<u8"),
        ("row_bytes", "<u8"),
        ("page_stride", "<u8"),
        ("depth", "<u8"),
        ("device_stride", "<u8"),
        ("host_stride", "<u8"),
    ]
)
"""Equal rows at one constant stride inside one device allocation. Page p of member i lies at
device + i * device_stride + p * page_stride, and at host_offset + i * host_stride of a host block,
row_bytes further for each position."""

_LOOKAHEAD = 16
"""Second members tried for a progression; a layer has at most a few buffers of one shape."""


def one_page_runs(pages: U64, blocks: U64, positions: U64 | int) -> Records:
    """Every page a run of its own, in their order; arguments and result as of `merge`."""
    runs = np.empty(len(pages), RUNS)
    runs["page"], runs["block"], runs["position"] = pages, blocks, positions
    runs["pages"] = 1
    return runs


def merge(pages: U64, blocks: U64, positions: U64) -> Records:
    """Merge pages that are adjacent on the device and in one block.

    Args: three arrays of shape (n,): page number, address of its block, its place in the block.
    Returns: dtype RUNS, a block's in the order of their positions.
    """
    if not len(pages):
        return np.zeros(0, RUNS)
    same = blocks[1:] == blocks[:-1]
    # A chain's slots mostly come in order, and to sort them all the same costs more than the rest.
    if (same & (positions[1:] <= positions[:-1])).any():
        order = np.lexsort((positions, blocks))
        pages, blocks, positions = pages[order], blocks[order], positions[order]
        same = blocks[1:] == blocks[:-1]
    same &= pages[1:] == pages[:-1] + np.uint64(1)
    same &= positions[1:] == positions[:-1] + np.uint64(1)
    starts = np.concatenate(([0], np.flatnonzero(~same) + 1))
    runs = one_page_runs(pages[starts], blocks[starts], positions[starts])
    runs["pages"][:-1] = starts[1:] - starts[:-1]
    runs["pages"][-1] = len(pages) - starts[-1]
    return runs


def cut(
    runs: Records,
    ends: Sequence[int] | U64,
    page_bytes: int,
    *,
    most_runs: int,
    most_bytes: int,
    first_bytes: int,
) -> Iterator[Records]:
    """Slices of `runs` (dtype RUNS) with at least one of them, at most `most_runs`, and, where
    several are in it, at most a size that grows: `first_bytes`, then twice as much each time, up
    to `most_bytes`.

    Args:
        ends: How many pages have passed at the end of each run. Shape: (len(runs),).
        page_bytes: Bytes of a page.
    """
    start = passed = 0
    size = first_bytes
    while start < len(runs):
        fits = bisect_right(ends, passed + size // page_bytes)
        end = max(start + 1, min(fits, start + most_runs))
        yield runs[start:end]
        start, passed = end, int(ends[end - 1])
        size = min(2 * size, most_bytes)


def first_rows(folded: Records, runs: Records) -> Records:
    """The first row of each progression (dtype PROGRESSIONS) in each run (dtype RUNS), as an
    operation with a depth of 1. Shape: (progressions, runs), dtype OPS.

    A run of several pages makes sense only where their rows are adjacent on the device.
    """
    each = folded[:, None]
    row_bytes = each["row_bytes"]
    ops: Records = np.zeros((len(folded), len(runs)), OPS)
    ops["device"] = each["device"] + runs["page"] * each["page_stride"]
    ops["host"] = runs["block"] + runs["position"] * row_bytes + each["host_offset"]
    ops["width"] = runs["pages"] * row_bytes
    ops["depth"] = 1
    return ops


def operations(folded: Records, runs: Records) -> Records:
    """One operation for each progression (dtype PROGRESSIONS) and run (dtype RUNS).
    Shape: (n,), dtype OPS."""
    ops = first_rows(folded, runs)
    for name in ("depth", "device_stride", "host_stride"):
        ops[name] = folded[name][:, None]
    ops = ops.reshape(-1)
    # Rows that follow each other without a gap on both sides are one longer row.
    dense = (ops["device_stride"] == ops["width"]) & (ops["host_stride"] == ops["width"])
    ops["width"][dense] *= ops["depth"][dense]
    ops["depth"][dense] = 1
    return ops


def split_rows(ops: Records) -> Records:
    """The same bytes with a depth of 1. Shape: (m,), m >= n, dtype OPS."""
    if not len(ops) or int(ops["depth"].max()) == 1:
        return ops
    rows, step = one_by_one(ops)
    rows["device"] += step * rows["device_stride"]
    rows["host"] += step * rows["host_stride"]
    return rows


def one_by_one(deep: Records) -> tuple[Records, U64]:
    """A copy of each record for each of its rows, with a depth of 1, and the row's number. Shapes:
    (sum of the depths,)."""
    counts = deep["depth"].astype(np.int64)
    rows: Records = np.repeat(deep, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    rows["depth"] = 1
    return rows, (np.arange(len(rows)) - first).astype(np.uint64)


def progressions(points: Sequence[tuple[int, int]], widest: int) -> Iterator[list[tuple[int, int]]]:
    """Split sorted (device, host) points into few arithmetic progressions.

    Both steps are at least `widest`: no row that merging can make reaches into the next one.
    The longest that begins at the lowest point is taken first: not always the fewest, but exact
    for layers that lie at one stride, and quick.
    """
    left = dict.fromkeys(points)
    while left:
        candidates = list(islice(left, _LOOKAHEAD + 1))
        device, offset = first = candidates[0]
        best = [first]
        for second in candidates[1:]:
            step = second[0] - device, second[1] - offset
            if step[0] < widest or step[1] < widest:
                continue
            members = [first]
            while (following := (members[-1][0] + step[0], members[-1][1] + step[1])) in left:
                members.append(following)
            if len(members) > len(best):
                best = members
        for member in best:
            del left[member]
        yield best
