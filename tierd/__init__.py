"""tierd: the host-memory tier of an LLM engine's KV cache, as a daemon of its own."""

__version__ = "0.1.0"
