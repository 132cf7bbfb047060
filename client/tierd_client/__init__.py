"""The client of tierd: what runs inside an engine's process.

`TierClient` is usable on its own; `tierd_client.sglang.TierdLinker` puts it under SGLang's radix
tree. It starts no Python thread.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tierd.wire.errors import ProtocolError, RefusedError, TierdError

if TYPE_CHECKING:
    from tierd_client.client import TierClient
    from tierd_client.outbox import Ack, Need
    from tierd_client.pools import DeviceBuffer, DevicePool, PoolPages
    from tierd_client.restore import Restore

__all__ = [
    "Ack",
    "DeviceBuffer",
    "DevicePool",
    "Need",
    "PoolPages",
    "ProtocolError",
    "RefusedError",
    "Restore",
    "TierClient",
    "TierdError",
]

_HOME = {
    "Ack": "outbox",
    "DeviceBuffer": "pools",
    "DevicePool": "pools",
    "Need": "outbox",
    "PoolPages": "pools",
    "Restore": "restore",
    "TierClient": "client",
}


def __getattr__(name: str) -> object:
    # On first use: the watchdog process lives in this package and must not import torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
