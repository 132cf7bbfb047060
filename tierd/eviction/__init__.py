"""Which page goes when room is needed. Policies know slots as plain ints and keep no clock."""

from tierd.eviction.chain_lru import ChainLru
from tierd.eviction.chain_reuse import ChainReuse
from tierd.eviction.policy import EvictionPolicy
from tierd.eviction.window_lru import WindowLru

__all__ = ["ChainLru", "ChainReuse", "EvictionPolicy", "WindowLru"]
