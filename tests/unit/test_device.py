"""A rank's CPU tensors, its segment, and the arithmetic that both kinds of device share."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch
from descriptors import open_descriptors, opened_since
from hypothesis import given
from hypothesis import strategies as st
from tierd_client.device import FEW_TENSORS, dense, open_device, ring_pieces
from tierd_client.host_device import HostDevice, reached
from tierd_client.segment import SharedSegment, create_segment

from tierd.wire.errors import RefusedError
from tierd.wire.layout import SegmentSpec, read_segment_spec

SPEC = SegmentSpec(backup_ring=16, restore_ring=8, max_layers=4)


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    shared = create_segment(SPEC)
    yield shared
    shared.close()


@pytest.fixture
def device(segment: SharedSegment) -> Iterator[HostDevice]:
    host = HostDevice(rank=1)
    host.adopt_segment(segment.memory, segment.fields)
    yield host
    host.release_segment()


# --- the segment ------------------------------------------------------------------------------


def test_a_segment_is_formatted_and_its_size_is_sealed(segment: SharedSegment) -> None:
    theirs = mmap.mmap(os.dup(segment.fd), os.fstat(segment.fd).st_size)
    assert read_segment_spec(theirs) == SPEC
    for size in (0, SPEC.nbytes * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_closing_a_segment_leaves_its_words_readable() -> None:
    shared = create_segment(SPEC)
    fd = shared.fd
    shared.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    shared.close()
    shared.fields.fence[0] = 5
    assert shared.fields.fence[0] == 5


# --- which device -----------------------------------------------------------------------------


def test_the_device_is_the_one_that_holds_the_tensors() -> None:
    assert open_device([torch.zeros(4), torch.zeros(4)], rank=3).name == "host:3"


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([], "0 devices"),
        ([torch.zeros(4), torch.zeros(4, device="meta")], "2 devices"),
        ([torch.zeros(4, device="meta")], "'meta'"),
    ],
)
def test_what_cannot_be_served_is_refused(tensors: list[torch.Tensor], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        open_device(tensors, rank=0)


# --- export -----------------------------------------------------------------------------------


def test_another_mapping_sees_every_exported_tensor_at_its_place(device: HostDevice) -> None:
    both = torch.arange(2 * 32, dtype=torch.float32).reshape(2, 32)
    k, v = both[0], both[1]
    alone = torch.full((8,), 7, dtype=torch.int16)
    exports = device.export([k, v, alone])
    try:
        # K and V are halves of one allocation, as in a pool whose K and V have one shape.
        assert exports.places == [(0, 0), (0, 32 * 4), (1, 0)]
        assert [a.size for a in exports.allocations] == [2 * 32 * 4, 8 * 2]
        maps = [
            mmap.mmap(fd, a.size) for fd, a in zip(exports.fds, exports.allocations, strict=True)
        ]
        for tensor, (index, offset) in zip([k, v, alone], exports.places, strict=True):
            dtype = tensor.numpy().dtype
            seen = np.frombuffer(maps[index], dtype, count=tensor.numel(), offset=offset)
            assert (seen == tensor.numpy()).all()
            np.frombuffer(maps[index], dtype, offset=offset)[0] = 99
            assert tensor[0] == 99, "a write through the export must reach the tensor"
    finally:
        exports.close()


def test_exporting_again_after_a_reconnection_shares_the_same_memory(device: HostDevice) -> None:
    k = torch.zeros(16)
    before = open_descriptors()
    first = device.export([k])
    first_map = mmap.mmap(first.fds[0], 64)
    first.close()
    second = device.export([k, k[8:]])
    assert second.places == [(0, 0), (0, 32)]
    second_map = mmap.mmap(second.fds[0], 64)
    second.close()
    second.close()
    k[3] = 5
    assert np.frombuffer(first_map, np.float32)[3] == 5
    assert np.frombuffer(second_map, np.float32)[3] == 5
    del first_map, second_map, k
    assert opened_since(before) == [], "no descriptor outlives the exports and the tensors"


def test_a_tensor_without_memory_is_refused_and_no_descriptor_is_lost(device: HostDevice) -> None:
    k = torch.zeros(16)
    device.export([k]).close()
    before = open_descriptors()
    with pytest.raises(RefusedError, match="without memory"):
        device.export([k, torch.empty(0)])
    assert opened_since(before) == []


# --- token slots ------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=5), max_size=2 * FEW_TENSORS))
def test_slots_are_laid_side_by_side_in_few_tensors(given_slots: list[list[int]]) -> None:
    slots = [torch.tensor(some, dtype=torch.int64) for some in given_slots]
    tensors = dense(slots, 100)
    assert len(tensors) <= FEW_TENSORS
    assert [slot for tensor in tensors for slot in tensor.tolist()] == list(chain(*given_slots))
    assert all(tensor.is_contiguous() and tensor.dtype == torch.int64 for tensor in tensors)


def test_slots_with_gaps_between_them_are_laid_side_by_side() -> None:
    (tensor,) = dense([torch.arange(8)[::2]], 4)
    assert tensor.tolist() == [0, 2, 4, 6]
    assert tensor.is_contiguous()


@pytest.mark.parametrize("count", [1, FEW_TENSORS + 1])
def test_slots_of_another_type_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="int32; they have to be int64"):
        dense([torch.arange(4, dtype=torch.int32)] * count, 100)


@pytest.mark.parametrize("count", [1, FEW_TENSORS])
def test_narrower_slots_among_others_are_widened_however_many_there_are(count: int) -> None:
    slots = [torch.arange(2, dtype=torch.int32), *[torch.arange(2)] * count]
    tensors = dense(slots, 100)
    assert [slot for tensor in tensors for slot in tensor.tolist()] == [0, 1] * (count + 1)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


@given(st.integers(0, 2**63), st.integers(0, 40), st.integers(1, 40))
def test_ring_pieces_cover_each_element_once_and_in_order(
    position: int, count: int, size: int
) -> None:
    count = min(count, size)
    pieces = ring_pieces(position, count, size)
    covered = [(at + i, first + i) for at, first, length in pieces for i in range(length)]
    assert covered == [((position + i) % size, i) for i in range(count)]
    assert len(pieces) <= 2


@pytest.mark.parametrize("tensors", [1, FEW_TENSORS + 1])
def test_slots_wrap_around_the_end_of_each_ring(
    device: HostDevice, segment: SharedSegment, tensors: int
) -> None:
    slots = list(torch.arange(50, 62).tensor_split(tensors))
    device.write_slots("backup", 14, slots)
    ring = segment.fields.backup_ring
    assert [*ring[14:], *ring[:10]] == list(range(50, 62))
    assert not ring[10:14].any()
    device.write_slots("restore", 7, [torch.tensor([3, 4])])
    assert segment.fields.restore_ring[[7, 0]].tolist() == [3, 4]
    before = ring.copy()
    with pytest.raises(ValueError, match="17 token slots; the ring holds 16"):
        device.write_slots("backup", 0, list(torch.arange(17).tensor_split(tensors)))
    assert (ring == before).all(), "nothing of it was written"


# --- words ------------------------------------------------------------------------------------


def test_both_ready_words_of_a_ticket_hold_it(device: HostDevice, segment: SharedSegment) -> None:
    device.mark_ready(4096 + 9)
    assert segment.fields.ready[9].tolist() == [4105, 4105]
    assert np.count_nonzero(segment.fields.ready) == 2


def test_a_layer_is_waited_for_until_its_word_holds_the_generation(
    device: HostDevice, segment: SharedSegment
) -> None:
    waits = threading.Event()

    def copier() -> None:
        waits.wait(120)
        segment.fields.layers[2, 3] = 8

    thread = threading.Thread(target=copier)
    thread.start()

    def give_up() -> bool:
        waits.set()
        return False

    segment.fields.layers[2, 3] = 7
    device.wait_layer(2, 3, 8, give_up)
    assert segment.fields.layers[2, 3] == 8
    thread.join()


def test_waiting_for_a_layer_ends_when_the_caller_gives_up(device: HostDevice) -> None:
    asked = 0

    def give_up() -> bool:
        nonlocal asked
        asked += 1
        return asked == 500

    device.wait_layer(0, 0, 1, give_up)
    assert asked == 500


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_generations_are_compared_round_the_end_of_32_bits(word: int, ahead: int) -> None:
    generation = (word - ahead) % 2**32
    assert reached(word, generation)
    assert reached(generation, word) == (ahead == 0)


def test_without_a_segment_there_is_nothing_to_write_to(segment: SharedSegment) -> None:
    device = HostDevice(0)
    device.adopt_segment(segment.memory, segment.fields)
    device.release_segment()
    device.release_segment()
    with pytest.raises(RuntimeError, match="adopt_segment"):
        device.mark_ready(1)
