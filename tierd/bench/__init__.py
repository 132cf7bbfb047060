"""Replays access traces against eviction policies. No sockets, no processes, no clock."""
