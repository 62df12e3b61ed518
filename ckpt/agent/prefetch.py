"""Puts a step of a far tier into the near tiers of a node before its trainer starts.

Nothing is removed to make room, and a tier whose job is alive is left alone: its retention would
not know the step. Any process may be killed here at any moment. What was copied stays, and the next
call continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ckpt.catalog.index import committed, own_objects, read_manifest
from ckpt.catalog.inventory import Inventory
from ckpt.catalog.transfer import fetch_step, has_codec
from ckpt.catalog.verify import OnProgress, StepFolder
from ckpt.coordination.owner import Owner, read_owner
from ckpt.errors import OutOfSpace, RootInUse
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest
from ckpt.model.readable import size
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import HasSpace, StorageBackend
from ckpt.storage.tiers import OpenTier


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """What became of one tier.

    Attributes:
        ref: The step that is there now.
        nbytes: The size of its data files there; 0 if nothing was copied.
        copied_bytes: How many of them were not there before.
    """

    tier: str
    ref: StepRef
    nbytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0


def prefetch(
    far: StorageBackend,
    near: Sequence[OpenTier],
    ref: StepRef,
    workers: Workers,
    *,
    latest: bool = False,
    on_progress: OnProgress | None = None,
) -> list[Prefetched]:
    """Make ``ref``, a checkpoint of ``far``, one of each tier of ``near``.

    Args:
        near: The tiers, nearest first. None of them is in memory.
        latest: Leave a tier alone that has a later step, since a restore takes that one.

    Raises:
        RootInUse: The job of a tier is alive. It has what it needs.
        OutOfSpace: A tier has no room. Nothing was copied there.
        IntegrityError: The step is damaged on ``far``.
        StorageError: A store has failed.
    """
    done: list[Prefetched] = []
    sources = [far]
    for tier in near:
        there = committed(tier.backend)  # the newest first
        if ref in there or (latest and there and there[0] > ref):
            done.append(Prefetched(tier=tier.url, ref=ref if ref in there else there[0]))
        else:
            done.append(_fill(tier, ref, sources, workers, on_progress))
        if done[-1].ref == ref:
            sources.insert(len(sources) - 1, tier.backend)
    return done


def _fill(
    tier: OpenTier,
    ref: StepRef,
    sources: Sequence[StorageBackend],
    workers: Workers,
    on_progress: OnProgress | None,
) -> Prefetched:
    owner = read_owner(tier.backend)
    _check_owner(tier, owner)
    _check_room(tier, read_manifest(sources[0], ref), ref)
    report = fetch_step(
        sources,
        StepFolder(tier.backend, ref, workers),
        on_progress=on_progress,
        codec=tier.tier.codec,
        confirm=partial(_check_owner, tier, owner),
    )
    return Prefetched(
        tier=tier.url,
        ref=ref,
        nbytes=report.nbytes,
        copied_bytes=report.copied_bytes,
        seconds=report.seconds,
    )


def _check_owner(tier: OpenTier, before: Owner | None) -> None:
    """Raise ``RootInUse`` if a job has taken the root, or lives."""
    owner = read_owner(tier.backend)
    if owner is not None and (owner.alive or before is None or owner.attempt != before.attempt):
        raise RootInUse(tier.url, str(owner), here=owner.here_too)


def _check_room(tier: OpenTier, manifest: Manifest, ref: StepRef) -> None:
    """Raise ``OutOfSpace`` if a step does not fit, as far as that can be known before."""
    backend, capacity = tier.backend, tier.tier.capacity_bytes
    alike = has_codec(manifest, tier.tier.codec)
    there = sum(info.size for info in own_objects(backend, ref))
    needed = (manifest.stored_bytes if alike else manifest.nbytes) - there
    ways = "remove steps there, or name another tier"
    if capacity is not None:
        used = sum(held.nbytes for held in Inventory(backend).look())
        if used + needed > capacity:
            raise OutOfSpace(
                ref.folder,
                f"{tier.url} has {size(used)} of its capacity of {size(capacity)}, and the step "
                f"needs {size(needed)} more: {ways}",
            )
    if isinstance(backend, HasSpace) and (free := backend.free_bytes()) < needed:
        raise OutOfSpace(
            ref.folder,
            f"{tier.url} has {size(free)} free, and the step needs {size(needed)}: {ways}",
        )
