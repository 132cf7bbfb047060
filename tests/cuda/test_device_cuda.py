"""A rank's device layer on a real GPU: export to another process, and words ordered by streams.

A stream is held back by a wait on a layer word, never by time: what must not have happened yet
cannot have, and what must not wait for the stream is seen to return.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from tierd_client.device import FEW_TENSORS, Device, open_device
from tierd_client.segment import SharedSegment, create_segment
from tierd_client.watchdog import Watchdog

from tierd.wire.errors import RefusedError, TierdError
from tierd.wire.layout import RESTORE_ENTRIES, SegmentSpec

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPEC = SegmentSpec(backup_ring=1024, restore_ring=1024, max_layers=16)
GATE = RESTORE_ENTRIES - 1
"""The restore entry whose layer words hold streams back."""


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    shared = create_segment(SPEC)
    yield shared
    shared.close()


@pytest.fixture
def forward() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@pytest.fixture
def device(segment: SharedSegment, forward: torch.cuda.Stream) -> Iterator[Device]:
    opened = open_device([torch.zeros(1, device="cuda")], rank=0, forward_stream=forward)
    opened.adopt_segment(segment.memory, segment.fields)
    yield opened
    segment.fields.layers[:] = segment.fields.awaited[:, None]
    torch.cuda.synchronize()
    opened.release_segment()


def never() -> bool:
    return False


def close_gate(device: Device, segment: SharedSegment, layer: int = 0) -> None:
    """Hold the current stream back until the gate is opened."""
    segment.fields.awaited[GATE] = 1
    device.wait_layer(GATE, layer, 1, never)


def open_gate(segment: SharedSegment, layer: int = 0) -> None:
    segment.fields.layers[GATE, layer] = 1


# --- name and export --------------------------------------------------------------------------


def test_the_name_is_the_gpus_uuid(device: Device) -> None:
    assert device.name == f"GPU-{torch.cuda.get_device_properties(0).uuid}"


READER = """
import ctypes, json, sys
from cuda.bindings import driver

def call(function, *args):
    status, *results = function(*args)
    assert status == driver.CUresult.CUDA_SUCCESS, (function, status)
    return results[0] if results else None

call(driver.cuInit, 0)
context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 0))
call(driver.cuCtxPushCurrent, context)
request = json.load(sys.stdin)
bases = []
for allocation in request["allocations"]:
    handle = driver.CUipcMemHandle()
    handle.reserved = bytes.fromhex(allocation)
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    bases.append(int(call(driver.cuIpcOpenMemHandle, handle, flags)))
for index, offset, nbytes in request["rows"]:
    row = bytearray(nbytes)
    address = ctypes.addressof((ctypes.c_char * nbytes).from_buffer(row))
    call(driver.cuMemcpyDtoH, address, bases[index] + offset, nbytes)
    print(row.hex())
"""


def read_elsewhere(device: Device, tensors: list[torch.Tensor]) -> list[bytes]:
    """What another process reads at the places that an export names."""
    exports = device.export(tensors)
    assert exports.fds == []
    for tensor, (index, offset) in zip(tensors, exports.places, strict=True):
        assert offset + tensor.nbytes <= exports.allocations[index].size
    torch.cuda.synchronize()
    rows = [(*place, t.nbytes) for t, place in zip(tensors, exports.places, strict=True)]
    request = {"allocations": [a.handle.hex() for a in exports.allocations], "rows": rows}
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return [bytes.fromhex(line) for line in done.stdout.split()]


def test_another_process_reads_every_exported_tensor_at_its_place(device: Device) -> None:
    both = torch.arange(2 * 4096, dtype=torch.int32, device="cuda").reshape(2, 4096)
    large = torch.full((8 << 20,), 9, dtype=torch.uint8, device="cuda")
    tensors = [both[0], both[1], large[123:456]]
    expected = [t.cpu().numpy().tobytes() for t in tensors]
    assert read_elsewhere(device, tensors) == expected
    # Again, as after a reconnection, with other contents.
    both.add_(1)
    expected = [t.cpu().numpy().tobytes() for t in tensors]
    assert read_elsewhere(device, tensors) == expected


def test_tensors_of_one_allocation_share_one_handle(device: Device) -> None:
    pool = torch.zeros(36, 2, 1 << 20, dtype=torch.uint8, device="cuda")
    exports = device.export([half for layer in pool for half in layer])
    assert len(exports.allocations) == 1
    offsets = [offset for _, offset in exports.places]
    assert offsets == [offsets[0] + i * (1 << 20) for i in range(72)]


EXPANDABLE = """
import torch
from tierd.wire.errors import RefusedError, TierdError
from tierd_client.device import open_device
tensor = torch.zeros(1 << 20, device="cuda")
try:
    open_device([tensor], rank=0).export([tensor])
except RefusedError as refused:
    print(refused)
"""


def test_memory_that_cannot_be_exported_is_refused_with_its_cause() -> None:
    variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE],
        env={**os.environ, **dict.fromkeys(variables, "expandable_segments:True")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "expandable_segments:False" in done.stdout, done.stderr
    assert "--enable-memory-saver" in done.stdout


def test_a_tensor_without_memory_is_refused(device: Device) -> None:
    with pytest.raises(RefusedError, match="without memory"):
        device.export([torch.empty(0, device="cuda")])


# --- words and rings --------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [2, FEW_TENSORS + 1])
def test_a_flush_never_waits_for_the_gpu(
    device: Device, segment: SharedSegment, forward: torch.cuda.Stream, tensors: int
) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        slots = list(torch.arange(50, 68, device="cuda").tensor_split(tensors))
        # A first flush allocates, and CUDA lets streams wait for each other then.
        device.write_slots("backup", 100, slots)
    stream.synchronize()
    segment.fields.backup_ring[:] = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            close_gate(device, segment)
            # Returns although the stream cannot move, also around the end of the ring.
            device.write_slots("backup", 1022, slots)
            device.mark_ready(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    forward.synchronize()
    assert segment.fields.ready[5].tolist() == [0, 5], "the token slots are not there yet"
    assert not segment.fields.backup_ring.any()
    open_gate(segment)
    stream.synchronize()
    assert segment.fields.ready[5].tolist() == [5, 5]
    ring = segment.fields.backup_ring
    assert [*ring[1022:], *ring[:16]] == list(range(50, 68))
    assert not ring[16:1022].any()


def test_the_kv_is_ready_when_the_forward_stream_says_so(
    device: Device, segment: SharedSegment, forward: torch.cuda.Stream
) -> None:
    with torch.cuda.stream(forward):
        close_gate(device, segment)
    device.mark_ready(6)
    torch.cuda.current_stream().synchronize()
    assert segment.fields.ready[6].tolist() == [6, 0]
    open_gate(segment)
    forward.synchronize()
    assert segment.fields.ready[6].tolist() == [6, 6]


def test_slots_in_cpu_memory_are_written_at_once(device: Device, segment: SharedSegment) -> None:
    device.write_slots("restore", 3, [torch.arange(32, 34)])
    assert segment.fields.restore_ring[3:5].tolist() == [32, 33]


def test_each_layer_lets_only_its_own_readers_go(device: Device, segment: SharedSegment) -> None:
    stream = torch.cuda.Stream()
    passed = torch.zeros(2, dtype=torch.int32, device="cuda")
    events = [torch.cuda.Event(), torch.cuda.Event()]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for layer in range(2):
            close_gate(device, segment, layer)
            passed[layer : layer + 1].add_(1)
            events[layer].record()
    assert not events[0].query()
    open_gate(segment, 0)
    events[0].synchronize()
    assert not events[1].query()
    open_gate(segment, 1)
    events[1].synchronize()
    assert passed.tolist() == [1, 1]


def test_a_segment_can_be_adopted_from_a_thread_that_never_used_cuda(
    segment: SharedSegment,
) -> None:
    pool = torch.zeros(4, device="cuda")
    failures: list[BaseException] = []

    def reconnect() -> None:
        try:
            device = open_device([pool], rank=0)
            device.export([pool])
            device.adopt_segment(segment.memory, segment.fields)
            device.release_segment()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=reconnect)
    thread.start()
    thread.join()
    assert failures == []


def test_a_segment_that_could_not_be_adopted_is_pinned_no_longer(
    segment: SharedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver  # where CUDA is; this file is collected everywhere

    device = open_device([torch.zeros(1, device="cuda")], rank=0)
    with monkeypatch.context() as patch:
        failed = driver.CUresult.CUDA_ERROR_INVALID_VALUE, None
        patch.setattr(driver, "cuMemHostGetDevicePointer", lambda *_: failed)
        with pytest.raises(TierdError, match="CUDA_ERROR_INVALID_VALUE"):
            device.adopt_segment(segment.memory, segment.fields)
    device.adopt_segment(segment.memory, segment.fields)  # or it would be registered already
    device.release_segment()


def test_the_watchdog_frees_a_thread_that_sits_in_a_synchronising_call(
    device: Device, segment: SharedSegment
) -> None:
    peers = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    pidfds = [os.pidfd_open(peer.pid) for peer in peers]
    watchdog = Watchdog(segment.fd)
    try:
        watchdog.watch(*pidfds)
        while not watchdog.armed():
            pass
        close_gate(device, segment)
        for peer in peers:
            peer.kill()
        torch.cuda.synchronize()  # this thread can release nothing while it is in here
        assert segment.fields.layers[GATE, 0] == 1
    finally:
        open_gate(segment)
        watchdog.close()
        for peer, pidfd in zip(peers, pidfds, strict=True):
            peer.communicate()
            os.close(pidfd)
