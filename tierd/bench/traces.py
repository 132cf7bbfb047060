"""Access traces: requests as chains of pages, from a file of block-hash chains."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tierd.wire.errors import ConfigError

Chain = list[int]
"""The pages of a request in order, by number: a page's number names all that comes before it."""


@dataclass
class Trace:
    """Requests in the order in which they arrive.

    Every page counts as `page_tokens` tokens, a last one that is not full included.
    """

    name: str
    page_tokens: int
    requests: list[Chain] = field(default_factory=list)
    pages: int = 0
    """How many different pages there are; their numbers are 0 .. pages - 1."""


@dataclass(frozen=True)
class Access:
    """One request as a host tier sees it.

    `gpu_hits`: how many pages at its beginning were still on the GPU. `left`: the pages that are
    not on the GPU any more once it is done, each after those that follow it.
    """

    chain: Chain
    gpu_hits: int
    left: Chain


class TraceBuilder:
    """Numbers pages by their whole prefix: one block after two different beginnings is two pages,
    as with an engine's chained hashes."""

    def __init__(self, name: str, page_tokens: int) -> None:
        self._trace = Trace(name, page_tokens)
        self._numbers: dict[tuple[int, int | str], int] = {}

    def add(self, blocks: Iterable[int | str]) -> None:
        """Append a request, given as the hashes of its blocks."""
        chain: Chain = []
        before = -1
        for block in blocks:
            before = self._numbers.setdefault((before, block), len(self._numbers))
            chain.append(before)
        self._trace.requests.append(chain)

    def build(self) -> Trace:
        """The trace of what was added; more may follow."""
        self._trace.pages = len(self._numbers)
        return self._trace


class _Line(msgspec.Struct):
    """What is read of a line; other keys are ignored."""

    hash_ids: list[int | str]
    timestamp: float | None = None


def read_trace(path: Path, page_tokens: int) -> Trace:
    """Read one JSON object a line with `hash_ids`, as in the public Mooncake traces; a name that
    ends in .gz is decompressed. Requests are ordered by `timestamp` where every line has one.

    Raises: ConfigError: the file cannot be read, or a line is not such an object; names the line.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise ConfigError(f"--trace {path}: {error}; give a readable JSONL file") from None
    decoder = msgspec.json.Decoder(_Line)
    lines: list[_Line] = []
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            lines.append(decoder.decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f'{path}, line {number}: {error}; each line is {{"hash_ids": [1, 2, ...]}}'
            ) from None
    if not any(line.hash_ids for line in lines):
        raise ConfigError(f"{path}: no line has a block, there is nothing to replay")
    return _ordered(path.name, page_tokens, lines)


def _ordered(name: str, page_tokens: int, lines: Sequence[_Line]) -> Trace:
    stamps = [line.timestamp for line in lines]
    order = list(range(len(lines)))
    if None not in stamps:
        order.sort(key=lambda i: stamps[i] or 0.0)
    builder = TraceBuilder(name, page_tokens)
    for i in order:
        builder.add(lines[i].hash_ids)
    return builder.build()
