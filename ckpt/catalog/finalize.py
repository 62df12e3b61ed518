"""Finish a commit whose leader died after all ranks had made their parts durable, but before the
manifest was put.

The leader is rank 0. A *fragment* is the record of what one rank has written, and the manifest is
merged from all of them. To *fill in* a manifest is to add those contents of the fragments that the
stored manifest leaves out. Each try of a job at a step is an *attempt*, with a folder of its own.
A *rollback* is the record that the run goes on from an older step: it begins a *branch*, and the
later steps are *abandoned*. A *tombstone* is an object that stands in the place of the manifest of
a removed step. The *bases* of a step are older steps whose files hold a part of its data.

The manifest is the one that the leader would have put, byte for byte: it is the same merge of the
same fragments, and is put only if there is none. A save is not finished if its leader may still
decide on it, or has refused it. To refuse a save means to abort it. A store has no record of a
refusal, so a refusal is inferred from the traces that a leader and its ranks leave after a
decision:

1. A leader gives the root back when its manager is closed. So ``writer.json``, the record of the
   owner, must still name this attempt, which shows that the leader died in the middle of its work.
2. A leader goes on to the next save. So it must not have written to a later step, or to a later try
   at this step.
3. Each rank of a refused save removes its own files. So every fragment must exist, and must still
   exist after the claim marker (``root.claim_marker``) of this process keeps the ranks from
   removing any. Every byte of data is compared with its checksum too. With ``read_data=False``,
   only the size of each file is compared.

One case cannot be detected: a save was refused, and all ranks died before any of them removed a
file. Such a save is finished although it was refused. Its data is complete, and all of it is from
one attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ckpt.catalog.step_listing import list_root, own_objects
from ckpt.catalog.verify import OnProgress, StepFolder, size_faults, verify_files
from ckpt.coordination.coordinator import LEADER
from ckpt.coordination.step_files import put_manifest
from ckpt.coordination.tombstone import delete_tombstone
from ckpt.errors import (
    CkptError,
    CommitError,
    IntegrityError,
    JobUnseen,
    ManifestCorrupt,
    RootInUse,
    StorageError,
)
from ckpt.model.checksum import checksum
from ckpt.model.fill_manifest import fill_manifest
from ckpt.model.fragment_columns import fragment_of
from ckpt.model.keys import StepRef, fragment_name, is_about_rank, is_fragment
from ckpt.model.manifest import FragmentRef, Manifest, Packed
from ckpt.model.readable import rank_list
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.rollback import Rollback, last_rollback, on_branch
from ckpt.pipeline.workers import Workers
from ckpt.plan.merge import merge
from ckpt.root.claim_marker import claim_for_finish, release_finish
from ckpt.root.leases import pins_on
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.api import StorageBackend

_PRUNE_NOTE: Final = (
    "once it is a day old, and not before, since its job may run where it cannot be seen from here"
)
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the caller knows of a run from elsewhere.

    Attributes:
        job_is_dead: Whether the processes of the job are known to have ended. It is used only if
            the job ran on another machine, where this process cannot see it.
        rollback: The rollback that counts on other tiers of the run; None if there is none, or if
            it is not known. A tier in memory has none.
    """

    job_is_dead: bool = False
    rollback: Rollback | None = None


NO_FACTS: Final = RunFacts()


def finalize(
    backend: StorageBackend,
    ref: StepRef,
    *,
    workers: Workers,
    facts: RunFacts = NO_FACTS,
    read_data: bool = True,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Make an unfinished attempt the checkpoint that its leader would have made.

    Apart from the claim marker, only the manifest is written, and no file is removed. Several
    calls, also at once, do no harm.

    Args:
        backend: The store.
        ref: The attempt.
        workers: The threads that read.
        facts: What the caller knows of the run.
        read_data: Whether every byte is compared with its checksum. Otherwise only the sizes of the
            files are compared, as the leader does.
        on_progress: Called as bytes are read.

    Returns:
        The manifest.

    Raises:
        RootInUse: The job of the attempt is alive, and commits the attempt itself.
        JobUnseen: The job ran on another machine, and ``facts`` do not tell that it has
            ended.
        CommitError: The attempt cannot become a checkpoint, for the reason in the error.
        IntegrityError: A file or a fragment of the attempt is damaged.
        StorageError: The store has failed, or a fragment was removed meanwhile.
    """
    folder = StepFolder(backend, ref, workers)
    check = partial(_check_owner, backend, ref, job_is_dead=facts.job_is_dead)
    check_owner = partial(folder.retry.call, check)
    owner = check_owner()
    _check_is_last_save(backend, ref, owner, facts.rollback)
    parts = read_fragments(folder)
    manifest = merge(parts)
    fragments = {
        part.rank: fragment_of(part, key=ref.key(fragment_ref.name)) for part, fragment_ref in parts
    }
    filled_manifest = fill_manifest(manifest, fragments, key=ref.manifest)
    files = filled_manifest.stored_files().values()
    if read_data:
        faults, _ = verify_files(folder, files, on_progress=on_progress)
    else:
        faults = size_faults(folder, files)
    if faults:
        raise faults[0].error()
    # The leader, too, checks the owner right before it puts the manifest.
    if check_owner() != owner:
        raise CommitError(
            f"step {ref.step}: another process took the root over meanwhile: try again"
        )
    with pins_on(backend, manifest.bases):
        _commit(folder, manifest)
    return manifest


def _commit(folder: StepFolder, manifest: Manifest) -> None:
    """Put the claim marker, check that all files are there, and put the manifest.

    While the claim marker stands, no rank of the job removes a file of the save. The marker is
    deleted at the end, but stays if the check or the put of the manifest fails. A tombstone, which
    has the key of the manifest, is deleted before.
    """
    backend, ref, retry = folder.backend, folder.ref, folder.retry
    if not retry.call(partial(claim_for_finish, backend, ref)):
        raise CommitError(f"step {ref.step}: it was refused, and is being discarded just now")
    if faults := size_faults(folder, manifest.stored_files().values()):
        raise faults[0].error()
    folder.require_fragments(manifest)
    retry.call(partial(delete_tombstone, backend, ref))
    retry.call(partial(put_manifest, backend, ref.manifest, pack(manifest)))
    release_finish(backend, ref)


def _check_owner(backend: StorageBackend, ref: StepRef, *, job_is_dead: bool) -> Owner:
    """Return the owner of the root if it is the job of ``ref``, and is known to have ended.

    Raises:
        CommitError: The root has another owner or none, so the leader of ``ref`` may have decided.
        RootInUse: The owner is alive.
        JobUnseen: The owner is on another machine, and may be alive.
    """
    owner = read_owner(backend)
    if owner is None:
        raise CommitError(
            f"step {ref.step}: a job here closed its manager in order: its own, so the leader had "
            "decided, and not for a commit, or a later one, which left it behind: restore "
            "another step"
        )
    if ref.job != owner.attempt:
        raise CommitError(
            f"step {ref.step}: attempt {owner.attempt} has taken the root over since, and may "
            "have gone on from another step: restore what is committed"
        )
    if owner.alive:
        raise RootInUse(backend.url, str(owner))
    if owner.is_unknown and not job_is_dead:
        raise JobUnseen(ref.step, str(owner))
    return owner


def _check_is_last_save(
    backend: StorageBackend, ref: StepRef, owner: Owner, rollback: Rollback | None
) -> None:
    """Raise ``CommitError`` if the leader has written to a later step, or in a later try at this
    step. If it has gone back to an earlier step since, what it wrote after that is later too.
    """
    listing = list_root(backend)
    rollback = last_rollback([rollback, listing.rollback])
    branch = on_branch(rollback, listing.refs)
    is_abandoned = ref not in branch
    # What was abandoned says nothing about the saves of the current branch.
    for attempt_ref in listing.refs if is_abandoned else branch:
        is_later = (attempt_ref.step, attempt_ref.trial) > (ref.step, ref.trial)
        is_later |= is_abandoned and rollback is not None and rollback.precedes(attempt_ref)
        if attempt_ref.job == owner.attempt and is_later:
            names = {info.name for info in own_objects(backend, attempt_ref)}
            if any(map(_may_be_of_leader, names)):
                action = (
                    f"tried step {ref.step} again"
                    if attempt_ref.step == ref.step
                    else f"went on to step {attempt_ref.step}"
                )
                raise CommitError(
                    f"step {ref.step}: the leader {action} after it, so this save may have been "
                    "refused (or, on a farther tier, waited its turn): restore another step"
                )


def _may_be_of_leader(name: str) -> bool:
    """Return True if a file of this name may be from the leader: a file of rank 0 or of no rank."""
    if is_about_rank(name):
        return False
    # All files of a rank begin like its fragment, such as with "rank-00000.".
    return name.startswith(fragment_name(LEADER).removesuffix("json")) or not name.startswith(
        "rank-"
    )


def read_fragments(folder: StepFolder) -> list[tuple[Packed, FragmentRef]]:
    """Return the fragments of all ranks, each with the reference that a manifest has for it.

    Raises:
        CommitError: The fragment of some rank is missing.
        ManifestCorrupt: A fragment is damaged, or belongs to another save.
    """
    ref = folder.ref
    names = [info.name for info in own_objects(folder.backend, ref)]
    # The names may include the manifest, since other processes may finish the step too.
    fragment_names = sorted(filter(is_fragment, names))
    if not fragment_names:
        raise CommitError(
            f"step {ref.step}: no rank has finished its part: ckpt prune removes what is left of "
            f"it {_PRUNE_NOTE}"
        )
    parts = folder.workers.run_all(partial(_read_fragment, folder, name) for name in fragment_names)
    _check_world(ref, [fragment for fragment, _ in parts])
    return parts


def _read_fragment(folder: StepFolder, name: str) -> tuple[Packed, FragmentRef]:
    """Return a fragment, and the reference that a manifest has for it."""
    ref, key = folder.ref, folder.ref.key(name)

    def decode(data: bytes) -> tuple[Packed, bytes]:
        return unpack(data, Packed, key=key), data  # The merge checks the contents of the fragment

    fragment, data = folder.read(key, decode)
    if (fragment.step, fragment.attempt, fragment_name(fragment.rank)) != (
        ref.step,
        ref.attempt,
        name,
    ):
        raise ManifestCorrupt(key, "it belongs to another save, or to another rank")
    return fragment, FragmentRef(name, fragment.rank, len(data), checksum(data))


def _check_world(ref: StepRef, fragments: Sequence[Packed]) -> None:
    """Raise ``CommitError`` if the fragment of a rank is missing."""
    world = fragments[0].world_size
    if missing := set(range(world)) - {fragment.rank for fragment in fragments}:
        raise CommitError(
            f"step {ref.step}: rank(s) {rank_list(missing)} of {world} did not finish their part, "
            f"which no other place has: ckpt prune removes what is left of it {_PRUNE_NOTE}"
        )


@dataclass(frozen=True, slots=True)
class Finisher:
    """Finishes the commits of jobs that have ended, at the start of a restore.

    Only the owner, the later steps, the fragments and the sizes of the files are checked. The data
    is not read: the restore that follows reads the data that it needs and compares it with its
    checksums. If the data is damaged, the restore takes the previous step.

    Thread safety: one thread.

    Attributes:
        workers: The threads that read.
        tries: The attempts that were tried, each with the URL of the store.
        finishes: A pair (step, URL of the store) for each commit that was finished, in order.
    """

    workers: Workers
    tries: set[tuple[str, StepRef]] = field(default_factory=set[tuple[str, StepRef]])
    finishes: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def finish(self, backend: StorageBackend, ref: StepRef, rollback: Rollback | None) -> bool:
        """Try to finish ``ref``, which has no manifest on ``backend``, and return True on success.
        ``rollback`` is the one that counts on all tiers; None if there is none.

        Each attempt is tried once for each store. No `CkptError` is raised, since there may be
        other steps to restore.
        """
        if (backend.url, ref) in self.tries:
            return False
        self.tries.add((backend.url, ref))
        try:
            facts = RunFacts(rollback=rollback)
            finalize(backend, ref, workers=self.workers, facts=facts, read_data=False)
        except JobUnseen as error:
            _log.warning(
                "ckpt: %s (ckpt finalize %s --step %d --job-is-dead)", error, backend.url, ref.step
            )
        except (IntegrityError, StorageError) as error:
            _log.warning("ckpt: step %d on %s was not finished: %s", ref.step, backend.url, error)
        except CkptError as error:
            # The save was refused or is incomplete, or its job is alive. None of this is unusual.
            _log.debug("ckpt: step %d on %s was not finished: %s", ref.step, backend.url, error)
        else:
            _log.warning(
                "ckpt: step %d on %s lacked only its manifest: this job has finished its commit",
                ref.step,
                backend.url,
            )
            self.finishes.append((ref.step, backend.url))
            return True
        return False
