"""The driver's own records for batches of copies, built from operations as numpy arrays.

Layouts as in cuda.h of CUDA 13: CUDA_MEMCPY3D_BATCH_OP and CUmemcpyAttributes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tierd.copier.operations import U64, Records, split_rows
from tierd.copier.plan import Direction

BOX = np.dtype(
    [
        ("src_type", "<u4"),
        ("src_pad", "<u4"),
        ("src", "<u8"),
        ("src_row_length", "<u8"),
        ("src_layer_height", "<u8"),
        ("src_location", "<u4", 2),
        ("dst_type", "<u4"),
        ("dst_pad", "<u4"),
        ("dst", "<u8"),
        ("dst_row_length", "<u8"),
        ("dst_layer_height", "<u8"),
        ("dst_location", "<u4", 2),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
        ("access_order", "<u4"),
        ("flags", "<u4"),
    ]
)
"""CUDA_MEMCPY3D_BATCH_OP with two pointer operands: 112 bytes."""

ATTRIBUTES = np.dtype(
    [
        ("access_order", "<u4"),
        ("src_location", "<u4", 2),
        ("dst_location", "<u4", 2),
        ("flags", "<u4"),
    ]
)
"""CUmemcpyAttributes: 24 bytes."""

POINTER = 1
"""CU_MEMCPY_OPERAND_TYPE_POINTER."""
STREAM_ORDER = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: the source is read when the stream gets there."""
LONGEST_ROW = (1 << 31) - 1
"""Pitches at 2 GiB and above lose the fast path (measured, README)."""


def boxes(ops: Records, direction: Direction) -> Records:
    """Operations as 3D copies with the layers as the depth.

    A side's stride is row length x layer height with a height of 1 used. A stride for which no
    row length serves (see `row_lengths`) makes its operation fall apart into rows.

    Args: `ops`: dtype `operations.OPS`, shape (n,).
    Returns: dtype BOX, shape (m,), m >= n.
    """
    device = row_lengths(ops["device_stride"], ops["width"])
    host = row_lengths(ops["host_stride"], ops["width"])
    usable = (ops["depth"] == np.uint64(1)) | ((device > 0) & (host > 0))
    if not usable.all():
        return boxes(np.concatenate([ops[usable], split_rows(ops[~usable])]), direction)
    deep = ops["depth"] > 1
    width = ops["width"]
    device, host = np.where(deep, device, width), np.where(deep, host, width)
    records = np.zeros(len(ops), BOX)
    records["src_type"] = records["dst_type"] = POINTER
    records["access_order"] = STREAM_ORDER
    there, here = ("src", "dst") if direction is Direction.BACKUP else ("dst", "src")
    for side, address, stride, lengths in (
        (there, ops["device"], ops["device_stride"], device),
        (here, ops["host"], ops["host_stride"], host),
    ):
        records[side] = address
        records[f"{side}_row_length"] = lengths
        records[f"{side}_layer_height"] = np.where(deep, stride // lengths, np.uint64(1))
    records["width"] = width
    records["height"] = 1
    records["depth"] = ops["depth"]
    return records


def row_lengths(strides: U64, widths: U64) -> U64:
    """A row length for each stride: it divides the stride, holds the width and is under 2 GiB.

    The width itself where it divides the stride, else the stride's largest such divisor; 0 where
    there is none. Shape: (n,), dtype uint64.
    """
    distinct, inverse = np.unique(strides, return_inverse=True)
    largest = np.array([_largest_divisor(int(stride)) for stride in distinct], np.uint64)[inverse]
    fallback = np.where(largest >= widths, largest, np.uint64(0))
    return np.where((strides > 0) & (strides % widths == 0), widths, fallback)


@lru_cache(maxsize=4096)
def _largest_divisor(stride: int) -> int:
    """The largest divisor of a stride that is a legal row length; 0 if only tiny ones are."""
    for parts in range(max(1, -(-stride // LONGEST_ROW)), 4097):
        if stride % parts == 0:
            return stride // parts
    return 0
