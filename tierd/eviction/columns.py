"""Arrays with an element a slot, which grow without a copy of what they hold.

A pool has millions of slots and gets them a chunk at a time: copying at every chunk would hold up
the control loop for tens of milliseconds.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)


def column(dtype: type[T], most: int = 0, *, width: int | None = None) -> npt.NDArray[T]:
    """An empty column with room for `most` elements. The room is memory only once it is used.

    Args: `width`: elements of each slot; the shape is then (slots, width).
    """
    shape = most if width is None else (most, width)
    empty: npt.NDArray[T] = np.zeros(shape, dtype)[:0]
    return empty


def grown(values: npt.NDArray[T], length: int, fill: Any = 0) -> npt.NDArray[T]:
    """A column made longer, in place while its room lasts: the new elements are `fill`."""
    old = len(values)
    if length <= old:
        return values
    room = values.base
    if not isinstance(room, np.ndarray) or len(room) < length:
        room = np.zeros((max(length, 2 * old), *values.shape[1:]), values.dtype)
        room[:old] = values
    longer: npt.NDArray[T] = room[:length]
    longer[old:] = fill
    return longer
