"""The parts of the demo: what makes its verdict worth something."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tierd_client.demo.cache import DeviceCache
from tierd_client.demo.pages import DevicePages, Geometry
from tierd_client.demo.presets import CUDA, HOST
from tierd_client.demo.workload import Shape, Workload

from tierd.cli.demo_report import failures, summarise

SMALL = Geometry(layers=2, heads=2, head_dim=8, page_tokens=4, pages=8)
KEYS = [bytes([i]) * 32 for i in range(3)]


def device_pages(rank: int = 0, *, arena: bool = False) -> DevicePages:
    return DevicePages(SMALL, rank, torch.device("cpu"), arena)


def wrong_bytes(pages: DevicePages, where: list[int], keys: list[bytes]) -> int:
    return sum(int(pages.wrong_bytes(where, keys, layer)) for layer in range(SMALL.layers))


# --- contents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arena", [False, True])
def test_what_was_computed_is_right_and_one_flipped_bit_is_one_wrong_byte(arena: bool) -> None:
    pages = device_pages(arena=arena)
    pages.compute([5, 1, 2], KEYS)
    assert wrong_bytes(pages, [5, 1, 2], KEYS) == 0
    buffer = pages.pool().buffers[-1].tensor
    buffer[5 * SMALL.page_tokens].view(torch.uint8)[0, 3] ^= 1
    assert wrong_bytes(pages, [5, 1, 2], KEYS) == 1


def test_another_page_is_wrong_nearly_everywhere() -> None:
    pages = device_pages()
    pages.compute([5, 1, 2], KEYS)
    assert wrong_bytes(pages, [5, 2, 1], KEYS) > 0.95 * 2 * SMALL.page_bytes


def test_the_page_of_another_rank_or_layer_is_wrong() -> None:
    mine, others = device_pages(0), device_pages(1)
    mine.compute([1], KEYS[:1])
    others.compute([1], KEYS[:1])
    for source, target in ((others, mine), (mine, mine)):
        first, second = source.pool().buffers[0].tensor, target.pool().buffers[1].tensor
        second.copy_(first)
        assert wrong_bytes(mine, [1], KEYS[:1]) > 0.2 * SMALL.page_bytes


def test_a_page_that_never_arrived_is_wrong_in_nearly_every_byte() -> None:
    pages = device_pages()
    pages.compute([3], KEYS[:1])
    pages.poison([3])
    assert wrong_bytes(pages, [3], KEYS[:1]) > 0.95 * SMALL.page_bytes


def test_token_slots_are_those_of_the_pages() -> None:
    assert device_pages().slots([2, 0]).tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


# --- workload -----------------------------------------------------------------------------------


def test_every_rank_draws_the_same_conversations() -> None:
    first, second = Workload(HOST[1], seed=7), Workload(HOST[1], seed=7)
    assert [first.next_batch() for _ in range(50)] == [second.next_batch() for _ in range(50)]


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_new_pages_are_those_never_asked_for_before(seed: int, batch: int) -> None:
    shape = Shape(
        conversations=6,
        system_prompts=2,
        system_pages=2,
        first_pages=(1, 3),
        turn_pages=(1, 2),
        max_pages=8,
        batch=batch,
    )
    workload = Workload(shape, seed)
    seen: set[bytes] = set()
    for _ in range(20):
        for request in workload.next_batch():
            assert len(request.keys) <= shape.max_pages
            assert request.new == len(set(request.keys) - seen)
            assert set(request.keys[: len(request.keys) - request.new]) <= seen
            seen.update(request.keys)
    assert workload.pages == len(seen)


@pytest.mark.parametrize(("geometry", "shape"), [HOST, CUDA])
def test_one_batch_fits_on_the_device(geometry: Geometry, shape: Shape) -> None:
    assert shape.batch * shape.max_pages < geometry.pages


# --- device cache -------------------------------------------------------------------------------


def test_the_least_recently_used_page_without_a_lock_goes_first() -> None:
    cache = DeviceCache(pages=4)
    cache.take(KEYS)
    cache.lock(KEYS[:1])
    cache.touch(KEYS[1:2])
    assert cache.can_take(2)
    cache.take([b"d" * 32])
    assert cache.held_prefix(KEYS) == 2
    assert cache.evicted == 1


def test_locked_pages_are_never_given_away() -> None:
    cache = DeviceCache(pages=4)
    pages = cache.take(KEYS)
    cache.lock(KEYS)
    cache.lock(KEYS[:1])
    cache.unlock(KEYS)
    assert cache.can_take(2)
    assert not cache.can_take(3)
    with pytest.raises(MemoryError, match="locked"):
        cache.take([b"d" * 32, b"e" * 32, b"f" * 32])
    assert cache.pages(KEYS[:1]) == pages[:1]


# --- verdict ------------------------------------------------------------------------------------


def figures(**changes: Any) -> dict[str, Any]:
    """What one rank of a good run saw."""
    return {
        "turns": 8,
        "working_set_pages": 90,
        "device_pages": 8,
        "page_bytes": 512,
        "device_hits": 4,
        "lost": 10,
        "restored": 8,
        "restores_failed": 0,
        "kept": 80,
        "shed": 0,
        "device_evicted": 70,
        "enqueue_p50_us": 20.0,
        "enqueue_p99_us": 90.0,
        "bytes_checked": 4096,
        "bytes_wrong": 0,
    } | changes


def status(**changes: Any) -> dict[str, Any]:
    """The daemon's status after a good run."""
    copier = {"device": "host:0", "detail": {}, "backup_pages": 80, "backup_bytes": 4e9}
    copier |= {"backup_seconds": 2.0, "restore_bytes": 3e9, "restore_seconds": 1.0}
    pool = {"slots_total": 40, "evictions": 40, "copy_path": "strided"} | changes
    return {"copiers": [copier, copier], "pools": [pool]}


def test_a_good_run_is_summed_over_ranks_and_has_no_failure() -> None:
    report = summarise([figures(), figures(contiguous_d2h_gbps=4.0)], status())
    assert report["bytes_checked"] == 8192
    assert report["pages_backed_up"] == 80
    assert report["hit_rate"] == 0.8
    assert (report["backup_gbps"], report["restore_gbps"]) == (2.0, 3.0)
    assert failures(report) == []


def test_copy_rates_are_given_as_a_fraction_of_one_contiguous_copy() -> None:
    rank = figures(contiguous_d2h_gbps=4.0, contiguous_h2d_gbps=5.0)
    report = summarise([rank, figures()], status())
    assert (report["backup_fraction"], report["restore_fraction"]) == (0.5, 0.6)


@pytest.mark.parametrize(
    ("rank", "daemon", "reason"),
    [
        ({"bytes_wrong": 3}, {}, "6 bytes are wrong"),
        ({"bytes_checked": 0}, {}, "no byte was checked"),
        ({"restored": 0}, {}, "no page was restored"),
        ({"device_evicted": 0}, {}, "no page was evicted from the device"),
        ({}, {"evictions": 0}, "no page was evicted from host memory"),
    ],
)
def test_a_run_that_shows_nothing_is_a_failure(
    rank: dict[str, Any], daemon: dict[str, Any], reason: str
) -> None:
    report = summarise([figures(**rank), figures(**rank)], status(**daemon))
    (failure,) = failures(report)
    assert failure.startswith(reason)


def test_ranks_that_counted_differently_are_a_failure() -> None:
    report = summarise([figures(), figures(restored=7)], status())
    assert failures(report) == ["the ranks counted different things"]
