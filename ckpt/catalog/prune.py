"""Removing what a tier need not keep: manifests first, so that nothing torn is ever listed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from ckpt.catalog.index import attempts, is_committed
from ckpt.errors import IntegrityError, ObjectNotFound
from ckpt.model.encoding import MAX_RECORD_BYTES, unpack
from ckpt.model.layout import StepRef, is_file_name
from ckpt.model.manifest import Fragment
from ckpt.plan.retention import Retention, doomed
from ckpt.storage.api import StorageBackend, read_object

GRACE_SECONDS: Final = 24 * 3600.0
"""What was begun later than this ago, and never committed, is left alone: somebody may still commit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was removed, or would be. ``committed`` tells a checkpoint from the remains of a save that failed."""

    ref: StepRef
    nbytes: int
    committed: bool


def prune(
    backend: StorageBackend,
    rule: Retention,
    *,
    own: str = "",
    dry_run: bool = False,
    grace_seconds: float = GRACE_SECONDS,
    undated: bool = False,
    protected: Callable[[], frozenset[StepRef]] = frozenset,
    on_pruned: Callable[[Pruned], None] = lambda _: None,
) -> list[Pruned]:
    """Apply ``rule``, and clear away what failed saves have left. Only files in folders of steps are touched, and only those named as ours.

    Cut at any moment it leaves whole checkpoints and remains that the next call removes.

    Args:
        own: The running attempt; nothing uncommitted of it is touched.
        grace_seconds: Age from which an uncommitted step counts as the remains of a failed save, by the youngest of its fragments.
        protected: Asked after the steps were listed: those that stay whatever the rule.
        undated: Whether those without a fragment count as such too: nobody can ever commit them, but somebody may still be writing.
    """
    everything = attempts(backend)
    whole = [ref for ref in everything if is_committed(backend, ref)]
    going = dict.fromkeys(doomed(whole, rule, own=own), True)
    for ref in protected():
        going.pop(ref, None)
    for ref in set(everything) - set(whole):
        if not (own and ref.attempt.startswith(own)):
            begun = _begun(backend, ref)
            if undated if begun is None else time.time() - begun > grace_seconds:
                going[ref] = False
    found: list[Pruned] = []
    for ref in sorted(going):
        found.append(Pruned(ref=ref, nbytes=_remove(backend, ref, dry_run=dry_run), committed=going[ref]))
        on_pruned(found[-1])
    return found


def _remove(backend: StorageBackend, ref: StepRef, *, dry_run: bool) -> int:
    objects = [
        info
        for info in backend.list(f"{ref.folder}/")
        if is_file_name(info.key.removeprefix(f"{ref.folder}/"))
    ]
    if not dry_run:
        backend.delete(ref.manifest)
        for info in objects:
            backend.delete(info.key)
    return sum(info.size for info in objects)


def _begun(backend: StorageBackend, ref: StepRef) -> float | None:
    """When the youngest of its fragments was made; None if there is none that can be read."""
    times: list[float] = []
    for info in backend.list(f"{ref.folder}/"):
        if info.key.endswith(".json") and is_file_name(info.key.removeprefix(f"{ref.folder}/")):
            with suppress(ObjectNotFound, IntegrityError):
                data = read_object(backend, info.key, limit=MAX_RECORD_BYTES)
                times.append(unpack(data, Fragment, key=info.key).created_at)
    return max(times, default=None)
