"""The client of tierd: what runs inside an engine's process.

`TierClient` is usable on its own; `tierd_client.sglang.TierdLinker` puts it under SGLang's radix
tree. It starts no Python thread.
"""

from tierd.wire.errors import ProtocolError, RefusedError, TierdError
from tierd_client.client import Ack, TierClient
from tierd_client.pools import DeviceBuffer, DevicePool, PoolPages
from tierd_client.restore import Restore

__all__ = [
    "Ack",
    "DeviceBuffer",
    "DevicePool",
    "PoolPages",
    "ProtocolError",
    "RefusedError",
    "Restore",
    "TierClient",
    "TierdError",
]
