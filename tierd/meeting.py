"""Where a daemon and its clients meet: the socket's path, and the directory that it lies in."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tierd.wire.errors import ConfigError

_MAX_SOCKET_PATH = 107 - len(".zmq")
"""A Unix socket's address holds 107 bytes (Linux, unix(7)); the ZeroMQ socket's is 4 longer."""


def default_socket(environ: Mapping[str, str] = os.environ, run: Path = Path("/run/user")) -> Path:
    """Where daemon and clients of one user meet if nothing else is said.

    `$XDG_RUNTIME_DIR/tierd/tierd.sock`, else the same under /run/user/<uid> if that exists, else
    `tierd-<uid>/tierd.sock` in the directory for temporary files.
    """
    uid = os.getuid()
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "tierd" / "tierd.sock"
    if (run / str(uid)).is_dir():
        return run / str(uid) / "tierd" / "tierd.sock"
    return Path(tempfile.gettempdir()) / f"tierd-{uid}" / "tierd.sock"


def check_socket(socket: Path) -> Path:
    """An absolute path that fits in a socket's address.

    Raises: ConfigError: it does not fit, or is no path.
    """
    if re.match(r"[a-z]+:/", str(socket)):
        raise ConfigError(
            f"--socket {socket}: this is no path. tierd serves one host, over Unix sockets alone: "
            "TCP would need CURVE keys, which it has not"
        )
    socket = Path(os.path.abspath(socket))
    if len(os.fsencode(socket)) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"--socket {socket}: the path has more than {_MAX_SOCKET_PATH} bytes, "
            "too long for a Unix socket; choose a shorter one"
        )
    return socket


def prepare_socket_directory(socket: Path, group: int | None = None) -> None:
    """Create the socket's directory, closed to other users, if it is not there.

    Args: `group`: the id of one whose members may enter it all the same.

    Raises: ConfigError: it cannot be created, or another user could put a socket of theirs in
        place of ours.
    """
    directory = socket.parent
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError:
            pass
        else:
            if group is not None:
                os.chown(directory, -1, group)
                directory.chmod(0o750)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(
            f"--socket {socket}: cannot create its directory ({error}); choose another place"
        ) from None
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"--socket {socket}: its directory belongs to another user (uid {status.st_uid}); "
            "choose a directory of your own"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"--socket {socket}: other users can write to its directory; "
            f"`chmod go-w {directory}` or choose another"
        )
    enters = status.st_mode & (stat.S_IXGRP if status.st_gid == group else stat.S_IXOTH)
    if group is not None and not enters:
        raise ConfigError(
            f"--socket {socket}: the group {group} cannot enter its directory; choose one that is "
            f"not there, or `chgrp {group} {directory} && chmod g+rx {directory}`"
        )
