"""A tier that is open: where it is and the backend that reaches it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.config import Tier
from ckpt.errors import ConfigError
from ckpt.storage.api import StorageBackend
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
            opened.append(OpenTier(index, tier, open_backend(tier.url, tier.options)))
            urls = [other.url for other in opened]
            if urls.count(urls[-1]) > 1:
                raise ConfigError(f"the tier {urls[-1]} is named twice")
    except BaseException:
        for done in opened:
            done.backend.close()
        raise
    return tuple(opened)
