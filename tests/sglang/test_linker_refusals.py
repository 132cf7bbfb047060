"""Engines that the linker cannot serve are refused at start, with the reason and what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_pools import (
    compressed,
    four_bits,
    hybrid_linear,
    latent,
    parameters,
    plain,
    recurrent_requests,
    sliding_window,
    sparse,
    walk,
)
from tierd_client.sglang.imports import load_sglang

from tierd.wire.errors import ConfigError, RefusedError

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def sglang() -> None:
    load_sglang()


def without_kv() -> Any:
    from sglang.srt.mem_cache.memory_pool import NoOpMHATokenToKVPool

    return plain(NoOpMHATokenToKVPool)


def vectorized() -> Any:
    pool = plain()
    pool.kv_cache_layout = "vectorized_5d"  # built on ROCm only
    return pool


def of_a_subclass() -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class PaddedPool(MHATokenToKVPool):  # type: ignore[misc]
        """Somebody's pool, which may keep anything beside K and V."""

    return plain(PaddedPool)


def quantized_anyhow() -> Any:
    pool = plain()
    pool.quant_method = object()
    return pool


def four_bits_with_heads_first() -> Any:
    pool = four_bits()
    pool.use_hnd = True
    return pool


def other_pages() -> Any:
    return plain(page_size=8)


def windows_that_requests_keep() -> Any:
    pool = sliding_window()
    pool.swa_req_ring_size = 128
    return pool


def windows_alone() -> Any:
    return sliding_window(swa_attention_layer_ids=[0, 1], full_attention_layer_ids=[])


def strange_windows() -> Any:
    pool = sliding_window()
    pool.swa_kv_pool = without_kv()
    return pool


def compressed_for_hisparse() -> Any:
    return compressed(enable_hisparse=True)


def compressed_windows_of_other_pages() -> Any:
    return compressed(swa_page_size=128)


def compressed_windows_that_requests_keep() -> Any:
    pool = compressed()
    pool.swa_req_ring_size = 128  # what the unified layout sets, on ROCm only
    return pool


def windows_without_compressed_kv() -> Any:
    return compressed([0, 0])


def compressed_of_a_subclass() -> Any:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool

    class PaddedPool(DeepSeekV4SingleKVPool):  # type: ignore[misc]
        """Somebody's pool, which may lay out its pages differently."""

    pool = compressed()
    pool.kv_pools[4] = pool._make_kv_pool(
        size=512,
        page_size=64,
        dtype=pool.dtype,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        global_page_size=256,
        cls=PaddedPool,
    )
    return pool


def too_few_compressed_pages() -> Any:
    return compressed(c4_size=64)


def sparse_for_hisparse() -> Any:
    return sparse(enable_hisparse=True)


def sparse_of_four_bits() -> Any:
    pool = sparse()
    pool.main_pool = four_bits()
    pool.main_pool.quant_method = object()
    return pool


POOLS: list[tuple[Callable[[], Any], str]] = [
    (without_kv, "NoOpMHATokenToKVPool: it holds no KV"),
    (vectorized, "vectorized_5d"),
    (of_a_subclass, "PaddedPool: tierd does not know"),
    (quantized_anyhow, "quantized by object"),
    (four_bits_with_heads_first, "SGLANG_USE_HND_KVCACHE"),
    (other_pages, "pages of 8 tokens and the tree of 4"),
    (windows_that_requests_keep, "belongs to requests"),
    (windows_alone, "tierd needs one with full attention"),
    (strange_windows, "NoOpMHATokenToKVPool"),
    (compressed_for_hisparse, "HiSparseC4DevicePool: HiSparse"),
    (compressed_windows_of_other_pages, "pages of 128 tokens and the tree of 256"),
    (compressed_windows_that_requests_keep, "SGLANG_HACK_FLASHMLA_BACKEND"),
    (windows_without_compressed_kv, "a sliding window alone"),
    (compressed_of_a_subclass, "PaddedPool: tierd does not know"),
    (too_few_compressed_pages, "of 9 pages of 1 rows has a tensor of shape"),
    (sparse_for_hisparse, "HiSparseMHAMainPool: HiSparse"),
    (sparse_of_four_bits, "quantized by object"),
]


@pytest.mark.parametrize(("build", "reason"), POOLS, ids=[p[0].__name__ for p in POOLS])
def test_pools_that_tierd_does_not_know_are_refused(build: Callable[[], Any], reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        walk(build())


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("post_capture_active", True, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"),
        ("enable_custom_mem_pool", True, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
        ("layer_shard_enabled", True, "by layer"),
        ("host_transfer_translate", lambda indices: indices, "--enable-unified-memory"),
    ],
)
def test_memory_that_cannot_be_shared_is_refused(attribute: str, value: Any, reason: str) -> None:
    for pool in (plain(), latent()):
        setattr(pool, attribute, value)  # what these modes set, and a CPU cannot build
        with pytest.raises(RefusedError, match=reason):
            walk(pool)


STATES: list[tuple[str, Any, str]] = [
    ("mamba_ckpt_pool", object(), "--enable-int8-mamba-checkpoint"),
    ("mamba_pool._slot_siblings", [object()], "a object beside its Mamba states"),
    ("mamba_pool.enable_linear_replayssm", True, "--enable-linear-replayssm"),
    ("mamba_pool.enable_custom_mem_pool", True, "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"),
]


@pytest.mark.parametrize(("attribute", "value", "reason"), STATES, ids=[s[2] for s in STATES])
def test_what_is_kept_beside_states_is_refused(attribute: str, value: Any, reason: str) -> None:
    requests = recurrent_requests()
    *path, last = attribute.split(".")
    owner = requests
    for name in path:
        owner = getattr(owner, name)
    setattr(owner, last, value)
    with pytest.raises(RefusedError, match=reason):
        walk(hybrid_linear(requests), requests)


def test_components_that_do_not_fit_the_pool_are_refused() -> None:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    everything = {ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA}
    for pool, components in (
        (plain(), {ComponentType.FULL, ComponentType.SWA}),
        (plain(), {ComponentType.FULL, ComponentType.MAMBA}),
        (sliding_window(), {ComponentType.FULL}),
        (hybrid_linear(recurrent_requests()), everything),
    ):
        with pytest.raises(RefusedError, match=r"components .* over a"):
            walk(pool, components=components)


def test_windows_that_are_computed_again_are_refused() -> None:
    with pytest.raises(RefusedError, match="--no-enable-decoder-swa-bounded-replay"):
        walk(sliding_window(), decoder_swa_bounded_replay=True)
    with pytest.raises(RefusedError, match="--no-enable-decoder-swa-bounded-replay"):
        walk(sliding_window(), swa_gates_prefix_match=False)


def test_drafts_that_tierd_does_not_know_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"draft model's KV: .*NoOpMHATokenToKVPool"):
        walk(plain(), sidecar_draft_device_pools=(without_kv(),))
    with pytest.raises(RefusedError, match="32 token slots and the target's 64"):
        walk(plain(), mtp_draft_device_pools=(plain(size=32),))
    with pytest.raises(
        RefusedError, match=r"draft model's KV: it keeps more than a sliding window"
    ):
        walk(compressed(), mtp_draft_device_pools=(compressed(),))
    for change, reason in (
        ({"swa_uses_full_indices": True}, "in slots of its own"),
        ({"swa_req_ring_size": 128}, "belongs to requests"),
    ):
        draft = compressed([0])
        vars(draft).update(change)  # as the engine's configuration sets it
        with pytest.raises(RefusedError, match=f"draft model's KV: it.* {reason}"):
            walk(compressed(), mtp_draft_device_pools=(draft,))
    with pytest.raises(
        RefusedError, match="512 token slots in pages of 256, and the target's 1024"
    ):
        walk(compressed(), mtp_draft_device_pools=(compressed([0], swa_size=512),))
    with pytest.raises(RefusedError, match="Mamba states of a draft"):
        walk(plain(), mtp_draft_mamba_pools=(object(),))


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
    ({"speculative_algorithm": "DFLASH"}, "--speculative-algorithm"),
    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
    ({"enable_memory_saver": True}, "--enable-memory-saver"),
    ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
    ({"dcp_size": 2}, "--dcp-size"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
    ({"pp_size": 2}, "--pp-size"),
    ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
]


@pytest.mark.parametrize(("change", "reason"), ARGUMENTS, ids=[str(a[0]) for a in ARGUMENTS])
def test_arguments_that_tierd_does_not_serve_are_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(RefusedError, match=reason):
        link(tmp_path, ServerArgs(model_path="/model", **change))


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"pp_size": 2}, "--pp-size"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
    ({"is_eagle": True}, "--speculative-algorithm"),
]


@pytest.mark.parametrize(
    ("change", "reason"), PARAMETERS, ids=[next(iter(p[0])) for p in PARAMETERS]
)
def test_a_tree_that_tierd_does_not_serve_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RefusedError, match=reason):
        link(tmp_path, **change)


def test_every_reason_is_given_at_once(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"--pp-size.*--speculative-algorithm"):
        link(tmp_path, pp_size=2, is_eagle=True)


def test_a_typo_in_the_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sokcet"):
        link(tmp_path, extra_config={"sokcet": "/run/tierd.sock"})
    with pytest.raises(ConfigError, match="socket"):
        link(tmp_path, extra_config={"socket": 7})


def test_sglang_finds_the_linker_by_the_names_in_its_flag(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.linker_factory import create_unified_cache_linker
    from tierd_client.sglang import TierdLinker

    linker = create_unified_cache_linker(
        None,
        parameters(plain()),
        backend="dynamic",
        config={
            "linker": "TierdLinker",
            "linker_module_path": "tierd_client.sglang",
            "linker_extra_config": {"socket": str(tmp_path / "tierd.sock")},
        },
        components={ComponentType.FULL},
    )
    assert isinstance(linker, TierdLinker)
    linker.close()


def link(
    tmp_path: Path,
    server_args: Any = None,
    *,
    extra_config: dict[str, Any] | None = None,
    **changes: Any,
) -> None:
    """Construct a linker as SGLang does, over a plain pool."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from tierd_client.sglang import TierdLinker

    TierdLinker(
        server_args,
        parameters(plain(), **changes),
        components={ComponentType.FULL},
        extra_config=extra_config or {"socket": str(tmp_path / "tierd.sock")},
    ).close()
