"""Conversations that grow turn by turn and come back, as keys of KV pages. Pure and seeded: every
rank of a group draws the same ones."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

KEY_BYTES = 32


@dataclass(frozen=True)
class Shape:
    """How many conversations are alive at once, and how many pages they have.

    Every conversation starts with one of `system_prompts` shared prefixes. One that would outgrow
    `max_pages` ends, and a new one takes its place.
    """

    conversations: int
    system_prompts: int
    system_pages: int
    first_pages: tuple[int, int]
    turn_pages: tuple[int, int]
    max_pages: int
    batch: int


@dataclass(frozen=True)
class Request:
    """One turn of one conversation: the keys of its whole prompt, first page first.

    The last `new` pages have never been computed before.
    """

    rid: str
    keys: Sequence[bytes]
    new: int


@dataclass
class _Conversation:
    name: str
    keys: list[bytes] = field(default_factory=list)


class Workload:
    """An endless, seeded sequence of batches.

    Some conversations come back far more often than others, as people do; without that, a cache
    smaller than the working set would never be hit.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self._started = 0
        self._turns = 0
        self._prompts = [
            chain(b"", f"system {i}", shape.system_pages) for i in range(shape.system_prompts)
        ]
        self._seen: set[bytes] = set()
        self._alive = [self._start() for _ in range(shape.conversations)]

    @property
    def pages(self) -> int:
        """Distinct pages asked for so far."""
        return len(self._seen)

    def next_batch(self) -> list[Request]:
        """The turns of the next step, each of another conversation."""
        weights = [1.0 / (1 + place) for place in range(len(self._alive))]
        places: list[int] = []
        while len(places) < min(self.shape.batch, len(self._alive)):
            (place,) = self._random.choices(range(len(self._alive)), weights)
            if place not in places:
                places.append(place)
        return [self._turn(place) for place in places]

    def _turn(self, place: int) -> Request:
        conversation, shape = self._alive[place], self.shape
        fresh = len(conversation.keys) <= shape.system_pages
        pages = self._random.randint(*(shape.first_pages if fresh else shape.turn_pages))
        if len(conversation.keys) + pages > shape.max_pages:
            conversation = self._alive[place] = self._start()
            pages = self._random.randint(*shape.first_pages)
        self._turns += 1
        conversation.keys += chain(
            conversation.keys[-1], f"{conversation.name}, turn {self._turns}", pages
        )
        new = sum(key not in self._seen for key in conversation.keys)
        self._seen.update(conversation.keys)
        return Request(f"turn-{self._turns}", tuple(conversation.keys), new)

    def _start(self) -> _Conversation:
        self._started += 1
        prompt = self._random.choice(self._prompts)
        return _Conversation(f"conversation {self._started}", list(prompt))


def chain(parent: bytes, text: str, pages: int) -> list[bytes]:
    """Keys of so many pages after `parent`, each hashed over the one before, as an engine does."""
    keys: list[bytes] = []
    for page in range(pages):
        parent = hashlib.sha256(parent + f"{text}, page {page}".encode()).digest()
        keys.append(parent)
    return keys
