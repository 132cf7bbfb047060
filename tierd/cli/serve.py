"""`tierd serve`: the daemon in the foreground."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from tierd import config
from tierd.cli.gpus import visible_gpus
from tierd.cli.logs import log_to_stderr
from tierd.meeting import prepare_socket_directory
from tierd.memory.filesystems import huge_page_bytes
from tierd.memory.hugepages import joined_pages, joining_note, reserved_pages
from tierd.memory.limits import Available, available_memory, format_size
from tierd.memory.persist import record_bytes, used_bytes
from tierd.memory.placement import PIN_THREADS

log = logging.getLogger(__name__)

EPILOG = """
Examples:

- `tierd serve`: every GPU, half of the free memory, the user's default socket
- `tierd serve --memory 64GiB --devices 0,1`
- `tierd serve --config /etc/tierd/llama.toml --memory 128GiB`: flags win over the file
- `tierd serve --devices host:2 --memory 512MiB`: no GPU needed, two devices of the host backend
- `tierd serve --persist /dev/shm/tierd-llama`: the cache survives a restart of the daemon

Start the daemon before the engine: its CUDA contexts (about half a GiB of each GPU) must be there
when the engine sizes its own pools. On SIGTERM or Ctrl-C the daemon finishes what it has accepted,
for 15 s at most, and ends with every process that it started; a second signal ends it at once.

Exit status: 0 everything was finished, 1 a copier cannot start, 2 bad usage or configuration, 4 it
could not finish everything that it had accepted.
"""


def serve(
    socket_path: Annotated[
        str | None,
        typer.Option(
            "--socket",
            metavar="PATH",
            help="Unix socket for engines and for `tierd status`. "
            "Default: tierd/tierd.sock in the user's runtime directory.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory for pages, such as 64GiB. Default: half of what is free. "
            "Refused if the machine or the cgroup has less.",
        ),
    ] = None,
    memory_check: Annotated[
        bool | None,
        typer.Option(
            "--memory-check/--no-memory-check",
            help="Refuse --memory if it is more than what is free. Switch this off on a machine "
            "whose memory grows on demand. Default: on.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="`all`; or GPUs by number or UUID, separated by commas; or `host`, or `host:N`, "
            "for no GPU. Default: all GPUs, or `host` if there is none.",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SHARE",
            help="The most that the pages of one pool may take of the memory, such as swa=20%. "
            "May be repeated. Default: no cap; pools share by use.",
        ),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Multiplies every deadline after which a rank or a copier that does not answer is "
            "given up. Raise it on a machine that stalls for seconds. Default: 1.",
        ),
    ] = None,
    max_gbps: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="The most that the copies of each GPU may take in either direction, in GB/s (1e9 "
            "bytes). Default: no cap.",
        ),
    ] = None,
    hugepages: Annotated[
        str | None,
        typer.Option(
            metavar="auto|off|2MiB|1GiB",
            help="Memory pages to use for host memory. If the machine has not reserved enough huge "
            "pages, ordinary ones serve for the rest. Default: auto.",
        ),
    ] = None,
    pin_ahead: Annotated[
        str | None,
        typer.Option(
            metavar="all|SIZE",
            help="How much memory to pin from the start, in the background; the rest is pinned "
            "when it is needed. Default: all for GPUs, 0 for `host`.",
        ),
    ] = None,
    pin_threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Threads of each copier that pin memory. Default: {PIN_THREADS}.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Serve the users of this group too, engines and commands alike. "
            "Default: this user and root only.",
        ),
    ] = None,
    persist: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Keep pages in files of this directory, on a tmpfs or hugetlbfs, for the next "
            "daemon that is given the same one. Default: pages are lost when the daemon ends.",
        ),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="off|sample|always",
            help="Checksums of pages in host memory, for one page in 16 (sample) or all of them. "
            "They cost about half a second of CPU time for each GB. Default: off.",
        ),
    ] = None,
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="TOML file with the same names: socket, memory, memory-check, devices, "
            "log-level, pool, patience, max-gbps, hugepages, pin-ahead, pin-threads, group, "
            "persist, verify. Flags win over it.",
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="debug|info|warning|error", help="What the log on stderr has. Default: info."
        ),
    ] = None,
) -> None:
    """Serve the host-memory tier to the engines of this machine, in the foreground.

    Prints one line that starts with "tierd ready" once engines can connect; the log goes to
    stderr. Tells systemd the same where the unit has Type=notify.
    """
    caps = tuple(pool) if pool else None
    flags = config.ServeOptions(
        socket_path,
        memory,
        memory_check,
        devices,
        log_level,
        caps,
        patience,
        max_gbps,
        hugepages,
        pin_ahead,
        pin_threads,
        group,
        persist,
        verify,
    )
    options = flags.over(config.read_toml(config_file)) if config_file else flags
    settings = config.resolve(
        options,
        available=lambda: claimable(options.persist),
        visible_gpus=visible_gpus,
        reserved=reserved_pages,
    )
    log_to_stderr(settings.log_level)
    prepare_socket_directory(settings.socket, settings.group)
    log.info(
        "%s of host memory for pages%s, devices %s",
        format_size(settings.memory_bytes),
        "" if options.memory else " (half of what is free; --memory sets it)",
        ", ".join(settings.devices),
    )
    if settings.pages.note:
        log.log(logging.WARNING if settings.pages.short else logging.INFO, settings.pages.note)
    if settings.persist is None and settings.pages.huge_bytes < settings.memory_bytes:
        log.info(joining_note(joined_pages()))
    from tierd.control.server import serve as run_control

    raise typer.Exit(run_control(settings, lambda: announce(settings), tell_systemd))


def claimable(persist: str | None) -> Available:
    """Memory for this daemon: what is free, and what an earlier one has left for it."""
    if persist is None:
        return available_memory()
    path = Path(os.path.abspath(persist))
    huge = huge_page_bytes(path)
    if huge:
        nbytes = reserved_pages()[huge].free * huge - record_bytes(path)
        free = Available(nbytes, f"the hugetlbfs of {path}")
    else:
        free = available_memory()
    return free._replace(nbytes=max(0, free.nbytes + used_bytes(path)))


def announce(settings: config.ServeConfig) -> None:
    """Say on stdout, and to systemd, that engines can connect now."""
    print(
        f"tierd ready on {settings.socket}, {format_size(settings.memory_bytes)}, "
        f"devices {', '.join(settings.devices)}, pid {os.getpid()}",
        flush=True,
    )
    tell_systemd("READY=1")


def tell_systemd(state: str) -> None:
    """`notify_systemd`, to the manager that the environment names, if there is one."""
    notify_systemd(state, os.environ.get("NOTIFY_SOCKET"))


def notify_systemd(state: str, address: str | None) -> None:
    """Send a state to the service manager (sd_notify(3)); nothing to do without an address.

    Never waits, and a manager that is gone or does not read costs nothing: the daemon serves on,
    and a watchdog that hears nothing acts by itself.
    """
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.sendto(state.encode(), address)
