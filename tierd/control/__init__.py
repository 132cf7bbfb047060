"""The control process: every decision, no CUDA, one event loop.

`catalog`, `backups`, `leases`, `room` and `stock` decide; `members` and the two desks turn
messages into decisions and decisions into messages; `server` and `copiers` carry out. Nothing runs
for long: whatever has many pages is done a few at a time, and between two slices of such steps
`server` receives lookups and restores and answers them.
"""
