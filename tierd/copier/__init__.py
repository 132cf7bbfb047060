"""The process that moves pages between one device and pinned host memory.

`plan` turns pages and slots into copy operations, pure numpy; `session` orders a rank's jobs;
`host` and `cuda` carry them out; `worker` talks to control. The README beside this says which copy
calls are used on a GPU, and why.
"""
