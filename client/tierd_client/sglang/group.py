"""The one exchange between the ranks of an engine, when they start.

Later decisions need none: every rank sends the daemon the same sequence of requests, and the
daemon answers all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from tierd.wire.errors import RefusedError

_OFFER_BYTES = 32 << 10
_REASON_CHARS = 4096


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank brings.

    `refusal`: why it cannot be served, or empty. `host`: the running system it is on.
    `geometry`: its pools, in words. `features`: of the plugin, those that it has.
    """

    refusal: str
    host: str
    geometry: str
    instance: str
    namespace: dict[str, str]
    features: tuple[str, ...] = ()


class Group(NamedTuple):
    """What the ranks agreed on. `instance` and `namespace` are rank 0's; `features` are those of
    the plugin that every rank has."""

    rank: int
    world_size: int
    instance: str
    namespace: dict[str, str]
    features: frozenset[str]


def group_of(params: Any) -> Any | None:
    """The process group whose ranks hold one page's shards; None for a rank alone.

    Under DP attention that is the attention-TP group, not the TP group (SGLang 0.5.23,
    `CacheInitParams`).
    """
    return params.attn_tp_cache_group or params.tp_cache_group


def rank_in(group: Any | None) -> tuple[int, int]:
    """(rank, world size)."""
    if group is None:
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def agree(group: Any | None, offer: Offer) -> Group:
    """Exchange offers with every rank of the group; all of them must call it.

    A rank that cannot be served offers its reason instead of raising it, so that no other rank
    waits for it in vain and all of them say the same.

    Args:
        group: A process group that moves CPU tensors (gloo), or None.

    Raises: RefusedError: a rank cannot be served, or the ranks do not fit together.
    """
    rank, world_size = rank_in(group)
    offers = [offer] if group is None else _gather(group, world_size, offer)
    for number, other in enumerate(offers):
        if other.refusal:
            where = f" (rank {number} of {world_size})" if world_size > 1 else ""
            raise RefusedError(f"tierd cannot serve this engine{where}: {other.refusal}")
    if len({other.host for other in offers}) > 1:
        raise RefusedError(
            f"the {world_size} ranks of this engine's attention group run on several hosts; "
            "tierd serves groups within one host"
        )
    for number, other in enumerate(offers):
        if other.geometry != offers[0].geometry:
            raise RefusedError(
                f"rank 0 has {offers[0].geometry}, and rank {number} has {other.geometry}; "
                "the ranks of one engine must have the same"
            )
    shared = frozenset(offer.features).intersection(*(other.features for other in offers))
    return Group(rank, world_size, offers[0].instance, offers[0].namespace, shared)


def host_id() -> str:
    """The running system, the same in all containers on it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _gather(group: Any, world_size: int, offer: Offer) -> Sequence[Offer]:
    data = msgspec.msgpack.encode(offer)
    if len(data) > _OFFER_BYTES - 4:
        # To raise here would leave the other ranks waiting in the exchange.
        reason = offer.refusal or f"a rank has too much to say of its engine ({len(data)} bytes)"
        short = Offer(
            refusal=reason[:_REASON_CHARS], host=offer.host, geometry="", instance="", namespace={}
        )
        data = msgspec.msgpack.encode(short)
    mine = torch.zeros(_OFFER_BYTES, dtype=torch.uint8)
    framed = bytearray(len(data).to_bytes(4, "little") + data)
    mine[: len(framed)] = torch.frombuffer(framed, dtype=torch.uint8)
    all_offers = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(all_offers, mine, group=group)
    decoder = msgspec.msgpack.Decoder(Offer)
    offers = []
    for tensor in all_offers:
        raw = tensor.numpy().tobytes()
        offers.append(decoder.decode(raw[4 : 4 + int.from_bytes(raw[:4], "little")]))
    return offers
