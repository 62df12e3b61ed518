"""A tier that is open: where it is and the backend that reaches it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.config import MEMORY, NO_CODEC, Tier
from ckpt.errors import ConfigError
from ckpt.model.checksum import checksum
from ckpt.storage.api import Adopting, StorageBackend
from ckpt.storage.registry import open_backend


@dataclass(frozen=True, slots=True)
class OpenTier:
    """``index`` counts from the nearest."""

    index: int
    tier: Tier
    backend: StorageBackend

    @property
    def url(self) -> str:
        """Without credentials."""
        return self.backend.url

    @property
    def required(self) -> bool:
        """Whether a save that does not get there has failed."""
        return not self.in_memory if self.tier.required is None else self.tier.required

    @property
    def in_memory(self) -> bool:
        """Whether images stay there where they are staged."""
        return isinstance(self.backend, Adopting)

    def takes(self, step: int) -> bool:
        """Whether ``step`` goes there."""
        return step % self.tier.every == 0


def as_tiers(
    given: str | os.PathLike[str] | Tier | Sequence[str | os.PathLike[str] | Tier],
) -> tuple[Tier, ...]:
    """What a user gave, as tiers. Raises ``ConfigError`` for what is none."""
    if not isinstance(given, str | os.PathLike | Tier | Sequence):
        raise ConfigError(
            f"{given!r} is no place for checkpoints: give a folder, a URL, a Tier, or a list of these"
        )
    items = [given] if isinstance(given, str | os.PathLike | Tier) else list(given)
    return tuple(item if isinstance(item, Tier) else Tier(os.fspath(item)) for item in items)


def open_tiers(tiers: Sequence[Tier]) -> tuple[OpenTier, ...]:
    """Open all, or none.

    Raises:
        ConfigError: There is none, or one is named twice.
    """
    if not tiers:
        raise ConfigError("a manager needs at least one tier: a folder or a URL")
    opened: list[OpenTier] = []
    try:
        for index, tier in enumerate(tiers):
            url = _memory_of(tiers[index + 1 :]) if tier.url == MEMORY else tier.url
            opened.append(OpenTier(index, tier, open_backend(url, tier.options)))
            urls = [other.url for other in opened]
            if urls.count(urls[-1]) > 1:
                raise ConfigError(f"the tier {urls[-1]} is named twice")
            if isinstance(opened[-1].backend, Adopting) and tier.keep_last is not None:
                raise ConfigError(f"{urls[-1]} keeps what its slots hold: leave keep_last out")
            if isinstance(opened[-1].backend, Adopting) and tier.codec != NO_CODEC:
                raise ConfigError(f"{urls[-1]} keeps images where they are staged: leave codec out")
            durable = any(not isinstance(other.backend, Adopting) for other in opened[:-1])
            if isinstance(opened[-1].backend, Adopting) and durable:
                raise ConfigError(f"{urls[-1]} is memory: put it before the tiers that are farther away")
    except BaseException:
        for done in opened:
            done.backend.close()
        raise
    return tuple(opened)


def _memory_of(farther: Sequence[Tier]) -> str:
    """The store in memory that belongs to the next tier: a restarted job finds it by that, whatever its process or run is called."""
    if not farther:
        raise ConfigError(
            'the tier "memory" belongs to the tier after it: name one, or give the memory a name of its own, "shm://NAME"'
        )
    url = farther[0].url
    place = url if "://" in url or "::" in url else os.path.realpath(os.path.expanduser(url))
    return f"shm://{checksum(place.encode())[:16]}"
