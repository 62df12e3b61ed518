"""The commit protocol: when is a save a checkpoint?

Each rank, once its file and its fragment are durable, tells ``Durable``; one that cannot tells ``Failed``. The leader hears all words, merges the
fragments, puts the manifest if absent, and decides. Everyone else waits for the verdict. Nothing here is a collective, every wait is bounded, and errors name ranks.

``CommitMachine`` is the leader's part as a pure machine: event in, action out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ckpt.model.manifest import FragmentRef


class Durable(msgspec.Struct, frozen=True, tag="durable"):
    """This rank's file and fragment are on the tier."""

    fragment: FragmentRef


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """This rank has no part to give."""

    reason: str


Word = Durable | Failed


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """The manifest is there; ``checksum`` of its bytes."""

    checksum: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """There will be no manifest. ``failures`` by rank where ranks failed, else ``reason``."""

    reason: str
    failures: dict[int, str]
    kind: str = "CommitError"
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The manifest was sent, and what became of it cannot be seen. Nobody may remove anything."""

    reason: str


Verdict = Committed | Refused | Unknown

_word: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Word)
_verdict: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Verdict)


def encode(message: Word | Verdict) -> bytes:
    return msgspec.json.encode(message)


def decode_word(data: bytes) -> Word:
    word: Word = _word.decode(data)
    return word


def decode_verdict(data: bytes) -> Verdict:
    verdict: Verdict = _verdict.decode(data)
    return verdict


@dataclass(frozen=True, slots=True)
class Heard:
    """Event: a rank's word came. May come twice; the first counts."""

    rank: int
    word: Word


@dataclass(frozen=True, slots=True)
class TimedOut:
    """Event: the bound on waiting has passed."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Action: all fragments are durable; merge them and put the manifest."""

    fragments: tuple[FragmentRef, ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Action: decide against it. ``missing`` ranks were not heard of."""

    failures: dict[int, str]
    missing: tuple[int, ...]


@dataclass(slots=True)
class CommitMachine:
    """The leader's view of one save. Gives at most one action, after which it is done."""

    world: Iterable[int]
    missing: set[int] = field(init=False)
    done: bool = field(init=False, default=False)
    _durable: dict[int, FragmentRef] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.missing = set(self.world)

    def handle(self, event: Heard | TimedOut) -> Merge | Refuse | None:
        """The action that follows from ``event``, if any."""
        if self.done:
            return None
        if isinstance(event, TimedOut):
            return self._refuse({})
        if event.rank not in self.missing:
            return None
        if isinstance(event.word, Failed):
            return self._refuse({event.rank: event.word.reason})
        self.missing.discard(event.rank)
        self._durable[event.rank] = event.word.fragment
        if self.missing:
            return None
        self.done = True
        return Merge(tuple(self._durable[rank] for rank in sorted(self._durable)))

    def _refuse(self, failures: dict[int, str]) -> Refuse:
        self.done = True
        return Refuse(failures, tuple(sorted(self.missing - failures.keys())))
