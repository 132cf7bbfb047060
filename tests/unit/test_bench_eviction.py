"""`tierd bench eviction`: traces are read as they stand, the bound is one, and the tiers that are
compared keep what they should."""

from __future__ import annotations

import gzip
import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tierd.bench.bound import belady_hits
from tierd.bench.gpu import through_gpu
from tierd.bench.replay import TIERS, Size, rows
from tierd.bench.sglang_host import SglangHost
from tierd.bench.tiers import PageLru
from tierd.bench.traces import Access, Trace, TraceBuilder, read_trace
from tierd.bench.workloads import KINDS
from tierd.cli.bench import app, parse_sizes
from tierd.wire.errors import ConfigError

BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


def make_trace(*requests: list[int]) -> Trace:
    builder = TraceBuilder("made", 64)
    for blocks in requests:
        builder.add(blocks)
    return builder.build()


def write(path: Path, *lines: str) -> Path:
    text = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


# --- traces -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_file_is_read_in_the_order_of_its_timestamps(tmp_path: Path, name: str) -> None:
    late = '{"timestamp": 9, "input_length": 700, "output_length": 4, "hash_ids": [1, 2, 3]}'
    early = '{"timestamp": 3, "hash_ids": ["a", 2]}'
    trace = read_trace(write(tmp_path / name, late, "", early), 512)
    assert [len(chain) for chain in trace.requests] == [2, 3]
    assert (trace.name, trace.pages, trace.page_tokens) == (name, 5, 512)


def test_a_block_after_two_different_beginnings_is_two_pages() -> None:
    trace = make_trace([1, 7], [2, 7], [1, 7, 8])
    assert trace.requests == [[0, 1], [2, 3], [0, 1, 4]]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("[1, 2]", "Expected `object`"),
        ('{"hash_id": [1]}', "missing required field `hash_ids`"),
        ('{"hash_ids": [1, 2.5]}', r"Expected `int | str`, got `float`"),
        ('{"hash_ids": "abc"}', "Expected `array`"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "bad.jsonl", '{"hash_ids": [1]}', "", line)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 3: .*{reason}"):
        read_trace(path, 512)


def test_a_file_that_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.jsonl", 512)
    with pytest.raises(ConfigError, match="nothing to replay"):
        read_trace(write(tmp_path / "empty.jsonl", '{"hash_ids": []}'), 512)
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(ConfigError, match=r"broken\.gz"):
        read_trace(broken, 512)
    broken.write_bytes(gzip.compress(b"x" * 1000)[:12] + b"\xff" * 40)
    with pytest.raises(ConfigError, match=r"broken\.gz"):
        read_trace(broken, 512)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_seed_makes_one_workload(kind: str) -> None:
    one, same, other = KINDS[kind](50, 1), KINDS[kind](50, 1), KINDS[kind](50, 2)
    assert len(one.requests) == 50
    assert one == same
    assert one.requests != other.requests


def test_most_of_what_the_scan_workload_writes_is_asked_for_once() -> None:
    asked: dict[int, int] = {}
    for chain in KINDS["scan"](600, 1).requests:
        for page in chain:
            asked[page] = asked.get(page, 0) + 1
    assert sum(times == 1 for times in asked.values()) > 0.8 * len(asked)


# --- the bound ----------------------------------------------------------------------------------


def best_hits(accesses: list[Access], pages: int) -> int:
    """The most that can be restored, by trying every way to fill the tier after every request."""
    states = {frozenset[int](): 0}
    for access in accesses:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            for page in access.chain[access.gpu_hits :]:
                if page not in held:
                    break
                hits += 1
            here = held | set(access.chain)
            for kept in combinations(sorted(here), min(pages, len(here))):
                state = frozenset(kept)
                following[state] = max(following.get(state, 0), hits)
        states = following
    return max(states.values())


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(BLOCKS, min_size=1, max_size=7), pages=st.integers(1, 3))
def test_the_bound_is_what_can_be_reached(requests: list[list[int]], pages: int) -> None:
    accesses = through_gpu(make_trace(*requests), 0)
    assert belady_hits(accesses, pages) == best_hits(accesses, pages)


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(BLOCKS, min_size=1, max_size=7),
    pages=st.integers(1, 3),
    gpu_pages=st.integers(1, 4),
)
def test_behind_a_gpu_nothing_exceeds_the_bound(
    requests: list[list[int]], pages: int, gpu_pages: int
) -> None:
    accesses = through_gpu(make_trace(*requests), gpu_pages)
    assert belady_hits(accesses, pages) >= best_hits(accesses, pages)


# --- the tiers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TIERS))
@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(BLOCKS, min_size=1, max_size=40),
    pages=st.integers(1, 12),
    gpu_pages=st.integers(0, 8),
)
def test_no_tier_restores_more_than_the_bound(
    name: str, requests: list[list[int]], pages: int, gpu_pages: int
) -> None:
    accesses = through_gpu(make_trace(*requests), gpu_pages)
    tier = TIERS[name](pages, 64)
    assert sum(map(tier.serve, accesses)) <= belady_hits(accesses, pages)


@pytest.mark.parametrize("name", list(TIERS))
@settings(max_examples=40, deadline=None)
@given(requests=st.lists(BLOCKS, min_size=1, max_size=40), gpu_pages=st.integers(0, 8))
def test_a_tier_with_room_for_all_restores_all_that_was_seen(
    name: str, requests: list[list[int]], gpu_pages: int
) -> None:
    trace = make_trace(*requests)
    accesses = through_gpu(trace, gpu_pages)
    tier = TIERS[name](trace.pages, 64)
    assert sum(map(tier.serve, accesses)) == belady_hits(accesses, trace.pages)


def test_what_the_gpu_hits_is_not_looked_up_in_the_tier() -> None:
    first, again, other, back = through_gpu(make_trace([1, 2], [1, 2, 3], [4, 5, 6], [1, 2]), 4)
    assert (first.gpu_hits, again.gpu_hits, other.gpu_hits) == (0, 2, 0)
    assert other.left == [2, 1]
    assert back.gpu_hits == 1


def test_sglang_evicts_whole_nodes_and_none_that_the_gpu_holds() -> None:
    host = SglangHost(4, 64)
    long, short = [0, 1, 2], [3, 4]
    assert host.serve(Access(long, 0, [])) == 0  # stays on the GPU
    assert host.serve(Access(short, 0, [4, 3])) == 0  # finds no room, and is lost
    assert host.serve(Access(short, 0, [4, 3])) == 0
    assert host.serve(Access(long, 3, [2, 1, 0])) == 0  # leaves the GPU, its copy stays
    assert host.serve(Access(short, 0, [4, 3])) == 0  # takes the room of all three
    assert host.serve(Access(short, 0, [4, 3])) == 2
    assert host.serve(Access(long, 0, [2, 1, 0])) == 0


def test_without_chains_a_prefix_that_the_gpu_always_hits_goes_cold() -> None:
    # Two pages of a system prompt stay on the GPU while answers to it fill the tier.
    prompt = [0, 1]
    tier, chained = PageLru(4), TIERS["chain-lru"](4, 64)
    for kept in (tier, chained):
        assert kept.serve(Access(prompt, 0, [])) == 0
        for answer in range(2, 8):
            kept.serve(Access([*prompt, answer], 2, [answer]))
    assert tier.serve(Access(prompt, 0, prompt[::-1])) == 0
    assert chained.serve(Access(prompt, 0, prompt[::-1])) == 2


@pytest.mark.parametrize("kind", list(KINDS))
def test_chain_reuse_is_at_or_above_sglang_and_resists_scans(kind: str) -> None:
    trace = KINDS[kind](400, 1)
    sizes = [Size(share=0.1), Size(share=0.3)]
    steps: list[None] = []
    found = list(rows(trace, [Size(), Size(share=0.02)], sizes, lambda: steps.append(None)))
    assert len(found) == 4
    assert len(steps) == 4 * (len(TIERS) + 1)
    for row in found:
        assert row.bound >= row.hit_rates["chain-reuse"] >= row.hit_rates["sglang"]
    if kind == "scan":
        assert found[0].hit_rates["chain-reuse"] > found[0].hit_rates["sglang"] + 0.03


# --- the command --------------------------------------------------------------------------------


def test_the_table_is_markdown_with_every_policy() -> None:
    result = CliRunner().invoke(app, ["eviction", "--kind", "chat", "--requests", "40"])
    assert result.exit_code == 0
    head, rule, *body = [line for line in result.stdout.splitlines() if line.strip()]
    assert [cell.strip() for cell in head.split("|")[5:-1]] == [*TIERS, "bound"]
    assert set(rule) == {"|", "-"}
    assert len(body) == 2 * 4


def test_a_trace_file_is_replayed_as_json(tmp_path: Path) -> None:
    lines = [json.dumps({"hash_ids": [0, n % 3]}) for n in range(9)]
    path = write(tmp_path / "t.jsonl", *lines)
    command = ["eviction", "--trace", str(path), "--sizes", "100%,2", "--device-pages", "0"]
    whole, two = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (whole["pages"], whole["trace_pages"], two["pages"]) == (4, 4, 2)
    assert whole["hit_rates"] == dict.fromkeys(TIERS, whole["bound"])
    assert whole["bound"] == pytest.approx((9 * 2 - 4) / (9 * 2))


@pytest.mark.parametrize("text", ["5x", "", "0", "101%", "1.5", "-3", "5%,,7", "nan%"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--sizes: .* is no size"):
        parse_sizes("--sizes", text, least=1)


def test_no_gpu_cache_is_a_size() -> None:
    sizes = parse_sizes("--device-pages", "0, 2.5%,0%", least=0)
    assert sizes == [Size(), Size(share=0.025), Size()]


@pytest.mark.parametrize("command", [[], ["eviction"]])
def test_help_teaches_by_example(command: list[str]) -> None:
    shown = CliRunner().invoke(app, [*command, "--help"]).stdout
    assert "tierd bench eviction" in shown.split("Examples:")[1]
