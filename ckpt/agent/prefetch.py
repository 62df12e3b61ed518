"""Copies a step from a far tier to the near tiers of a node before the trainer starts.

No step is removed to make room. A tier whose owner is alive gets no step, because the retention of
that job would not take the step into account. The process that copies may be killed at any
instruction. The data files that it has completed stay, and the next prefetch does not copy them
again.

The *owner* of a root is the job that may write to it. A ``TieredReader`` reads each chunk from the
first source that has it intact. A *fragment* is the record of what one rank has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ckpt.catalog.inventory import Inventory
from ckpt.catalog.rollbacks import copy_rollbacks
from ckpt.catalog.step_listing import committed, list_root, own_objects
from ckpt.catalog.tiered_reader import TieredReader
from ckpt.catalog.transfer import fetch_step, has_codec
from ckpt.catalog.verify import OnProgress, StepFolder
from ckpt.errors import OutOfSpace, RootInUse
from ckpt.model.keys import StepRef
from ckpt.model.manifest import Manifest
from ckpt.model.readable import size
from ckpt.pipeline.workers import Workers
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.api import HasSpace, StorageBackend
from ckpt.storage.tiers import OpenTier


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """The result of a prefetch for one tier.

    Attributes:
        tier: The URL of the tier.
        ref: The step that the tier has now: the requested step, or a later step that the tier had
            before, so that nothing was copied.
        nbytes: The size of the step's data files on the tier; 0 if the step was there before.
        copied_bytes: How many of these bytes were copied by this call.
        seconds: How long the copy took; 0 if the step was there before.
    """

    tier: str
    ref: StepRef
    nbytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0


def prefetch(
    source: StorageBackend,
    near: Sequence[OpenTier],
    ref: StepRef,
    workers: Workers,
    *,
    latest: bool = False,
    on_progress: OnProgress | None = None,
) -> list[PrefetchResult]:
    """Copy the step ``ref``, which is a checkpoint on ``source``, to each tier of ``near``.

    Args:
        source: The store that has the step.
        near: The tiers that get the step, nearest first. None of them is in memory.
        ref: The step.
        workers: The threads that copy.
        latest: Whether to copy nothing to a tier that has a later step, since a restore of the
            latest step does not read ``ref`` then.
        on_progress: Called as bytes are copied.

    Returns:
        The result for each tier, in the order of ``near``.

    Raises:
        RootInUse: The owner of a tier is alive, or another job has taken the root meanwhile.
        OutOfSpace: A tier has no room for the step, or has filled up during the copy.
        IntegrityError: The step is damaged on ``source``, and intact on no nearer tier.
        StorageError: A store has failed.
    """
    results: list[PrefetchResult] = []
    sources = [source]
    for tier in near:
        copy_rollbacks(source, tier.backend)  # So that no abandoned step is the newest there
        refs = committed(tier.backend)
        branch = set(list_root(tier.backend).on_branch)
        newest = max(branch.intersection(refs), default=ref)
        if ref in refs or (latest and newest > ref):
            results.append(PrefetchResult(tier=tier.url, ref=ref if ref in refs else newest))
        else:
            results.append(_copy_step(tier, ref, sources, workers, on_progress))
        if results[-1].ref == ref:
            sources.insert(len(sources) - 1, tier.backend)  # Before ``source``, the farthest
    return results


def _copy_step(
    tier: OpenTier,
    ref: StepRef,
    sources: Sequence[StorageBackend],
    workers: Workers,
    on_progress: OnProgress | None,
) -> PrefetchResult:
    """Copy a step to one tier. Each chunk comes from the first of ``sources`` that has it intact.
    Raises the errors of ``prefetch``.
    """
    owner = read_owner(tier.backend)
    _check_owner(tier, owner)
    folder = StepFolder(tier.backend, ref, workers)
    origin = TieredReader(sources, ref, retry=folder.retry)
    # The manifest with all fragments, which describe the files of the ranks
    source_manifest = origin.try_manifests(lambda manifest: origin.with_fragments(manifest, None))
    _check_room(tier, source_manifest.manifest, ref)
    report = fetch_step(
        sources,
        folder,
        on_progress=on_progress,
        codec=tier.tier.codec,
        confirm=partial(_check_owner, tier, owner),
    )
    return PrefetchResult(
        tier=tier.url,
        ref=ref,
        nbytes=report.nbytes,
        copied_bytes=report.copied_bytes,
        seconds=report.seconds,
    )


def _check_owner(tier: OpenTier, earlier_owner: Owner | None) -> None:
    """Raise ``RootInUse`` if the root has an owner that is alive or is not ``earlier_owner``."""
    owner = read_owner(tier.backend)
    if owner is not None and (
        owner.alive or earlier_owner is None or owner.attempt != earlier_owner.attempt
    ):
        raise RootInUse(tier.url, str(owner), is_same_process=owner.is_in_this_process)


def _check_room(tier: OpenTier, manifest: Manifest, ref: StepRef) -> None:
    """Raise ``OutOfSpace`` if a step does not fit on ``tier``. If the tier has another codec than
    the source, the size of the copy is not known yet, so the size without a codec counts.
    """
    backend, capacity = tier.backend, tier.tier.capacity_bytes
    is_alike = has_codec(manifest, tier.tier.codec)
    present_bytes = sum(info.size for info in own_objects(backend, ref))
    demand = (manifest.stored_bytes if is_alike else manifest.nbytes) - present_bytes
    remedy = "remove steps there, or name another tier"
    if capacity is not None:
        used_bytes = sum(step.nbytes for step in Inventory(backend).look())
        if used_bytes + demand > capacity:
            raise OutOfSpace(
                ref.folder,
                f"{tier.url} has {size(used_bytes)} of its capacity of {size(capacity)}, and the "
                f"step needs {size(demand)} more: {remedy}",
            )
    if isinstance(backend, HasSpace) and (free := backend.free_bytes()) < demand:
        raise OutOfSpace(
            ref.folder,
            f"{tier.url} has {size(free)} free, and the step needs {size(demand)}: {remedy}",
        )
