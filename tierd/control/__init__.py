"""The control process: every decision, no CUDA, one event loop.

`catalog`, `backups`, `leases` and `groups` decide; `server`, `copiers` and `sessions` carry out.
"""
