"""What the results of several measurements have in common, and how their words read."""

from __future__ import annotations

import msgspec

from tierd.wire.errors import TierdError

INCOMPLETE = "Incomplete: the measurement was cut off, and this is what there was by then."


class NothingMeasuredError(TierdError):
    """A result without a row."""

    def __init__(self, command: str) -> None:
        super().__init__(
            f"there is nothing to draw: `tierd bench {command}` was cut off before it had measured "
            "anything; run it again"
        )


class Machine(msgspec.Struct):
    """Where it ran. `gpu`: None without one."""

    gpu: str | None
    cpus: int
    torch: str

    def words(self) -> str:
        """For a title."""
        where = self.gpu or "no GPU: copies in memory, not over a link"
        return f"{where}, {self.cpus} cores, torch {self.torch}"


def page_words(page_tokens: int, run: int) -> str:
    """ "1-token pages, runs of 64". `run`: pages that lie side by side on the device."""
    return f"{page_tokens}-token pages, " + ("shuffled" if run == 1 else f"runs of {run}")
