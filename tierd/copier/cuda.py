"""The GPU backend: CUDA IPC mappings, pinned chunks, and copy engines through the driver API.

No kernel is ever launched: two contexts share the SMs by time slices, so one would stop the
engine. Boxes go through cuMemcpy3DBatchAsync, rows through cuMemcpyBatchAsync, both by ctypes
on arrays that numpy has built; every other call is cuda-bindings'.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from cuda.bindings import driver

from tierd.copier import records
from tierd.copier.backend import (
    Attachment,
    BackendError,
    Chunk,
    DeviceLostError,
    Marker,
    SharedMemory,
    map_chunk_file,
    split_fds,
)
from tierd.copier.plan import Batch, Direction
from tierd.memory import placement
from tierd.wire.messages import Allocation

_PORTABLE = driver.CU_MEMHOSTREGISTER_PORTABLE
_MAPPED = driver.CU_MEMHOSTREGISTER_DEVICEMAP
_SUCCESS = driver.CUresult.CUDA_SUCCESS
_NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY


class CudaBackend:
    """A `Backend`: one GPU, named by its UUID.

    Raises: BackendError: no driver, no such GPU, or a driver without the batch copy calls.
    """

    def __init__(self, device: str) -> None:
        self._library = _batch_calls()
        _call("cuInit", 0)
        self._device = _find(device)
        before = _used_bytes(device)
        self._context = _call("cuDevicePrimaryCtxRetain", self._device)
        _call("cuCtxSetCurrent", self._context)
        self._streams = {
            direction: _call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            for direction in Direction
        }
        self._handles = {d: ctypes.c_void_p(int(s)) for d, s in self._streams.items()}
        self._events: dict[Marker, Any] = {}
        self._idle_events: list[Any] = []
        self._marks = 0
        self._attributes = np.zeros(1, records.ATTRIBUTES)
        self._attributes["access_order"] = records.STREAM_ORDER
        self._first = np.zeros(1, np.uint64)
        self._attributes_at = ctypes.c_void_p(self._attributes.ctypes.data)
        self._first_at = ctypes.c_void_p(self._first.ctypes.data)
        bus = bytes(_call("cuDeviceGetPCIBusId", 32, self._device)).split(b"\0")[0].decode()
        self._node, node = _usable_node(bus)
        after = _used_bytes(device)
        name = bytes(_call("cuDeviceGetName", 96, self._device)).split(b"\0")[0].decode()
        self._detail: dict[str, Any] = {"backend": "cuda", "gpu": name}
        if node:
            self._detail["numa_node"] = node
        if before is not None and after is not None:
            self._detail["gpu_memory_bytes"] = max(0, after - before)

    def detail(self) -> dict[str, Any]:
        """`gpu`: its name. `numa_node`: where chunks lie that this copier touches first, if there
        is more than one. `gpu_memory_bytes`: what the context took, as NVML counted it before
        and after; absent where NVML is."""
        return dict(self._detail)

    def map_chunk(self, fd: int, size: int, touch: bool) -> Chunk:
        with ExitStack() as stack:
            # Whatever `touch` says: pinning would, one page after the other.
            address = map_chunk_file(stack, fd, size, touch=True, node=self._node)
            _call("cuCtxSetCurrent", self._context)
            self._pin(stack, address, size, _PORTABLE)
            # The thread that ends a chunk may be another one than this.
            stack.callback(_release, "cuCtxSetCurrent", self._context)
            return Chunk(address, size, stack.pop_all())

    def attach(
        self, allocations: Sequence[Allocation], fds: Sequence[int], segment: SharedMemory
    ) -> Attachment:
        if split_fds(allocations, fds) != [None] * len(allocations):
            raise BackendError("an allocation is no GPU memory; this copier serves a GPU")
        with ExitStack() as stack:
            opened: dict[bytes, int] = {}
            for number, allocation in enumerate(allocations):
                if allocation.handle not in opened:
                    opened[allocation.handle] = self._open(stack, allocation.handle)
                _, size = _call("cuMemGetAddressRange", opened[allocation.handle])
                if int(size) < allocation.size:
                    raise BackendError(
                        f"allocation {number} has {int(size)} bytes; {allocation.size} announced"
                    )
            self._pin(stack, segment.address, segment.size, _PORTABLE | _MAPPED)
            words = _call("cuMemHostGetDevicePointer", segment.address, 0)
            addresses = tuple(opened[allocation.handle] for allocation in allocations)
            return Attachment(addresses, int(words), stack.pop_all())

    def submit(self, direction: Direction, batch: Batch) -> None:
        stream = self._handles[direction]
        if len(batch.boxes):
            ops = records.boxes(batch.boxes, direction)
            self._check(
                "cuMemcpy3DBatchAsync",
                self._library.cuMemcpy3DBatchAsync_v2(
                    ctypes.c_size_t(len(ops)),
                    ctypes.c_void_p(ops.ctypes.data),
                    ctypes.c_ulonglong(0),
                    stream,
                ),
            )
        if len(batch.rows):
            device, host, width = (
                np.ascontiguousarray(batch.rows[name]) for name in ("device", "host", "width")
            )
            to, source = (host, device) if direction is Direction.BACKUP else (device, host)
            self._check(
                "cuMemcpyBatchAsync",
                self._library.cuMemcpyBatchAsync_v2(
                    ctypes.c_void_p(to.ctypes.data),
                    ctypes.c_void_p(source.ctypes.data),
                    ctypes.c_void_p(width.ctypes.data),
                    ctypes.c_size_t(len(width)),
                    self._attributes_at,
                    self._first_at,
                    ctypes.c_size_t(1),
                    stream,
                ),
            )

    def write_words(self, attachment: Attachment, offsets: Sequence[int], value: int) -> None:
        stream = self._streams[Direction.RESTORE]
        for offset in offsets:
            (error,) = driver.cuStreamWriteValue32(stream, attachment.words + offset, value, 0)
            self._check("cuStreamWriteValue32", int(error))

    def record(self, direction: Direction) -> Marker:
        if self._idle_events:
            event = self._idle_events.pop()
        else:
            event = _call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        (error,) = driver.cuEventRecord(event, self._streams[direction])
        if error != _SUCCESS:
            # Without the mark nobody can tell when the copies before it have retired.
            raise DeviceLostError(_describe("cuEventRecord", error))
        self._marks += 1
        marker = Marker(self._marks)
        self._events[marker] = event
        return marker

    def retired(self, marker: Marker) -> bool:
        (error,) = driver.cuEventQuery(self._events[marker])
        if error == _NOT_READY:
            return False
        if error != _SUCCESS:
            raise DeviceLostError(_describe("cuEventQuery", error))
        self._idle_events.append(self._events.pop(marker))
        return True

    def close(self) -> None:
        for event in self._idle_events:
            _release("cuEventDestroy", event)
        for stream in self._streams.values():
            _release("cuStreamDestroy", stream)
        _release("cuDevicePrimaryCtxRelease", self._device)

    def _open(self, stack: ExitStack, handle: bytes) -> int:
        ipc = driver.CUipcMemHandle()
        # By address: releases of cuda-bindings differ in what the structure's field is called.
        ctypes.memmove(ipc.getPtr(), handle, len(handle))
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(_call("cuIpcOpenMemHandle", ipc, int(flags)))
        stack.callback(_release, "cuIpcCloseMemHandle", address)
        return address

    def _pin(self, stack: ExitStack, address: int, size: int, flags: int) -> None:
        _call("cuMemHostRegister", address, size, flags)
        stack.callback(_release, "cuMemHostUnregister", address)

    def _check(self, name: str, code: int) -> None:
        """Judge a submission: a refused call is one job's affair, a broken context everybody's."""
        if code == 0:
            return
        text = _describe(name, driver.CUresult(code))
        for stream in self._streams.values():
            (error,) = driver.cuStreamQuery(stream)
            if error not in (_SUCCESS, _NOT_READY):
                raise DeviceLostError(text)
        raise BackendError(text)


def _usable_node(pci_bus_id: str) -> tuple[int | None, str]:
    """The NUMA node that chunks should lie on, and what to tell people about it."""
    node = placement.node_of_gpu(pci_bus_id)
    if node is None:
        return None, ""
    try:
        with contextlib.closing(mmap.mmap(-1, mmap.PAGESIZE)) as page:
            view = ctypes.c_char.from_buffer(page)
            placement.prefer_node(ctypes.addressof(view), mmap.PAGESIZE, node)
            del view
    except OSError as error:
        # A container's system call filter may forbid it.
        return None, f"{node}, but memory lies where the kernel chooses ({error.strerror})"
    return node, str(node)


def _call(name: str, *arguments: Any) -> Any:
    """Call the driver; returns its one result, a tuple of several, or None.

    Raises: BackendError: naming the call and the driver's error.
    """
    error, *results = getattr(driver, name)(*arguments)
    if error != _SUCCESS:
        raise BackendError(_describe(name, error))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _release(name: str, argument: Any) -> None:
    """Give something back. What the driver does not take back keeps a rank's memory from being
    freed, and only the end of the process helps."""
    try:
        _call(name, argument)
    except BackendError as error:
        raise DeviceLostError(str(error)) from error


def _describe(name: str, error: Any) -> str:
    known, text = driver.cuGetErrorName(error)
    return f"{name}: {text.decode() if known == _SUCCESS else int(error)}"


def _batch_calls() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"no CUDA driver on this machine: {error}") from error
    for name in ("cuMemcpy3DBatchAsync_v2", "cuMemcpyBatchAsync_v2"):
        if not hasattr(library, name):
            raise BackendError(f"the driver has no {name}; tierd needs release 580 or newer")
        getattr(library, name).restype = ctypes.c_int
    return library


def _find(device: str) -> Any:
    """The driver's device with this UUID."""
    seen = []
    for ordinal in range(_call("cuDeviceGetCount")):
        candidate = _call("cuDeviceGet", ordinal)
        name = f"GPU-{uuid.UUID(bytes=bytes(_call('cuDeviceGetUuid', candidate).bytes))}"
        if name == device:
            return candidate
        seen.append(name)
    raise BackendError(f"no GPU {device} here; the driver sees {', '.join(seen) or 'none'}")


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _used_bytes(device: str) -> int | None:
    """GPU memory in use by everybody. The driver API tells only from inside a context, whose own
    cost is the question; NVML needs none. None where NVML is not installed or does not answer."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle, memory = ctypes.c_void_p(), _NvmlMemory()
        if nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()
