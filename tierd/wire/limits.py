"""Bounds of the wire. What exceeds one is refused before it is decoded or allocated."""

PROTOCOL_VERSION = 7
"""Raised by any change that an older peer would misread."""

KEY_BYTES = 32
"""A page key: the engine's chained SHA-256 (SGLang 0.5.23, `get_storage_hash_str`)."""

MAX_MESSAGE_BYTES = 16 << 20
"""One message on any transport. 16 MiB is the keys of 500k one-token pages."""

MAX_FDS = 128
"""File descriptors beside one lifeline message (Linux refuses more than 253)."""

READY_TIMEOUT_S = 20.0
"""A job whose ready words are not set by then fails: its rank is stuck, or its stream is."""

MAX_NAME = 256
MAX_WORLD_SIZE = 64
MAX_POOLS = 32
MAX_BUFFERS = 4096
MAX_BUFFERS_OF_RANK = 2 * MAX_BUFFERS
"""In all its pools together: control and a copier each take a rank in at one go, in some 3
microseconds a buffer. A model of a hundred layers with scales and a draft has about 500."""
MAX_ALLOCATIONS = 4096
MAX_BYTES = 1 << 62
MAX_PAGES_PER_MESSAGE = MAX_MESSAGE_BYTES // KEY_BYTES
MAX_ITEMS_PER_FLUSH = 16384
MAX_PARTS_PER_FLUSH = 2 * MAX_ITEMS_PER_FLUSH
MAX_ITEMS_PER_RESTORE = 4096
