"""Measurements that need the engine's own code. `tierd bench` runs each in its own process."""
