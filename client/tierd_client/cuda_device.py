"""A rank whose KV lies on a GPU: export through CUDA IPC, and words ordered by its streams.

Uses the driver API on the streams and the primary context of the engine's own torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tierd.wire.errors import RefusedError, TierdError
from tierd.wire.layout import Segment
from tierd.wire.messages import Allocation
from tierd_client.device import FEW_TENSORS, Exports, Ring, dense, ring_pieces, store_slots

try:
    from cuda.bindings import driver
except ImportError as error:
    raise RefusedError(
        "tierd needs the package cuda-bindings to export a GPU's KV cache; "
        "install it in the engine's environment: pip install 'tierd[cuda]'"
    ) from error

_IPC_CAPABLE = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_HANDLE_BYTES = 64
_GEQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
_WRITE_AFTER_BARRIER = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)

_NOT_EXPORTABLE = (
    "the KV buffer at {address:#x} cannot be exported through CUDA IPC: its memory was not made by "
    "cudaMalloc. Start the engine without what replaces it: unset "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (set expandable_segments:False), leave out "
    "--enable-memory-saver, unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING and "
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"
)


class CudaError(TierdError):
    """A CUDA driver call failed. The text has its name and the driver's own words."""


class CudaDevice:
    """Implements `tierd_client.device.Device` on one GPU.

    The calling thread's current CUDA device must be this one in the hot path, as it is on an
    engine's scheduler thread.

    Args:
        index: torch's index of the GPU.
        forward_stream: The stream whose kernels write the KV; None if it is the current one.

    Raises: CudaError.
    """

    def __init__(self, index: int, forward_stream: torch.cuda.Stream | None = None) -> None:
        self._index = index
        self._forward_stream = forward_stream
        torch.cuda.init()
        self._device = _call(driver.cuDeviceGet, index)
        # Torch holds the primary context for the life of the process; this reference only names it.
        self._context = _call(driver.cuDevicePrimaryCtxRetain, self._device)
        self._name = (
            f"GPU-{uuid.UUID(bytes=bytes(_call(driver.cuDeviceGetUuid, self._device).bytes))}"
        )
        self._segment: Segment | None = None
        self._memory: mmap.mmap | None = None
        self._host = 0
        """Where the segment lies in this process."""
        self._words = 0
        """Where the segment lies for the GPU's streams."""

    @property
    def name(self) -> str:
        return self._name

    def export(self, tensors: Sequence[torch.Tensor]) -> Exports:
        exports = Exports([], [], [])
        index_of: dict[int, int] = {}
        with self._current():
            for tensor in tensors:
                address = tensor.data_ptr()
                if not address:
                    raise RefusedError("a KV buffer without memory behind it; leave it out")
                if not int(_call(driver.cuPointerGetAttribute, _IPC_CAPABLE, address)):
                    raise RefusedError(_NOT_EXPORTABLE.format(address=address))
                # The allocator carves tensors out of larger allocations, and a handle opens at
                # the base of the whole.
                base, size = _call(driver.cuMemGetAddressRange, address)
                base = int(base)
                if base not in index_of:
                    ipc = _call(driver.cuIpcGetMemHandle, base)
                    # By address: releases of cuda-bindings differ in what the field is called.
                    handle = ctypes.string_at(ipc.getPtr(), _HANDLE_BYTES)
                    index_of[base] = len(exports.allocations)
                    exports.allocations.append(Allocation(size=int(size), handle=handle))
                exports.places.append((index_of[base], address - base))
        return exports

    def adopt_segment(self, memory: mmap.mmap, segment: Segment) -> None:
        if self._segment is not None:
            raise RuntimeError("a segment is adopted already: call release_segment first")
        address = np.frombuffer(memory, np.uint8).ctypes.data
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        with self._current():
            # CUDA loads a kernel at its first launch, and holds other streams back until those
            # that run have come to an end: not later, when one may be waiting for a layer.
            # What joins slots is chosen by how they lie in memory.
            slots = torch.zeros(128, dtype=torch.int64, device=f"cuda:{self._index}")
            for some in (slots, slots[1:], slots[:1], slots[1:2]):
                torch.cat([some] * (FEW_TENSORS + 1))
            try:
                _call(driver.cuMemHostRegister, address, len(memory), flags)
            except CudaError as error:
                raise RefusedError(
                    f"cannot pin the {len(memory)} bytes that the engine shares with tierd "
                    f"({error}); raise the limit on locked memory (ulimit -l unlimited)"
                ) from error
            try:
                words = int(_call(driver.cuMemHostGetDevicePointer, address, 0))
            except CudaError:
                # The memory is the caller's again, to unmap or to adopt once more.
                _call(driver.cuMemHostUnregister, address)
                raise
        self._words = words
        self._segment, self._memory, self._host = segment, memory, address

    def write_slots(self, ring: Ring, position: int, slots: Sequence[torch.Tensor]) -> None:
        segment = self._adopted()
        target = segment.backup_ring if ring == "backup" else segment.restore_ring
        start = self._host + segment.offsets["backup_ring" if ring == "backup" else "restore_ring"]
        stream = self._stream()
        for tensor in dense(slots, len(target)):
            count = tensor.numel()
            if tensor.is_cuda:
                # Whoever gets the tensor's memory from torch's allocator next, gets it on this
                # stream, when the copy has run. The driver's call, not Tensor.copy_: torch knows
                # only its own pinned memory as pinned, and would wait for the copy.
                source = tensor.data_ptr()
                for at, first, length in ring_pieces(position, count, len(target)):
                    place, piece = start + at * 8, source + first * 8
                    _call(driver.cuMemcpyDtoHAsync, place, piece, length * 8, stream)
            else:
                # In place before the call that marks them ready can be made.
                store_slots(target, position, tensor)
            position += count

    def mark_ready(self, ticket: int) -> None:
        segment = self._adopted()
        current = self._stream()
        forward = current if self._forward_stream is None else self._forward_stream.cuda_stream
        # Two words, because two streams that write one would release it at the first.
        for word, stream in enumerate((current, forward)):
            address = self._words + segment.ready_offset(ticket, word)
            _call(driver.cuStreamWriteValue32, stream, address, ticket, _WRITE_AFTER_BARRIER)

    def wait_layer(
        self, entry: int, layer: int, generation: int, give_up: Callable[[], bool]
    ) -> None:
        address = self._words + self._adopted().layer_offset(entry, layer)
        _call(driver.cuStreamWaitValue32, self._stream(), address, generation, _GEQ)

    def release_segment(self) -> None:
        if self._segment is None:
            return
        host, self._host, self._words = self._host, 0, 0
        self._segment = None
        with self._current():
            _call(driver.cuMemHostUnregister, host)
        self._memory = None  # not before: the registration holds its pages

    def _adopted(self) -> Segment:
        if self._segment is None:
            raise RuntimeError("no segment: call adopt_segment first")
        return self._segment

    def _stream(self) -> int:
        """The current stream's handle."""
        # As `torch.cuda.current_device` and `current_stream` do, without what they look after first
        # and without an object.
        current = torch._C._cuda_getDevice()
        if current != self._index:
            # The default stream's handle is 0 on every GPU: a word would be ordered by another's.
            raise RuntimeError(
                f"the current CUDA device is {current}; this rank's KV lies on "
                f"{self._index}: call torch.cuda.set_device({self._index}) on this thread"
            )
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the GPU's primary context current, also on a thread that never used CUDA."""
        _call(driver.cuCtxPushCurrent, self._context)
        try:
            yield
        finally:
            _call(driver.cuCtxPopCurrent)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call the driver; return its one result, or a tuple of several.

    Raises: CudaError.
    """
    status, *results = function(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        words = f"{(name or b'?').decode()}: {(text or b'').decode()}"
        raise CudaError(f"{getattr(function, '__name__', function)} failed, {words}")
    return results[0] if len(results) == 1 else tuple(results)
