"""One step's loads: the layers to wait for, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Callable

from tierd.wire.errors import TierdError
from tierd.wire.layout import LANDED, PENDING, Segment
from tierd_client.device import Device
from tierd_client.link import ProcessHandle

SPIN_S = 0.0005
"""The verdict is usually near when it is asked for: look without sleeping for this long."""
NAP_S = 0.0001
LOOK_S = 0.005
"""How often the daemon's life is looked at while waiting."""
FINISH_S = 5.0
"""How long a copier whose control is gone may take to finish by itself before it is killed."""
DEATH_S = 10.0
"""How long a killed process may take to die."""


class WritesCannotBeStoppedError(TierdError):
    """A copier may still write to the engine's pages and could not be ended. Serving on could
    hand out a wrong page: the engine must stop."""


class Restore:
    """Pages on their way back to the device. Made by `TierClient.restore`."""

    def __init__(
        self,
        *,
        device: Device,
        segment: Segment,
        entry: int,
        generation: int,
        ticket: int,
        copier: ProcessHandle,
        daemon_lost: Callable[[], bool],
        abandon: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._device = device
        self._segment = segment
        self._entry = entry
        self._generation = generation
        self.ticket = ticket
        """Of its ready words."""
        self._copier = copier
        self._daemon_lost = daemon_lost
        self._abandon = abandon
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        self._landed: bool | None = None

    def wait_layer(self, layer: int) -> None:
        """Let nothing that follows read a layer before it has landed, or the restore has failed.

        On CUDA the current stream waits and the caller does not; elsewhere the caller does, as
        long as it would wait for the verdict.

        Raises: WritesCannotBeStoppedError: as `finish`.
        """
        if self._landed is None:
            self._device.wait_layer(self._entry, layer, self._generation, self._must_not_wait)

    def finish(self) -> bool:
        """Wait until nothing writes to the pages any more. True: all of them have landed.

        Ends: with the copier's or control's verdict; or, if control is gone or says nothing for
        the timeout, with the copier's death, which is brought about if need be.

        Raises: WritesCannotBeStoppedError: the copier neither finishes nor dies.
        """
        if self._landed is None:
            self._landed = self._await_verdict()
        return self._landed

    @property
    def finished(self) -> bool:
        """Does nobody read its ready words any more?"""
        return self._landed is not None

    @property
    def over(self) -> bool:
        """May its entry be used again? Not before whoever writes to it has: if the copier had to
        be ended, control is still to give its verdict."""
        return self._landed is not None and (self._verdict() != PENDING or self._daemon_lost())

    @property
    def settled(self) -> bool:
        """Is the verdict known without waiting?"""
        return self._landed is not None or self._verdict() != PENDING

    def _verdict(self) -> int:
        return self._segment.get_verdict(self._entry, self._generation)

    def _must_not_wait(self) -> bool:
        if self._landed is None and time.monotonic() - self._started > self._timeout_s:
            # Whoever reads the layer now must not be told later that it has landed meanwhile.
            self._landed = self._end_copier(0.0)
        return (
            self._landed is not None
            or self._verdict() != PENDING
            or (self._daemon_lost() and self._copier.is_dead())
        )

    def _await_verdict(self) -> bool:
        start = time.monotonic()
        look = start + LOOK_S
        while (verdict := self._verdict()) == PENDING:
            now = time.monotonic()
            if now - start > SPIN_S:
                time.sleep(NAP_S)
            if now < look:
                continue
            look = now + LOOK_S
            if self._daemon_lost():
                return self._end_copier(FINISH_S)
            if now - start > self._timeout_s:
                return self._end_copier(0.0)
        return verdict == LANDED

    def _end_copier(self, grace_s: float) -> bool:
        """See to it that nobody writes any more, then say what has come of it.

        The fence goes up first, so that a copier that has not begun never will.
        """
        self._abandon()
        until = time.monotonic() + grace_s
        while self._verdict() == PENDING and time.monotonic() < until:
            if self._copier.wait_dead(0.01):
                break
        if self._verdict() == PENDING and not self._copier.is_dead():
            try:
                self._copier.kill()
            except OSError as error:
                raise WritesCannotBeStoppedError(
                    f"the copier does not finish and may not be killed ({error}); run the daemon "
                    "as the engine's user"
                ) from error
            if not self._copier.wait_dead(DEATH_S):
                raise WritesCannotBeStoppedError("the copier was killed and does not die")
        landed = self._verdict() == LANDED
        if not landed:
            self._segment.release(self._entry)
        return landed


class FailedRestore(Restore):
    """A restore that was never started: nothing waits, nothing lands."""

    def __init__(self) -> None:
        self._landed = False
