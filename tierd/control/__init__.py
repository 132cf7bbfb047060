"""The control process: every decision, no CUDA, one event loop.

`backups`, `leases`, `pages`, `room` and `stock` decide; `members` and the desks turn messages into
decisions and decisions into messages; `server` and `copiers` carry them out. Nothing runs for
long: whatever has many pages is done a few at a time, and in between `server` answers lookups and
restores. README.md names every module, and follows a backup and a restore through them.
"""
