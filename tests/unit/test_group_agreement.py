"""The one exchange between the ranks of an engine: nobody is left waiting in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tierd_client.sglang.group import Offer, agree

from tierd.wire.errors import RefusedError


@pytest.fixture
def group() -> Iterator[Any]:
    """A rank that exchanges with itself."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def offer(refusal: str = "", **namespace: str) -> Offer:
    return Offer(
        refusal=refusal, host="here", geometry="kv", instance="engine", namespace=namespace
    )


def test_what_rank_0_offers_is_what_all_agree_on(group: Any) -> None:
    agreed = agree(group, offer(model="m"))
    assert (agreed.rank, agreed.world_size) == (0, 1)
    assert (agreed.instance, agreed.namespace) == ("engine", {"model": "m"})


def test_an_offer_that_is_too_large_is_a_refusal_that_every_rank_hears(group: Any) -> None:
    with pytest.raises(RefusedError, match="too much to say"):
        agree(group, offer(model="m" * 100_000))


def test_a_long_reason_is_cut_rather_than_lost(group: Any) -> None:
    with pytest.raises(RefusedError, match="no such pool"):
        agree(group, offer(refusal="no such pool " * 10_000))
