"""What tierd takes of each kind of KV pool: every byte of a page, and its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_pools import (
    PAGE,
    four_bits,
    heads_first,
    hybrid_linear,
    latent,
    latent_with_indexer,
    plain,
    recurrent_requests,
    sliding_window,
    walk,
)
from tierd_client.pools import DevicePool, describe
from tierd_client.sglang.imports import load_sglang

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def sglang() -> None:
    load_sglang()


def layers(pool: DevicePool) -> list[int]:
    return [buffer.layer for buffer in pool.buffers]


def page_bytes(pool: DevicePool) -> list[int]:
    """What a page has in each buffer, as the daemon is told."""
    spec = describe(pool, [(number, 0) for number in range(len(pool.buffers))])
    return [buffer.row_bytes for buffer in spec.buffers]


def test_a_plain_pool_is_keys_and_values_layer_by_layer() -> None:
    kvcache = plain(v_head_dim=16)
    found = walk(kvcache)
    (pool,) = found.pools
    assert layers(pool) == [0, 0, 1, 1]
    assert pool.buffers[1].tensor is kvcache.v_buffer[0]
    assert pool.buffers[2].tensor is kvcache.k_buffer[1]
    assert page_bytes(pool) == [PAGE * 2 * 32 * 2, PAGE * 2 * 16 * 2] * 2
    assert (pool.window, found.num_layers) == (0, 2)


def test_fp8_without_scales_is_half_as_wide() -> None:
    (pool,) = walk(plain(dtype=torch.float8_e4m3fn)).pools
    assert page_bytes(pool) == [PAGE * 2 * 32] * 4


def test_with_heads_first_a_row_is_a_page() -> None:
    found, other = walk(heads_first()), walk(plain())
    (pool,) = found.pools
    assert all(buffer.rows_are_pages for buffer in pool.buffers)
    assert page_bytes(pool) == page_bytes(other.pools[0])
    assert found.formats != other.formats  # the bytes of a page are in another order


def test_scales_are_part_of_the_page() -> None:
    kvcache = four_bits()
    (pool,) = walk(kvcache).pools
    assert layers(pool) == [0] * 4 + [1] * 4
    assert page_bytes(pool) == ([PAGE * 2 * 32 // 2] * 2 + [PAGE * 2 * 32 // 16] * 2) * 2
    assert pool.buffers[3].tensor is kvcache.v_scale_buffer[0]


@pytest.mark.parametrize("page_tokens", [64, 128])
def test_scales_of_mxfp8_stand_by_token_or_by_page(page_tokens: int) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8

    kvcache = plain(MHATokenToKVPoolMXFP8, page_size=page_tokens, size=4 * page_tokens)
    (pool,) = walk(kvcache, page_size=page_tokens).pools
    assert page_bytes(pool) == ([page_tokens * 2 * 32] * 2 + [page_tokens * 2] * 2) * 2
    scales = pool.buffers[2:4] + pool.buffers[6:8]
    assert [buffer.rows_are_pages for buffer in scales] == [page_tokens == 128] * 4


def nvfp4(native: bool) -> Any:
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import NVFP4KVCacheMethod

    method = NVFP4KVCacheMethod(2, "cpu", page_size=PAGE, native_scale_layout=native)
    return plain(quant_method=method, head_dim=64)


@pytest.mark.parametrize("native", [False, True])
def test_scales_of_nvfp4_stand_by_token_or_by_page(native: bool) -> None:
    kvcache = nvfp4(native)
    (pool,) = walk(kvcache).pools
    half = len(pool.buffers) // 2
    data = [*pool.buffers[:2], *pool.buffers[half : half + 2]]
    scales = [*pool.buffers[2:half], *pool.buffers[half + 2 :]]
    assert [buffer.tensor.data_ptr() for buffer in data] == [
        side[layer].data_ptr()
        for layer in range(2)
        for side in (kvcache.k_buffer, kvcache.v_buffer)
    ]
    kept = [
        side
        for side in (
            kvcache.k_scale_buffer,
            kvcache.v_scale_buffer,
            kvcache.native_k_scale_buffer,
            kvcache.native_v_scale_buffer,
        )
        if side is not None
    ]
    assert len(scales) == sum(len(side) for side in kept) > 0
    assert set(page_bytes(pool)) == {PAGE * 2 * 64 // 2, PAGE * 2 * 64 // 16}
    by_page = kvcache.native_k_scale_buffer is not None
    assert any(buffer.rows_are_pages for buffer in scales) == by_page == native


def test_a_latent_pool_has_one_row_a_token() -> None:
    found = walk(latent())
    (pool,) = found.pools
    assert layers(pool) == [0, 1]
    assert page_bytes(pool) == [PAGE * 48 * 2] * 2
    assert walk(latent(kv_lora_rank=16, qk_rope_head_dim=32)).formats != found.formats


def test_an_indexer_is_part_of_the_page_in_the_layers_that_have_one() -> None:
    kvcache = latent_with_indexer(skip_topk_layers=[False, True, False])
    (pool,) = walk(kvcache, page_size=64).pools
    assert layers(pool) == [0, 1, 2, 0, 2]
    assert page_bytes(pool) == [64 * 48 * 2] * 3 + [64 * (128 + 4)] * 2
    assert [buffer.rows_are_pages for buffer in pool.buffers] == [False] * 3 + [True] * 2


def test_sliding_windows_are_a_pool_of_their_own() -> None:
    found = walk(sliding_window())
    full, swa = found.pools
    assert (full.name, layers(full), full.window) == ("kv", [1, 1], 0)
    assert (swa.name, layers(swa), swa.window) == ("swa", [0, 0, 2, 2], 3)
    assert found.num_layers == 3


def test_the_window_is_the_longest_that_anybody_reads() -> None:
    *_, swa = walk(sliding_window(), draft_swa_window=4 * PAGE).pools
    assert swa.window == 4


def test_a_state_is_a_page_of_one_slot() -> None:
    requests = recurrent_requests()
    found = walk(hybrid_linear(requests), requests)
    full, states = found.pools
    assert (full.name, layers(full)) == ("kv", [1, 1, 3, 3])
    assert (states.name, layers(states), states.window) == ("mamba", [0, 2, 0, 2], 1)
    cache = requests.mamba_pool.mamba_cache
    assert (
        page_bytes(states) == [cache.temporal[0, 0].nbytes] * 2 + [cache.conv[0][0, 0].nbytes] * 2
    )
    assert (states.page_tokens, found.num_layers) == (1, 4)


def test_latent_attention_beside_states() -> None:
    requests = recurrent_requests()
    kvcache = hybrid_linear(requests, use_mla=True, kv_lora_rank=32, qk_rope_head_dim=16)
    full, _ = walk(kvcache, requests).pools
    assert layers(full) == [1, 3]


def test_windows_beside_states() -> None:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    requests = recurrent_requests()
    kvcache = sliding_window(swa_attention_layer_ids=[1], full_attention_layer_ids=[3])
    everything = {ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA}
    found = walk(kvcache, requests, components=everything)
    assert [(pool.name, sorted(set(layers(pool)))) for pool in found.pools] == [
        ("kv", [3]),
        ("swa", [1]),
        ("mamba", [0, 2]),
    ]


def test_a_draft_model_shares_the_pages_of_its_target() -> None:
    draft = plain(layer_num=1, head_num=1)
    found = walk(plain(), sidecar_draft_device_pools=(draft,))
    (pool,) = found.pools
    assert layers(pool) == [0, 0, 1, 1, 0, 0]
    assert pool.buffers[4].tensor is draft.k_buffer[0]
    assert found.num_layers == 2

    deep = plain(layer_num=3)
    assert layers(walk(plain(), sidecar_draft_device_pools=(deep,)).pools[0])[4:] == [
        0,
        0,
        1,
        1,
        1,
        1,
    ]


def test_packed_drafts_ride_on_the_layers_of_their_depth() -> None:
    drafts = tuple(latent(layer_num=1) for _ in range(2))
    (pool,) = walk(latent(), mtp_draft_device_pools=drafts).pools
    assert layers(pool) == [0, 1, 0, 1]
    assert pool.buffers[3].tensor is drafts[1].kv_buffer[0]
