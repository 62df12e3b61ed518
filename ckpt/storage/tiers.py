"""A tier that is open: where it is and the backend that reaches it."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.codec.registry import NO_CODEC
from ckpt.config import MEMORY, Tier
from ckpt.errors import ConfigError
from ckpt.model.checksum import checksum
from ckpt.storage.api import Adopting, StorageBackend
from ckpt.storage.places import is_folder, is_object_store, relation
from ckpt.storage.registry import open_backend

if TYPE_CHECKING:  # Commands that list tiers do not pay for the import of ssl
    from ckpt.tls import Encryption

Tiers = str | os.PathLike[str] | Tier | Sequence[str | os.PathLike[str] | Tier]
"""A folder or URL, a `Tier`, or several of these, nearest first."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes that share a local tier.

    ``of`` gives for each rank the number of its node. Nodes are numbered by their lowest ranks.
    ``encryption`` is that of their connections, if they are encrypted.
    """

    of: tuple[int, ...]
    encryption: Encryption | None = field(default=None, compare=False, repr=False)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The lowest rank of each node: it does what is done once for each."""
        return tuple(self.of.index(node) for node in range(max(self.of) + 1))

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the node of ``rank``, in ascending order, including ``rank``."""
        return tuple(other for other, node in enumerate(self.of) if node == self.of[rank])


@dataclass(frozen=True, slots=True)
class OpenTier:
    """``index`` counts from the nearest. ``nodes``: if it is local, and the job runs on several."""

    index: int
    tier: Tier
    backend: StorageBackend
    nodes: Nodes | None = None

    @property
    def url(self) -> str:
        """The URL without credentials."""
        return self.backend.url

    @property
    def required(self) -> bool:
        """Whether a save fails if it does not reach this tier."""
        return not self.in_memory if self.tier.required is None else self.tier.required

    @property
    def in_memory(self) -> bool:
        """Whether images stay in the memory in which they are staged."""
        return isinstance(self.backend, Adopting)

    @property
    def local(self) -> bool:
        """Whether the tier is private to a node."""
        return self.in_memory or self.tier.local is True

    def takes(self, step: int) -> bool:
        """Return True if ``step`` goes to this tier."""
        return step % self.tier.every == 0


def as_tiers(
    given: Tiers,
) -> tuple[Tier, ...]:
    """Return the tiers that a user gave. Raises ``ConfigError`` for a value that is no tier."""
    items: list[object] = (
        list(given)
        if isinstance(given, Sequence) and not isinstance(given, str | bytes)
        else [given]
    )
    return tuple(_as_tier(item) for item in items)


def _as_tier(given: object) -> Tier:
    if isinstance(given, str | os.PathLike):
        return Tier(os.fspath(given))
    if isinstance(given, Tier):
        return given
    # Name the type alone, since a dict may hold secrets.
    raise ConfigError(
        f"a {type(given).__name__} is not a place for checkpoints: give a folder, a URL, a Tier, "
        "or a list of these"
    )


def open_tiers(tiers: Sequence[Tier]) -> tuple[OpenTier, ...]:
    """Open all tiers, or none of them.

    Raises:
        ConfigError: There is no tier, two tiers are the same place, or one is inside of another.
    """
    if not tiers:
        raise ConfigError("a manager needs at least one tier: a folder or a URL")
    if [tier.url for tier in tiers].count(MEMORY) > 1:
        raise ConfigError('the tier "memory" is named twice: this machine has one')
    opened: list[OpenTier] = []
    with closed_on_error(opened):
        for index, (tier, url) in enumerate(zip(tiers, urls_of(tiers), strict=True)):
            opened.append(OpenTier(index, tier, open_backend(url, tier.options)))
            for other in opened[:-1]:
                _check_apart(other, opened[-1])
            if opened[-1].in_memory:
                _check_memory(opened[-1], opened[:-1])
            elif opened[-1].local and is_object_store(url):
                raise ConfigError(f"{opened[-1].url} is seen by all nodes: leave local out")
    return tuple(opened)


@contextmanager
def closed_on_error(tiers: Sequence[OpenTier]) -> Generator[None]:
    """Close the backends of ``tiers`` if the block raises."""
    try:
        yield
    except BaseException:
        for tier in tiers:
            tier.backend.close()
        raise


def urls_of(tiers: Sequence[Tier]) -> list[str]:
    """Return the URL of each tier; "memory" becomes the URL of the store that it stands for."""
    return [
        _memory_of(tiers[index + 1 :]) if tier.url == MEMORY else tier.url
        for index, tier in enumerate(tiers)
    ]


def _memory_of(farther: Sequence[Tier]) -> str:
    """Return the URL of the store in memory that belongs to the next tier. A restarted job finds it
    by that tier, whatever its process or run is called.
    """
    if not farther:
        raise ConfigError(
            'the tier "memory" belongs to the tier after it: name one, or give the memory a name '
            'of its own, "shm://NAME"'
        )
    url = farther[0].url
    place = url if "://" in url or "::" in url else os.path.realpath(os.path.expanduser(url))
    return f"shm://{checksum(place.encode())[:16]}"


def _check_memory(memory: OpenTier, nearer: Sequence[OpenTier]) -> None:
    for name in ("keep_last", "capacity"):
        if getattr(memory.tier, name) is not None:
            raise ConfigError(f"{memory.url} keeps what its slots hold: leave {name} out")
    if memory.tier.local is False:
        raise ConfigError(f"{memory.url} is each node's own: leave local out")
    if memory.tier.codec != NO_CODEC:
        raise ConfigError(f"{memory.url} keeps images where they are staged: leave codec out")
    if any(not other.in_memory for other in nearer):
        raise ConfigError(f"{memory.url} is memory: put it before the tiers that are farther away")


def _check_apart(one: OpenTier, two: OpenTier) -> None:
    """Refuse two tiers that are one place: each would take the other's files for its own."""
    if _endpoint(one) != _endpoint(two):
        return
    how = relation(one.url, two.url)
    if how == "same":
        spelled = f", once as {one.url}" if one.url != two.url else ""
        raise ConfigError(f"the tier {two.url} is named twice{spelled}")
    if how != "apart":
        inner, outer = (one, two) if how == "inside" else (two, one)
        raise ConfigError(
            f"the tier {inner.url} is inside of the tier {outer.url}: give each a root of its "
            "own, such as two folders side by side"
        )


def _endpoint(tier: OpenTier) -> str:
    """Return the server of an object store, if an option names it."""
    return "" if is_folder(tier.url) else str(tier.tier.options.get("endpoint_url", ""))
