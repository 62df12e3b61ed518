"""Removing what a tier need not keep: manifests first, so that nothing torn is ever listed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ckpt.catalog.index import attempts, own_objects, unfinished_of
from ckpt.catalog.inventory import Inventory, State, StoredStep
from ckpt.catalog.pins import is_pinned, remove_ended
from ckpt.coordination.claim_marker import (
    claim_committed_for_removal,
    claim_for_removal,
    is_removal_marker,
    release_marker,
    release_removal,
)
from ckpt.errors import OutOfSpace, StorageError, TransientStorageError
from ckpt.model.keys import StepRef, is_file_name, is_fragment, is_late_metrics, parse_folder
from ckpt.pipeline.retry import RetryPolicy
from ckpt.retention.claim import Claim, job_of
from ckpt.retention.guard import FixedGuard, StepGuard
from ckpt.retention.policy import Retention, reasons
from ckpt.storage.api import KeepsUnfinished, Rooted, StorageBackend, Unfinished

GRACE_SECONDS: Final = 24 * 3600.0
"""The remains of a save that are younger than this are left alone, since a process may still commit
them.
"""

_RETRY: Final = RetryPolicy()

YOUNG: Final = "less than a day old, and its job may still finish it"
NEEDED: Final = "a farther tier waits for it"
PINNED: Final = "pinned"
FOREIGN: Final = "another job's, committed after this one had taken the root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A step that was removed, or would be removed, and the state that it was in."""

    ref: StepRef
    nbytes: int
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One attempt and why it stays; without a reason it goes."""

    held: StoredStep
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneContext:
    """The job that prunes, and what is certain about the steps.

    Attributes:
        own: The running attempt. Its newest step stays whatever the numbers of other attempts.
        alive: Whether that attempt is known to run. Then its uncommitted steps stay until they are
            old, also where the store has no dates.
        grace_seconds: Age from which a step that is not whole counts as remains.
        undated: Whether a step without any date counts as remains, too.
        guard: The steps that stay whatever the rule. It is asked after the steps were listed.
        claim: The job's hold on the root. It is left out where a person decides.
    """

    own: str = ""
    alive: bool = True
    grace_seconds: float = GRACE_SECONDS
    undated: bool = False
    guard: StepGuard = field(default_factory=FixedGuard)
    claim: Claim | None = None


_NO_JOB: Final = PruneContext()


def judge(
    found: Sequence[StoredStep], rule: Retention, context: PruneContext = _NO_JOB
) -> list[Judged]:
    """Return what becomes of each of ``found``, in their order."""
    own, claim, grace_seconds = context.own, context.claim, context.grace_seconds
    metrics = {held.ref: held.metrics for held in found if held.state == "committed"}
    why = reasons(metrics, rule, metrics, own=own)
    needed = context.guard.protected()
    now = time.time()

    def kept(held: StoredStep) -> tuple[str, ...]:
        if held.ref in needed:
            return (*why.get(held.ref, ()), NEEDED)
        if held.pins:
            return (*why.get(held.ref, ()), PINNED)
        if held.state == "committed":
            foreign = claim is not None and not claim.may_remove(held.ref)
            return why[held.ref] or ((FOREIGN,) if foreign else ())
        if held.state == "unsupported":
            return ("written in another format",)
        if held.state == "damaged" and not metrics:
            return ("nothing here is whole",)
        if held.state == "incomplete" and held.is_cut:
            # A removal was cut off, or is under way.
            return ()
        if (
            held.state == "incomplete"
            and claim is not None
            and claim.is_dead(held.ref)
            and not held.is_part
        ):
            return ()
        if (
            context.alive
            and own
            and held.ref.attempt.startswith(own)
            and not _is_old(held, grace_seconds)
        ):
            return ("the running job's",)
        young = not context.undated if held.touched is None else now - held.touched <= grace_seconds
        in_use = held.objects or not all(cut.abandoned for cut in held.unfinished)
        return (YOUNG,) if young and in_use else ()

    return [Judged(held=held, kept=kept(held)) for held in found]


def _is_old(held: StoredStep, grace_seconds: float) -> bool:
    """Return True if no file of the step was put for ``grace_seconds``.

    A save under way puts files all the time.
    """
    return held.touched is not None and time.time() - held.touched > grace_seconds


def prune(
    backend: StorageBackend,
    rule: Retention,
    context: PruneContext = _NO_JOB,
    *,
    dry_run: bool = False,
    inventory: Inventory | None = None,
) -> list[Pruned]:
    """Apply ``rule``, and remove what failed saves have left.

    Checkpoints that have lost files are removed, too, unless the rule keeps everything. Only files
    in folders of steps are touched, and only those named as this package names them. Cut off at any
    moment, it leaves whole checkpoints, and remains that the next call removes.

    Args:
        backend: The store.
        rule: What to keep.
        context: The job that prunes.
        dry_run: Whether nothing is removed.
        inventory: Remembers the steps from call to call.

    Returns:
        What was removed, or would be.

    Raises:
        RootInUse: Another job has taken the root over.
        StorageError: A step could not be removed. The others were removed unless the store does not
            answer.
    """
    inventory = inventory or Inventory(backend)
    found = inventory.look(begun=rule.keeps_all)
    if not dry_run:
        remove_ended(backend, inventory.pins)
    return carry_out(backend, judge(found, rule, context), dry_run=dry_run, claim=context.claim)


def carry_out(
    backend: StorageBackend,
    judged: Sequence[Judged],
    *,
    dry_run: bool = False,
    claim: Claim | None = None,
) -> list[Pruned]:
    """Remove the steps that have no reason to stay, oldest first.

    Returns:
        What was removed, without empty folders, and without steps that a process finishes just now.

    Raises:
        RootInUse: Another job has taken the root over. Nothing was removed since.
        StorageError: A step could not be removed. The others were removed unless the store does not
            answer.
    """
    gone: list[StoredStep] = []
    failure: StorageError | None = None
    for held in sorted((one.held for one in judged if not one.kept), key=lambda held: held.ref):
        try:
            if dry_run or remove(backend, held, claim):
                gone.append(held)
        except TransientStorageError:
            raise
        except StorageError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return [
        Pruned(ref=held.ref, nbytes=held.nbytes, state=held.state) for held in gone if held.nbytes
    ]


def remove(backend: StorageBackend, held: StoredStep, claim: Claim | None = None) -> bool:
    """Remove one attempt, if ``claim`` still holds.

    The claim marker is put first. Then the manifest goes, then the files, and the marker last.

    A step that is pinned, or that another process finishes or copies there, stays. In a store with
    folders, an empty folder goes too, with the unfinished writes of a dead process in it. A removal
    that is cut off leaves a checkpoint, or remains that no process can make one again and that the
    next retention removes.

    Returns:
        Whether it is gone.

    Raises:
        RootInUse: The claim does not hold any more.
    """
    if claim is not None:
        _RETRY.call(claim.confirm_removal)
    marked = False
    if held.objects:
        try:
            if not (marked := _put_marker(backend, held)) or is_pinned(backend, held.ref):
                return False
        except OutOfSpace:
            # With no room for the marker, only checkpoints go, and data that no fragment describes.
            if held.state == "incomplete":
                if any(is_fragment(info.key.rpartition("/")[2]) for info in held.objects):
                    return False
            elif is_pinned(backend, held.ref):
                return False
            else:
                # Without the manifest there is room for the marker.
                backend.delete(held.ref.manifest)
                with suppress(OutOfSpace):
                    marked = claim_committed_for_removal(backend, held.ref)
    backend.delete(held.ref.manifest)
    for key in {*(info.key for info in held.objects), *_added_since(backend, held.ref, marked)}:
        if key != held.ref.claim_marker:
            backend.delete(key)
    discard(backend, _unfinished_in(backend, held))
    if marked:
        release_removal(backend, held.ref)
    return True


def _added_since(backend: StorageBackend, ref: StepRef, marked: bool) -> list[str]:
    """Return the keys of what may have come into a step since it was looked at: metrics, and, if
    the claim marker stands, copies of other nodes' files.
    """
    keys = [info.key for info in own_objects(backend, ref)]
    return [key for key in keys if marked or is_late_metrics(key.rpartition("/")[2])]


def _unfinished_in(backend: StorageBackend, held: StoredStep) -> Iterable[Unfinished]:
    """Return the unfinished writes in the folder of a step that is being removed.

    Those of a checkpoint were not listed with it. They keep a folder from being empty. A store
    without folders shows them to the job that takes the root.
    """
    listed = held.state != "committed" or not isinstance(backend, Rooted)
    return held.unfinished if listed else unfinished_of(backend, held.ref)


def _put_marker(backend: StorageBackend, held: StoredStep) -> bool:
    """Put the claim marker that lets no process finish ``held``. Returns whether it stands."""
    put = (
        claim_for_removal
        if held.state == "incomplete" and not held.is_cut
        else claim_committed_for_removal
    )
    # A finisher may have read the old marker, so the removal waits for a later call.
    if _is_abandoned(held):
        release_marker(backend, held.ref)
        put(backend, held.ref)
        return False
    return put(backend, held.ref)


def discard(backend: StorageBackend, found: Iterable[Unfinished]) -> None:
    """Free what unfinished writes take."""
    if isinstance(backend, KeepsUnfinished):
        for one in found:
            backend.discard(one)


def discard_left(backend: StorageBackend, claim: Claim) -> None:
    """Discard the unfinished writes of jobs that have ended.

    Of other jobs, those are discarded that belong to no folder and that no process can still
    continue.
    """
    if isinstance(backend, KeepsUnfinished):
        shown = attempts(backend)
        # In a store with folders, each write is in the folder of its step; others are not ours.
        prefixes = [f"{ref.folder}/" for ref in shown] if isinstance(backend, Rooted) else [""]
        for one in [one for prefix in prefixes for one in backend.unfinished(prefix)]:
            folder, _, name = one.key.partition("/")
            if (
                (ref := parse_folder(folder)) is None
                or not is_file_name(name)
                or job_of(ref) == claim.own
            ):
                continue
            if claim.is_dead(ref) or (one.abandoned and ref not in shown):
                _RETRY.call(claim.confirm_removal)
                backend.discard(one)


def sweep(
    backend: StorageBackend, claim: Claim, *, restored: StepRef | None = None, part: bool = False
) -> None:
    """Remove what earlier jobs have left in a store of which each job uses only its own steps.

    Args:
        restored: The step that this job goes on from, while it has no step of its own. It stays,
            and so does the newest checkpoint of all.
        part: Whether other nodes may have the rest of each step. Then the newest part of a step
            stays too, since another node may list that step.

    Raises:
        RootInUse: The root belongs to another job, which is not known to have ended.
    """
    found = Inventory(backend, part=part).look()
    # List first: a job that takes the root from now on has no step in the listing then.
    claim.use()
    stays: set[StepRef | None] = set()
    if restored is not None:
        whole, parts = (
            [held.ref for held in found if held.state == "committed"],
            [held.ref for held in found if held.is_part],
        )
        stays = {restored, max(whole, default=None), max(parts, default=None)}
    for held in found:
        if held.state == "incomplete":
            goes = held.is_cut or claim.is_dead(held.ref) or _is_old(held, GRACE_SECONDS)
        else:
            goes = held.state != "unsupported" and claim.may_remove(held.ref)
        if goes and not held.pins and job_of(held.ref) != claim.own and held.ref not in stays:
            remove(backend, held, claim)


def _is_abandoned(held: StoredStep) -> bool:
    """Return True if the claim marker of a process that is long gone is in the way.

    No process takes a day from putting its marker to putting its manifest.
    """
    # Ranks that clear an aborted save away use empty markers.
    ours = 0 if held.state == "incomplete" else None
    dates = [
        info.modified
        for info in held.objects
        if info.key == held.ref.claim_marker
        and info.size != ours
        and not is_removal_marker(info.size)
    ]
    return any(date is not None and time.time() - date > GRACE_SECONDS for date in dates)
