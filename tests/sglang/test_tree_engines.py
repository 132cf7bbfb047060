"""Several engine processes on one daemon: one after the other, side by side, and ranks of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_harness import Daemon, EngineProcess, both, engine_processes, prompt, until, write_model

pytestmark = pytest.mark.sglang


def ready(engines: list[EngineProcess]) -> None:
    for engine in engines:
        assert engine.answer() == "ready"


def group(tmp_path: Path, *extra: str) -> list[list[str]]:
    rendezvous = str(tmp_path / "rendezvous")
    return [["--group", rendezvous, str(rank), "2", *extra] for rank in range(2)]


def test_an_engine_finds_what_a_killed_one_has_left(daemon: Daemon, model: Path) -> None:
    tokens = prompt(1, 128)
    with engine_processes(daemon, model) as [first]:
        ready([first])
        first.call("serve", rid="a", tokens=tokens)
        first.call("drain")
        first.kill()

    until(lambda: not daemon.status()["sessions"], "the killed engine's session has ended")
    with engine_processes(daemon, model, [["--core", "rust"]]) as [second]:
        ready([second])
        served = second.call("serve", rid="a", tokens=[*tokens, 1])
        assert (served["loaded"], served["wrong"]) == (128, 0)


def test_an_engine_of_retrained_weights_finds_nothing(daemon: Daemon, model: Path) -> None:
    tokens = prompt(1, 128)
    with engine_processes(daemon, model) as [first]:
        ready([first])
        first.call("serve", rid="a", tokens=tokens)
        first.call("drain")
        write_model(model, b"WEIGHTS", age_s=1800)
        with engine_processes(daemon, model) as [second]:
            ready([second])
            assert second.call("serve", rid="a", tokens=[*tokens, 1])["loaded"] == 0
        first.call("evict")
        assert first.call("serve", rid="b", tokens=[*tokens, 1])["loaded"] == 128


def test_what_an_engine_keeps_after_a_flush_is_its_own(daemon: Daemon, model: Path) -> None:
    tokens = prompt(1, 128)
    with engine_processes(daemon, model, [[], []]) as [one, other]:
        ready([one, other])
        one.call("serve", rid="a", tokens=tokens)
        one.call("drain")
        one.call("flush_cache")
        assert one.call("serve", rid="b", tokens=[*tokens, 1])["loaded"] == 0
        one.call("drain")
        one.call("evict")
        served = one.call("serve", rid="c", tokens=[*tokens, 1])
        assert (served["loaded"], served["wrong"]) == (128, 0)
        # The other engine still has what both shared before.
        served = other.call("serve", rid="d", tokens=[*tokens, 1])
        assert (served["loaded"], served["wrong"]) == (128, 0)


def test_two_ranks_back_up_and_restore_as_one(daemon: Daemon, model: Path, tmp_path: Path) -> None:
    tokens, chunked = prompt(1, 96), prompt(2, 120)
    with engine_processes(daemon, model, group(tmp_path, "--core", "rust")) as ranks:
        ready(ranks)
        both(ranks, "serve", rid="a", tokens=tokens)
        both(ranks, "serve", rid="b", tokens=chunked, chunk=32)
        both(ranks, "drain")
        before = both(ranks, "state")
        assert before["locked"] == 0
        assert before["kept"] == before["offered"] == (96 + 120) // 4
        both(ranks, "evict")

        served = both(ranks, "serve", rid="c", tokens=[*tokens, 1])
        assert (served["loaded"], served["wrong"]) == (96, 0)
        served = both(ranks, "serve", rid="d", tokens=[*chunked, 1], chunk=32)
        assert (served["loaded"], served["wrong"]) == (120, 0)
        both(ranks, "drain")
        assert both(ranks, "state")["locked"] == 0

        both(ranks, "flush_cache")
        assert both(ranks, "serve", rid="e", tokens=[*tokens, 1])["loaded"] == 0
        both(ranks, "drain")
        both(ranks, "evict")
        served = both(ranks, "serve", rid="f", tokens=[*tokens, 1])
        assert (served["loaded"], served["wrong"]) == (96, 0)

        both(ranks, "weights_change")
        both(ranks, "evict")
        assert both(ranks, "serve", rid="g", tokens=[*tokens, 1])["loaded"] == 0
        both(ranks, "drain")
        assert both(ranks, "state")["locked"] == 0


@pytest.mark.parametrize("tier", [{"memory": "1GiB"}], ids=["roomy"])
def test_two_ranks_of_a_hybrid_model_resume_at_the_same_places(
    daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    tokens = prompt(1, 128)
    hybrid = json.dumps({"window": 10, "states": 16, "layers": 6})
    arguments = group(tmp_path, "--core", "rust", "--page", "1", "--shape", hybrid)
    with engine_processes(daemon, model, arguments) as ranks:
        ready(ranks)
        both(ranks, "serve", rid="a", tokens=tokens, chunk=32)  # a state at each end
        both(ranks, "drain")
        both(ranks, "evict")
        served = both(ranks, "serve", rid="b", tokens=[*tokens[:100], *prompt(2, 20)])
        assert (served["loaded"], served["wrong"]) == (96, 0)
        both(ranks, "drain")
        both(ranks, "evict")
        served = both(ranks, "serve", rid="c", tokens=[*tokens, 1])
        assert (served["loaded"], served["wrong"]) == (128, 0)
        both(ranks, "drain")
        state = both(ranks, "state")
        assert (state["locked"], state["unaccounted"]) == (0, 0)


def test_two_ranks_that_differ_are_refused_by_both(
    daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    arguments = group(tmp_path)
    arguments[1] += ["--page", "1"]
    with engine_processes(daemon, model, arguments) as ranks:
        for rank in ranks:
            refusal = rank.refusal()
            assert "rank 0 has" in refusal
            assert "rank 1 has" in refusal
            assert "pages of 1 tokens" in refusal
