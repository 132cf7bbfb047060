"""What tierd takes of each kind of KV pool: every byte of a page, and its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_pools import (
    PAGE,
    compressed,
    four_bits,
    heads_first,
    hybrid_linear,
    latent,
    latent_with_indexer,
    plain,
    recurrent_requests,
    sliding_window,
    sparse,
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
    assert not pool.replicated, "a rank has its own heads"
    by_page = kvcache.native_k_scale_buffer is not None
    assert any(buffer.rows_are_pages for buffer in scales) == by_page == native


def test_a_latent_pool_has_one_row_a_token() -> None:
    found = walk(latent())
    (pool,) = found.pools
    assert layers(pool) == [0, 1]
    assert page_bytes(pool) == [PAGE * 48 * 2] * 2
    assert pool.replicated, "its projection is on every rank"
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


def test_what_stands_beside_states_is_part_of_them() -> None:
    requests = recurrent_requests(
        short_conv_layer_ids=[1, 3], short_conv_state_shape=(8, 3), ngram_context_len=2
    )
    found = walk(hybrid_linear(requests), requests)
    _, states = found.pools
    assert layers(states) == [0, 2, 0, 2, 1, 3, 0]
    assert page_bytes(states)[4:] == [8 * 3 * 2] * 2 + [2 * 8]
    assert states.buffers[5].tensor.data_ptr() == requests.short_conv_pool.conv_state[1].data_ptr()
    assert states.buffers[6].tensor is requests.ngram_pool.context
    plain_requests = recurrent_requests()
    assert found.formats != walk(hybrid_linear(plain_requests), plain_requests).formats


def test_a_sparse_layer_has_an_indexer_beside_its_keys_and_values() -> None:
    kvcache = sparse()
    found = walk(kvcache)
    (pool,) = found.pools
    assert layers(pool) == [0, 0, 1, 1, 2, 2, 1, 1, 2]
    assert page_bytes(pool) == [PAGE * 2 * 32 * 2] * 6 + [PAGE * 16 * 2] * 3
    assert pool.buffers[6].tensor is kvcache.index_kv_pool.k_buffer[0]
    assert pool.buffers[8].tensor is kvcache.index_k_pool.k_buffer[0]
    assert found.num_layers == 3


def test_compressed_kv_is_found_by_the_pages_of_full_attention() -> None:
    kvcache = compressed()
    found = walk(kvcache)
    full, _ = found.pools
    assert (full.name, layers(full), full.window, full.page_tokens) == ("kv", [1, 1, 2], 0, 256)
    assert all(buffer.rows_are_pages for buffer in full.buffers)
    assert page_bytes(full) == [
        kvcache.c4_kv_pool.bytes_per_page_padded,
        64 * (128 + 4),
        kvcache.c128_kv_pool.bytes_per_page_padded,
    ]
    # Page 8 is the last that a request can have.
    assert [len(buffer.tensor) for buffer in full.buffers] == [9] * 3
    page_8 = kvcache.c4_indexer_kv_pool.index_k_with_scale_buffer[0][8]
    assert full.buffers[1].tensor[8].data_ptr() == page_8.data_ptr()
    assert found.num_layers == 3


def test_beside_compressed_kv_every_layer_has_a_window_and_some_a_ring() -> None:
    kvcache = compressed()
    _, swa = walk(kvcache).pools
    assert (swa.name, layers(swa), swa.window, swa.page_tokens) == ("swa", [0, 1, 2, 1, 1], 1, 256)
    window = kvcache.swa_kv_pool.bytes_per_page_padded
    assert page_bytes(swa) == [window] * 3 + [8 * 4 * 512 * 4, 8 * 4 * 128 * 4]
    assert [len(buffer.tensor) for buffer in swa.buffers] == [5] * 5
    states = kvcache.compress_state_pools[1]
    for token in (4 * 256 - 8, 4 * 256 - 1):  # the last of page 3
        row = states.translate_from_swa_loc_to_state_loc(torch.tensor([token])).item()
        there = states.kv_score_buffer.kv_score[row].data_ptr()
        page = swa.buffers[3].tensor[3]
        assert page.data_ptr() <= there < page.data_ptr() + page.nbytes


def test_layers_that_read_the_kv_of_one_before_them_add_nothing() -> None:
    kvcache = compressed((1, 1, 2, 0), kv_source_layers=[0, 2], kv_layout="v41")
    full, swa = walk(kvcache).pools
    assert layers(full) == [0, 0, 2, 2]
    keys = 64 + 4  # in four bits, with their scales
    assert page_bytes(full) == [
        kvcache.kv_pools[1].bytes_per_page_padded,
        256 * keys,
        kvcache.kv_pools[2].bytes_per_page_padded,
        128 * keys,
    ]
    assert layers(swa) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"kv_layout": "v41"},
        {"kv_layout": "v41", "compressed_kv_layout": "fp4"},
        {"c4_state_dtype": torch.bfloat16},
    ],
)
def test_what_compressed_kv_means_is_part_of_its_format(change: dict[str, Any]) -> None:
    assert walk(compressed(**change)).formats != walk(compressed()).formats


def test_a_draft_of_windows_rides_on_the_windows() -> None:
    drafts = tuple(compressed([0], is_draft_worker=True) for _ in range(2))
    full, swa = walk(compressed(), mtp_draft_device_pools=drafts).pools
    assert layers(full) == [1, 1, 2]
    assert layers(swa) == [0, 1, 2, 1, 1, 0, 1]
    there = drafts[1].swa_kv_pool.kv_buffer[0]
    assert swa.buffers[6].tensor.data_ptr() == there.data_ptr()


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
