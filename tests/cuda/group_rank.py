"""One rank of a group with a GPU a rank: does what its standard input says, a line a command, and
answers each with the seconds it took."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cuda_rank import LAYERS, ROW_BYTES, TOKENS, key
from tierd_client import DeviceBuffer, DevicePool, PoolPages, TierClient

NODE = 16
"""Pages of a backup."""
PATIENCE_S = 30.0
CONTIGUOUS_BYTES, CONTIGUOUS_COPIES = 1 << 30, 4
PAGE_BYTES = 2 * LAYERS * TOKENS * ROW_BYTES


class GroupRank:
    """A rank whose KV cache is two halves: pages are backed up from the first; a chain of half as
    many (nobody may lease more of a pool) is restored to the second.

    Page p of a rank is `p * 7 + rank` in every byte; of replicated KV, `p * 7` on all ranks.
    """

    def __init__(self, socket: Path, rank: int, world_size: int, replicated: bool, pages: int):
        self.pages = pages
        self._salt = 0 if replicated else rank
        self._device = torch.device("cuda", rank) if torch.cuda.is_available() else "cpu"
        if torch.cuda.is_available():
            torch.cuda.set_device(rank)
        self._layers = [
            torch.zeros(2, 2 * pages * TOKENS, ROW_BYTES, dtype=torch.uint8, device=self._device)
            for _ in range(LAYERS)
        ]
        buffers = [
            DeviceBuffer(kv[half], n) for half in (0, 1) for n, kv in enumerate(self._layers)
        ]
        self.client = TierClient(
            socket,
            [DevicePool("kv", TOKENS, buffers, replicated=replicated)],
            namespace={"model": "latent" if replicated else "heads"},
            instance=f"group of {world_size}",
            rank=rank,
            world_size=world_size,
        )
        self._slots = torch.arange(2 * pages * TOKENS, device=self._device)

    def pin(self) -> None:
        """Prepare `contiguous`."""
        on_gpu = torch.cuda.is_available()
        self._host = torch.empty(CONTIGUOUS_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._block = torch.zeros(CONTIGUOUS_BYTES, dtype=torch.uint8, device=self._device)
        self._host.copy_(self._block)

    def contiguous_to_host(self) -> None:
        """What the link carries at best: one block of memory, CONTIGUOUS_COPIES times."""
        for _ in range(CONTIGUOUS_COPIES):
            self._host.copy_(self._block, non_blocking=True)
        self._synchronize()

    def contiguous_to_device(self) -> None:
        """The same, the other way."""
        for _ in range(CONTIGUOUS_COPIES):
            self._block.copy_(self._host, non_blocking=True)
        self._synchronize()

    def connect(self) -> None:
        """Wait until the daemon has all ranks and this one's watchdog is up."""
        assert self.client.connect(PATIENCE_S), "the daemon does not take it"

    def fill(self) -> None:
        for page in range(self.pages):
            for kv in self._layers:
                kv[:, page * TOKENS : (page + 1) * TOKENS] = self._byte(page)
        self._synchronize()

    def backup(self) -> None:
        before = b""
        for at in range(0, self.pages, NODE):
            keys = self._keys(range(at, at + NODE))
            self.client.backup([self._named(keys, at)], parent=before)
            before = keys[-32:]
        left = self.pages // NODE

        def acked() -> bool:
            nonlocal left
            self.client.flush()
            for ack in self.client.acks():
                assert ack.kept, "a backup was not kept"
                left -= 1
            return not left

        _until(acked)

    def lookup(self) -> None:
        half = self.pages // 2
        keys = self._keys(range(half))
        _until(lambda: self.client.lookup("half", keys)[-1:] == [half])

    def restore(self) -> None:
        keys = self._keys(range(self.pages // 2))
        restore = self.client.restore({"half": [self._named(keys, self.pages)]})
        assert restore.finish(), "the restore has failed"

    def check(self) -> None:
        """Raises: AssertionError: a page is not what was backed up."""
        self._synchronize()
        for page in range(self.pages // 2):
            at = (self.pages + page) * TOKENS
            for kv in self._layers:
                assert bool((kv[:, at : at + TOKENS] == self._byte(page)).all()), f"page {page}"

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize(self._device)

    def _byte(self, page: int) -> int:
        return (page * 7 + self._salt) % 251 + 1

    def _keys(self, pages: range) -> bytes:
        return b"".join(key("group", page) for page in pages)

    def _named(self, keys: bytes, at: int) -> PoolPages:
        pages = len(keys) // 32
        return PoolPages("kv", keys, self._slots[at * TOKENS : (at + pages) * TOKENS])


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come to an end"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("pages", type=int)
    parser.add_argument("--replicated", action="store_true")
    args = parser.parse_args()
    rank = GroupRank(args.socket, args.rank, args.world_size, args.replicated, args.pages)
    for line in sys.stdin:
        started = time.monotonic()
        getattr(rank, line.strip())()
        print(time.monotonic() - started, flush=True)
    rank.client.close()


if __name__ == "__main__":
    main()
