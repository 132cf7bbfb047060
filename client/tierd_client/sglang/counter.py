"""The layer counter that SGLang's pools and runners read while a batch's restores land."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierd_client.restore import Restore


class RestoreCounter:
    """Tells a forward pass when a layer's KV is there (SGLang 0.5.23, the `layer_done_counter`
    of a linker).

    Attributes:
        num_layers: Layers of this rank, of whichever kind; a full CUDA-graph replay waits for
            `num_layers - 1`.
        consumer_index: The restore that the current forward pass reads; -1 is none.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._next_index = 0
        self._restores: dict[int, Restore] = {}

    def start(self, restore: Restore) -> int:
        """Returns: the index by which the engine will name this restore."""
        index = self._next_index
        self._next_index += 1
        self._restores[index] = restore
        return index

    def set_consumer(self, index: int) -> None:
        """Called before every forward pass; -1 for one that loads nothing."""
        self.consumer_index = index

    def wait_until(self, threshold: int) -> None:
        """Let nothing that follows read layer `threshold` (from 0, within this rank's layers)
        before it is restored or given up. On a GPU the stream waits, not the caller."""
        restore = self._restores.get(self.consumer_index)
        if restore is not None:
            restore.wait_layer(threshold)

    def finish(self, index: int) -> bool:
        """Wait for the verdict: whether every page landed. From then on nothing writes them."""
        restore = self._restores.pop(index, None)
        return restore is None or restore.finish()

    def reset(self) -> None:
        """Wait until no restore writes to the pool any more, and forget them all."""
        while self._restores:
            self.finish(next(iter(self._restores)))
        self.consumer_index = -1
