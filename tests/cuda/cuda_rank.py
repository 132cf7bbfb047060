"""A rank on a GPU in a process of its own: it says that it is ready, backs pages up without end,
and is there to be killed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tierd_client import DeviceBuffer, DevicePool, PoolPages, TierClient

TOKENS, LAYERS = 64, 8
ROW_BYTES = 2048
"""Of a token in one buffer: a page has 16 rows of 128 KiB."""


class CudaRank:
    """One rank with as many pages as take up so much GPU memory, K and V of a layer in one tensor.

    Every byte of page p is written by `fill` and read by `holds`.
    """

    def __init__(self, socket: Path, instance: str, nbytes: int, **options: object) -> None:
        self.pages = nbytes // (2 * LAYERS * TOKENS * ROW_BYTES)
        self.layers = [
            torch.zeros(2, self.pages * TOKENS, ROW_BYTES, dtype=torch.uint8, device="cuda")
            for _ in range(LAYERS)
        ]
        layers = list(enumerate(self.layers))
        buffers = [DeviceBuffer(kv[half], n) for half in (0, 1) for n, kv in layers]
        self.client = TierClient(
            socket,
            [DevicePool("kv", TOKENS, buffers)],
            namespace={"model": "deaths"},
            instance=instance,
            retry_s=0.05,
            **options,  # type: ignore[arg-type]
        )
        self._slots = torch.arange(self.pages * TOKENS, device="cuda")

    def fill(self, page: int, value: int) -> None:
        for n, kv in enumerate(self.layers):
            kv[:, page * TOKENS : (page + 1) * TOKENS] = (value + n) % 256

    def holds(self, page: int, value: int) -> bool:
        return all(
            bool((kv[:, page * TOKENS : (page + 1) * TOKENS] == (value + n) % 256).all())
            for n, kv in enumerate(self.layers)
        )

    def named(self, keys: bytes, pages: range) -> PoolPages:
        return PoolPages("kv", keys, self._slots[pages.start * TOKENS : pages.stop * TOKENS])


def key(name: str, number: int) -> bytes:
    return f"{name} {number}".encode().ljust(32, b".")


def main() -> None:
    socket, instance, nbytes = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    rank = CudaRank(socket, instance, nbytes)
    assert rank.client.connect(30.0)
    torch.cuda.synchronize()
    number = 0
    while True:
        if number < 64 or rank.client.acks():
            keys = b"".join(key(instance, number * 32 + i) for i in range(32))
            at = number * 32 % (rank.pages - 32)
            rank.client.backup([rank.named(keys, range(at, at + 32))], parent=b"")
            number += 1
        rank.client.flush()
        if number == 16:
            print("ready", flush=True)


if __name__ == "__main__":
    main()
