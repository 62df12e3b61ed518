"""What looking through several stores for one step gives: its manifest, and what was not where it should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt.model.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A store should have had this intact, and had not: it was asked of the next.

    Attributes:
        tier: URL of the store.
        key: The file; empty if the store did not answer at all.
        reason: What was wrong first.
        nbytes: How much of the file was asked of the next; of a manifest or fragment, 0.
        mended: Whether the file is whole there again.
    """

    tier: str
    key: str
    reason: str
    nbytes: int
    mended: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A manifest, the very bytes it was read from, and the position of the source."""

    position: int
    manifest: Manifest
    packed: bytes


OnRepair = Callable[[Repair], None]
"""Told once for each file and store, when it is met first; from several threads, one call at a time."""
