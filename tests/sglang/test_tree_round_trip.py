"""A prompt's KV through SGLang's own tree: finished, backed up, evicted, found again, restored."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Callable

import pytest
from sglang_harness import Daemon, prompt, until
from tierd_client.sglang.tree_engine import TreeEngine

pytestmark = pytest.mark.sglang
Open = Callable[..., TreeEngine]

SHAPES = [
    {"core": core, "page_tokens": page, "pool_tokens": 512 if page == 64 else 256}
    for core in ("python", "rust")
    for page in (1, 4, 64)
    if (core, page) != ("python", 64)
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['core']}-{s['page_tokens']}")
def test_an_evicted_prefix_comes_back_byte_for_byte(
    daemon: Daemon, open_engine: Open, shape: dict[str, object]
) -> None:
    engine = open_engine(**shape)
    page = engine.shape.page_tokens
    all_free = engine.free_tokens
    tokens = prompt(1, 200)

    first = engine.serve("first", tokens)
    assert first.device_hit == first.loaded == 0
    assert engine.locked_tokens == 200 // page * page  # until the tier has answered
    engine.drain()
    assert engine.locked_tokens == 0
    assert engine.linker.stats.kept == 200 // page

    engine.evict()
    assert engine.free_tokens == all_free

    again = engine.serve("again", [*tokens[:160], *prompt(2, 20)])
    assert again.device_hit == 0
    assert again.loaded == 160 // page * page
    assert again.checked > 0
    assert again.wrong == 0
    engine.drain()
    engine.tree.sanity_check()
    engine.evict()
    assert engine.free_tokens == all_free


def test_what_comes_back_is_offered_again_and_not_copied_again(
    daemon: Daemon, open_engine: Open
) -> None:
    engine = open_engine(core="rust")
    tokens = prompt(1, 128)
    engine.serve("first", tokens)
    engine.drain()
    engine.evict()
    backed_up, _ = daemon.pages_copied

    assert engine.serve("again", [*tokens, 1]).loaded == 128
    engine.drain()

    assert engine.linker.stats.offered == 2 * 128 // 4
    assert engine.linker.stats.kept == engine.linker.stats.offered
    # A verdict comes from the copier itself, and its count by way of control.
    until(lambda: daemon.pages_copied == (backed_up, 128 // 4), "they have been loaded")


@pytest.mark.parametrize("core", ["python", "rust"])
def test_every_page_knows_the_one_before_it(daemon: Daemon, open_engine: Open, core: str) -> None:
    engine = open_engine(core=core)
    backups = []
    send = engine.linker.client.backup_nodes

    def record(parts, counts, node_ids, parents):  # type: ignore[no-untyped-def]
        assert counts == [1] * len(counts), "an engine of one pool"
        keys = [unhexlify(digits) for digits in parts.keys]
        backups.extend(zip(keys, node_ids, parents, strict=True))
        return send(parts, counts, node_ids, parents)

    engine.linker.client.backup_nodes = record  # type: ignore[method-assign]
    tokens = prompt(1, 64)
    engine.serve("root", tokens)
    engine.step()
    engine.serve("longer", [*tokens, *prompt(2, 32)])
    engine.serve("branch", [*tokens[:32], *prompt(3, 32)])  # splits the first node
    engine.drain()

    (root, root_id, root_parent), (tail, tail_id, tail_parent), (branch, _, branch_parent) = backups
    assert root_parent == b""
    assert tail_parent == root[-32:]
    assert branch_parent == root[32 * 7 : 32 * 8]
    assert len(root) == 32 * 16
    assert len(tail) == len(branch) == 32 * 8
    assert None not in (root_id, tail_id)


def test_a_node_that_is_split_before_it_is_sent_has_an_unknown_parent(
    daemon: Daemon, open_engine: Open
) -> None:
    engine = open_engine()
    tokens = prompt(1, 64)
    engine.finish(engine.prefill("whole", tokens))
    engine.finish(engine.prefill("part", [*tokens[:32], *prompt(2, 32)]))
    engine.drain()
    assert engine.locked_tokens == 0
    engine.evict()
    assert engine.serve("again", [*tokens, 1]).loaded == 64


def test_a_chunked_prefill_is_backed_up_and_comes_back(daemon: Daemon, open_engine: Open) -> None:
    engine = open_engine(core="rust")
    tokens = prompt(1, 200)
    running = engine.admit("chunks", tokens)
    engine.forward_in_chunks(running, 48)
    engine.finish(running)
    engine.drain()
    assert engine.linker.stats.kept == 50
    engine.evict()

    again = engine.admit("again", tokens)
    engine.forward_in_chunks(again, 48)
    assert again.loaded == 196  # SGLang always computes the last token
    assert again.wrong == 0
    engine.finish(again)
    engine.drain()
    engine.tree.sanity_check()


def test_part_on_the_device_and_part_from_the_tier(daemon: Daemon, open_engine: Open) -> None:
    engine = open_engine()
    shared, tail = prompt(1, 64), prompt(2, 64)
    engine.serve("both", [*shared, *tail])
    engine.drain()
    engine.evict()
    engine.serve("shared", [*shared, 5])
    engine.drain()

    again = engine.serve("again", [*shared, *tail, 6])
    assert (again.device_hit, again.loaded, again.wrong) == (64, 64, 0)
    engine.drain()


def test_several_requests_load_in_one_batch(daemon: Daemon, open_engine: Open) -> None:
    engine = open_engine(pool_tokens=512)
    prompts = {f"r{i}": prompt(i, 64) for i in range(4)}
    for rid, tokens in prompts.items():
        engine.serve(rid, tokens)
    engine.drain()
    engine.evict()

    engine.step()
    batch = [engine.admit(f"{rid} again", [*tokens, 1]) for rid, tokens in prompts.items()]
    assert [running.loaded for running in batch] == [64] * 4
    engine.forward(*batch)
    assert [running.wrong for running in batch] == [0] * 4
    until(lambda: daemon.pages_copied[1] == 4 * 64 // 4, "they have been loaded")
    for running in batch:
        engine.finish(running)
    engine.drain()


def test_the_markers_of_requests_that_never_load_are_bounded(
    daemon: Daemon, open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd_client.sglang.tree.MAX_HIT_MARKERS", 3)
    engine = open_engine()
    tokens = prompt(1, 64)
    engine.serve("first", tokens)
    engine.drain()
    engine.evict()
    for i in range(5):
        waiting = engine._new_request(f"waiting {i}", tokens)
        waiting.init_next_round_input(engine.tree)
        assert waiting.host_hit_length > 0
    assert len(engine.tree.linker.hit_markers) == 5

    engine.step()
    assert not engine.tree.linker.hit_markers
    assert engine.serve("waiting 0", tokens).loaded == 60
    engine.drain()
