"""The control process: every decision, no CUDA, one event loop.

`catalog`, `backups`, `leases`, `room` and `stock` decide; `members` and the two desks turn
messages into decisions and decisions into messages; `server` and `copiers` carry out.
"""
