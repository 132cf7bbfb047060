"""`python -m tierd.copier`: one copier, started by control at the other end of a socket pair."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from contextlib import closing

from tierd.channel import Channel
from tierd.copier.backend import Backend, BackendError, DeviceLostError
from tierd.copier.host import HostBackend
from tierd.copier.verify import Verifier
from tierd.copier.worker import Worker
from tierd.memory.placement import PIN_THREADS
from tierd.wire import codec
from tierd.wire.errors import ProtocolError
from tierd.wire.limits import READY_TIMEOUT_S
from tierd.wire.messages import ToCopier

FAILED_TO_START, NONSENSE, DEVICE_LOST = 2, 3, 4
"""Exit codes; 0 is an orderly end."""


def open_backend(device: str) -> Backend:
    """The backend of a device: a GPU's UUID as nvidia-smi prints it, or "host:N".

    Raises: BackendError: no such device, or a driver that cannot serve it.
    """
    if device.startswith("host:"):
        return HostBackend()
    # Only a copier with a GPU needs cuda-bindings and a driver.
    from tierd.copier.cuda import CudaBackend

    return CudaBackend(device)


def main() -> int:
    """Open the device and work until control ends the conversation. Exit codes: see the README."""
    parser = argparse.ArgumentParser(prog="python -m tierd.copier", description=__doc__)
    parser.add_argument("--device", required=True, help='a GPU UUID ("GPU-...") or "host:N"')
    parser.add_argument("--channel-fd", required=True, type=int, help="socket to control")
    parser.add_argument("--verify", default="off", choices=("off", "sample", "always"))
    parser.add_argument(
        "--hold-fd", type=int, help="kept open to the end: a later daemon sees that this one lives"
    )
    parser.add_argument("--ready-timeout-s", type=float, default=READY_TIMEOUT_S)
    parser.add_argument(
        "--max-gbps", type=float, help="cap of either direction; 1e9 bytes a second"
    )
    parser.add_argument("--pin-threads", type=int, default=PIN_THREADS)
    options = parser.parse_args()
    # Ctrl-C reaches the whole process group; control ends its copiers itself, through the channel.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with closing(Channel(socket.socket(fileno=options.channel_fd), codec.TO_COPIER)) as channel:
        return _serve(channel, options)


def _serve(channel: Channel[ToCopier], options: argparse.Namespace) -> int:
    try:
        backend = open_backend(options.device)
        worker = Worker(
            channel,
            backend,
            options.device,
            ready_timeout_s=options.ready_timeout_s,
            max_bytes_per_s=options.max_gbps and options.max_gbps * 1e9,
            pin_threads=options.pin_threads,
            verifier=Verifier(options.verify),
        )
    except (BackendError, DeviceLostError, ImportError) as error:
        print(f"tierd copier {options.device}: cannot start: {error}", file=sys.stderr)
        return FAILED_TO_START
    try:
        worker.run()
    except ProtocolError as error:
        print(f"tierd copier {options.device}: from control: {error}", file=sys.stderr)
        return NONSENSE
    except DeviceLostError as error:
        print(f"tierd copier {options.device}: giving up: {error}", file=sys.stderr, flush=True)
        # No destructor may wait for a device that does not answer.
        os._exit(DEVICE_LOST)
    return 0


if __name__ == "__main__":
    sys.exit(main())
