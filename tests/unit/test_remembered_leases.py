"""What a lookup found is remembered for that chain, and for as long as it surely lasts."""

from __future__ import annotations

import hashlib

from tierd_client import leases
from tierd_client.leases import ChainId, Leases


def chain(tokens: str) -> list[str]:
    """A page for each letter; a key is a sum over all letters up to it."""
    return [hashlib.sha256(tokens[: i + 1].encode()).hexdigest() for i in range(len(tokens))]


def test_a_lease_is_recalled_for_its_own_chain_pools_and_time() -> None:
    known = Leases()
    known.remember("r", ChainId.of(chain("abcd"), [0]), [2, 4], until=10.0, now=0.0)
    assert known.recall("r", ChainId.of(chain("abcd"), [0]), now=9.0) == [2, 4]
    assert known.recall("r", ChainId.of(chain("abcd"), [0]), now=10.0) is None
    for other in (
        ChainId.of(chain("xbcd"), [0]),
        ChainId.of(chain("abc"), [0]),
        ChainId.of(chain("abcd")[1:], [0]),
        ChainId.of(chain("abcd"), [0, 1]),
    ):
        assert known.recall("r", other, now=1.0) is None
    assert known.recall("s", ChainId.of(chain("abcd"), [0]), now=1.0) is None


def test_digits_and_bytes_name_the_same_chain() -> None:
    blob = bytes.fromhex("".join(chain("abc")))
    assert ChainId.of(blob, [0]) == ChainId.of(chain("abc"), [0])


def test_a_lease_that_has_ended_is_not_recalled() -> None:
    known = Leases()
    known.remember("r", ChainId.of(chain("ab"), [0]), [2], until=10.0, now=0.0)
    assert known.end("r")
    assert not known.end("r")
    assert known.recall("r", ChainId.of(chain("ab"), [0]), now=1.0) is None


def test_requests_that_never_come_back_do_not_pile_up() -> None:
    known = Leases()
    for n in range(leases.MAX_LEASES + 1):
        last = n == leases.MAX_LEASES
        known.remember(str(n), ChainId.of(chain("a"), [0]), [1], 20.0 if last else 1.0, 2.0)
    assert known.recall("0", ChainId.of(chain("a"), [0]), now=0.5) is None
    assert known.recall(str(leases.MAX_LEASES), ChainId.of(chain("a"), [0]), now=3.0) == [1]
