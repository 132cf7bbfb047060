"""Bytes to messages and back, and the framing of stream sockets. No I/O.

`decode` never returns a message that breaks its schema; `Frames` never buffers more than one
oversized frame's header.
"""

from __future__ import annotations

import struct
from operator import add
from typing import Any, Generic, TypeVar

import msgspec

from tierd.wire import limits, messages
from tierd.wire.errors import OutOfStepError, ProtocolError

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_HEADER = struct.Struct("<II")


class Decoder(Generic[T]):
    """Decodes one of a union of messages, or raises `ProtocolError` naming the field."""

    def __init__(self, union: Any, *, handshake: bool = False) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._handshake = handshake

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Raises: ProtocolError: too long, not msgpack, unknown op, or a field out of schema."""
        if len(data) > limits.MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"message of {len(data)} bytes is over the limit of {limits.MAX_MESSAGE_BYTES}; "
                "send fewer pages at a time"
            )
        if self._handshake:
            check_version(data)
        try:
            message = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a valid message: {error}") from None
        check_blobs(message)
        return message


class _Versioned(msgspec.Struct):
    """The one field that all versions share; the others are passed over, not built."""

    protocol: Any = None


_version = msgspec.msgpack.Decoder(_Versioned)


class VersionMismatchError(ProtocolError):
    """The two ends speak different protocols. The text names which to upgrade."""


def check_version(data: bytes | bytearray | memoryview) -> None:
    """Look at a lifeline message's `protocol` before its schema, which other versions may not
    share: all versions have that field, as an integer, at the top.

    Raises: VersionMismatchError: another version's. ProtocolError: not a msgpack map.
    """
    try:
        theirs = _version.decode(data).protocol
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a valid message: {error}") from None
    ours = limits.PROTOCOL_VERSION
    if isinstance(theirs, int) and theirs != ours:
        behind = "the client" if theirs < ours else "the daemon"
        raise VersionMismatchError(
            f"the client speaks protocol {theirs}, the daemon {ours}: upgrade {behind} "
            "(pip install -U tierd) and start it again"
        )


def encode(message: messages.Message) -> bytes:
    """Raises: ProtocolError: the encoded message is over `limits.MAX_MESSAGE_BYTES`."""
    data = _encoder.encode(message)
    if len(data) > limits.MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} of {len(data)} bytes is over the limit of "
            f"{limits.MAX_MESSAGE_BYTES}; send fewer pages at a time"
        )
    return data


def check_blobs(message: object) -> None:
    """Check what types alone cannot say: that blobs are as long as the counts beside them.

    Raises: ProtocolError: a blob or a reference that does not fit.
    """
    if isinstance(message, messages.Flush):
        _check_columns(message)
    elif isinstance(message, messages.Supply):
        _check_keys(message.keys, sum(part.pages for part in message.parts))
    elif isinstance(message, messages.Lookup):
        _check_whole(message.keys)
        if len(set(message.pools)) != len(message.pools):
            raise ProtocolError(f"`pools` names one pool twice: {message.pools}")
    elif isinstance(message, messages.Restore):
        _check_keys(message.keys, sum(p.pages for item in message.items for p in item.parts))
    elif isinstance(message, messages.BackupJob | messages.RestoreJob):
        for part in message.parts:
            if len(part.ring) % 8 or not (
                len(part.ring) == len(part.chunks) == 2 * len(part.slots)
            ):
                raise ProtocolError("a job's `ring`, `chunks` and `slots` differ in length")
    elif isinstance(message, messages.Register):
        for allocation in message.allocations:
            if len(allocation.handle) not in (0, 64):
                raise ProtocolError(
                    f"`handle` of {len(allocation.handle)} bytes; a CUDA IPC handle has 64"
                )
        if message.rank >= message.world_size:
            raise ProtocolError(f"`rank` {message.rank} in a world of {message.world_size}")
        names = [pool.name for pool in message.pools]
        if len(set(names)) != len(names):
            raise ProtocolError(f"`pools` names one pool twice: {names}")
        buffers = sum(len(pool.buffers) for pool in message.pools)
        if buffers > limits.MAX_BUFFERS_OF_RANK:
            raise ProtocolError(
                f"`pools` have {buffers} buffers; a rank has {limits.MAX_BUFFERS_OF_RANK} at most"
            )


def _check_columns(message: messages.Flush) -> None:
    """Every row is whole, and names keys that are there."""
    for name in ("parts", "parents"):
        _check_rows(message, name, len(message.seqs), "seqs")
    parts = sum(message.parts)
    for name in ("pools", "pages", "ring", "first"):
        _check_rows(message, name, parts, "parts")
    for length in set(map(len, filter(None, message.parents))):
        if length != limits.KEY_BYTES:
            raise ProtocolError(f"key of {length} bytes in `parents`; a key has {limits.KEY_BYTES}")
    keys = _check_whole(message.keys) + _check_whole(message.digits)
    if message.keys and message.digits:
        raise ProtocolError("`keys` and `digits`: a flush has one of them")
    # Parts may share keys, so these do not bound what a message makes the daemon do.
    pages = sum(message.pages)
    if pages > limits.MAX_PAGES_PER_MESSAGE:
        raise ProtocolError(
            f"`pages` come to {pages}; a message has {limits.MAX_PAGES_PER_MESSAGE} at most"
        )
    end = max(map(add, message.first, message.pages), default=0)
    if end > keys:
        raise ProtocolError(f"`first` and `pages` name key {end - 1}; `keys` has {keys}")


def _check_rows(message: messages.Flush, name: str, rows: int, of: str) -> None:
    found = len(getattr(message, name))
    if found != rows:
        raise ProtocolError(f"`{name}` has {found} rows; `{of}` names {rows}")


def _check_whole(keys: bytes | str) -> int:
    """Returns: how many they are."""
    if isinstance(keys, str):
        name, size, what = "digits", 2 * limits.KEY_BYTES, "characters"
    else:
        name, size, what = "keys", limits.KEY_BYTES, "bytes"
    if len(keys) % size:
        raise ProtocolError(f"`{name}` has {len(keys)} {what}; a key has {size}")
    return len(keys) // size


def _check_keys(blob: bytes, pages: int) -> None:
    if len(blob) != pages * limits.KEY_BYTES:
        raise ProtocolError(
            f"`keys` has {len(blob)} bytes; {pages} pages need {pages * limits.KEY_BYTES} "
            f"({limits.KEY_BYTES} a key)"
        )


def frame(data: bytes, fds: int = 0) -> bytes:
    """One frame of a stream socket: little-endian uint32 length and uint32 number of file
    descriptors that were sent beside it, then the message."""
    return _HEADER.pack(len(data), fds) + data


class Frames:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes | memoryview) -> None:
        """The next bytes of the stream."""
        self._buffer += data

    @property
    def ready(self) -> bool:
        """Has `pop` something to say?"""
        buffer = self._buffer
        if len(buffer) < _HEADER.size:
            return False
        length, fds = _HEADER.unpack_from(buffer)
        over = length > limits.MAX_MESSAGE_BYTES or fds > limits.MAX_FDS
        return bool(over or len(buffer) >= _HEADER.size + length)

    def pop(self) -> tuple[bytes, int] | None:
        """The next frame: its payload, and how many descriptors belong to it. None: it has not
        come as a whole.

        Raises: OutOfStepError: it announces more than the limit.
        """
        buffer = self._buffer
        if len(buffer) < _HEADER.size:
            return None
        length, fds = _HEADER.unpack_from(buffer)
        if length > limits.MAX_MESSAGE_BYTES:
            raise OutOfStepError(
                f"frame of {length} bytes is over the limit of {limits.MAX_MESSAGE_BYTES}"
            )
        if fds > limits.MAX_FDS:
            raise OutOfStepError(f"frame with {fds} descriptors; the limit is {limits.MAX_FDS}")
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        payload = bytes(buffer[_HEADER.size : end])
        del buffer[:end]
        return payload, fds

    @property
    def pending(self) -> int:
        """Bytes that have not been popped."""
        return len(self._buffer)


FROM_LIFELINE: Decoder[messages.FromLifeline] = Decoder(messages.FromLifeline, handshake=True)
TO_LIFELINE: Decoder[messages.ToLifeline] = Decoder(messages.ToLifeline)
FROM_CLIENT: Decoder[messages.FromClient] = Decoder(messages.FromClient)
TO_CLIENT: Decoder[messages.ToClient] = Decoder(messages.ToClient)
TO_COPIER: Decoder[messages.ToCopier] = Decoder(messages.ToCopier)
FROM_COPIER: Decoder[messages.FromCopier] = Decoder(messages.FromCopier)
