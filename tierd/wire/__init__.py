"""The protocol without I/O: messages, codec, limits, and the layout of shared memory.

Nothing here opens a socket, starts a process or maps a page, so every state and every bad
input is a unit test. `tierd/PROTOCOL.md` describes it for readers of other languages.
"""

from tierd.wire.errors import ProtocolError, RefusedError, TierdError

__all__ = ["ProtocolError", "RefusedError", "TierdError"]
