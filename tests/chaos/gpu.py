"""How much of a GPU's memory is in use. A process of its own looks: whoever starts engines must
not have touched CUDA."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

import torch


class Gpu:
    """One GPU, such as "cuda:0"."""

    def __init__(self, device: str, processes: ForkServerContext) -> None:
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_look, args=(device, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def used(self) -> int:
        """Bytes in use by all processes."""
        self._pipe.send(None)
        return int(self._pipe.recv())

    def close(self) -> None:
        self._pipe.close()
        self._process.join()
        self._process.close()


def _look(device: str, pipe: Connection) -> None:
    with suppress(EOFError):
        while True:
            pipe.recv()
            free, total = torch.cuda.mem_get_info(device)
            pipe.send(total - free)
