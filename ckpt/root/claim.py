"""Claims: which steps a job may remove from a root, and whether it still may do so.

Jobs that share a root cannot know whether the other jobs are alive, since a process on another
machine or in another container is not visible. So a job removes only the steps that `Claim` allows.
Before each removal it reads ``writer.json`` again, the record of the owner of the root. An
*attempt* is one incarnation of a job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from ckpt.coordination.coordinator import Coordinator
from ckpt.errors import RootInUse
from ckpt.model.keys import OWNER, StepRef, parse_folder
from ckpt.pipeline.retry import RetryPolicy
from ckpt.root.attempts import step_refs
from ckpt.root.owner import (
    Owner,
    confirm,
    detach,
    put_owner,
    read_owner,
    refuses,
    release,
    succeed,
)
from ckpt.storage.api import ObjectInfo, StorageBackend

_RETRY: Final = RetryPolicy()
_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Takeover:
    """What was on a root when a job took it.

    Attributes:
        refs: The attempts there.
        date: When ``writer.json`` was put, by the clock of the store. None if the store has no
            dates, or if every job that owned the root before is known to have ended.
    """

    refs: frozenset[StepRef]
    date: float | None


class Checkpoint(Protocol):
    """A committed step."""

    @property
    def ref(self) -> StepRef: ...

    @property
    def objects(self) -> Sequence[ObjectInfo]:
        """The files in the folder of the step that have names of checkpoint files."""
        ...


class Claim:
    """One job's claim on one root.

    A job that saves takes the root with ``take``. A job that only restores may use a root (``use``)
    that has no owner, or whose owner is known to have ended.

    A job that has taken the root may remove the checkpoints that it saved, that it copied to the
    root, or that were there when it took the root. It may also remove the checkpoints of jobs that
    are known to have ended. A checkpoint that another job commits later stays, since that job may
    be alive. A job that only uses the root may remove every checkpoint.

    Which checkpoints were there follows from the attempts that were listed at that moment, so no
    request is needed for each of them. A job that owned the root and may be alive may still have
    committed one of its attempts later. Then the store's dates of the manifest and of
    ``writer.json`` decide, if the store has dates: only a manifest with an earlier date was there,
    since a store may date to whole seconds. They decide nothing else, since the clock of a folder
    may have been set back.

    The remains of a save may be removed at once if the owner of the root knows that the job of the
    save has ended. Other remains stay for a day (``retention.policy``).

    ``_takeover`` is what this process found when it first took the root, and ``_copied_refs`` are
    the steps of other jobs that this job copies to the root. Of the jobs that owned the root
    before, ``_ended_jobs`` are known to have ended, and ``_unseen_jobs`` may be alive.
    ``_last_owner`` is the attempt that owned the root at the last ``take`` or ``use``.

    Args:
        backend: The store of the root.
        owner: The owner that stands for this process.
        takeover_post: What was there when the leader took the root. A rank of a saving job that is
            not the leader needs it, since it does not take the root itself. None otherwise.

    Attributes:
        is_claimed: Whether ``writer.json`` may name this job.
        chosen_ref: The step that a restore of this job has chosen, until the job commits another
            step; None if there is none. Pruning leaves it alone, also if it was decided before.

    Thread safety:
        Any thread may call all methods.
    """

    def __init__(
        self,
        backend: StorageBackend,
        owner: Owner,
        *,
        takeover_post: TakeoverPost | None = None,
    ) -> None:
        self._backend, self._owner, self._takeover_post = backend, owner, takeover_post
        self._takeover: Takeover | None = None
        self._copied_refs: set[StepRef] = set()
        # The jobs that owned the root before: those known to have ended, and the others.
        self._ended_jobs: frozenset[str] = frozenset()
        self._unseen_jobs: frozenset[str] = frozenset()
        self._last_owner = owner.attempt  # As of the last ``take`` or ``use``
        self.is_claimed = False
        self.chosen_ref: StepRef | None = None

    @property
    def own_job(self) -> str:
        """Return the attempt of this job, by which ``StepRef.job`` names the job."""
        return self._owner.attempt

    @property
    def is_taken(self) -> bool:
        """Return True if this job has taken the root, and this rank knows what was there."""
        return self.takeover is not None

    @property
    def listing(self) -> frozenset[StepRef]:
        """The attempts that were on the root when this job took it; empty if it has not, or if this
        rank does not know them yet.
        """
        takeover = self.takeover
        return takeover.refs if takeover is not None else frozenset()

    @property
    def takeover(self) -> Takeover | None:
        """What was on the root when this job took it first; None if it has not, or if this rank
        does not know it yet.
        """
        return self._takeover if self._takeover_post is None else self._takeover_post.takeover()

    def take(self) -> list[StepRef]:
        """Make this job the owner of the root, and return the attempts there, newest step first.

        Raises:
            RootInUse: The root belongs to a job that is alive on this machine.
            RootLost: Another folder has taken the place of the root.
            StorageError: The store has failed.
        """
        # ``writer.json`` may name this job even if this method fails.
        self.is_claimed, self._last_owner = True, self.own_job
        self._owner = succeed(self._backend, self._owner)
        # If the next call finds no room for ``writer.json``, the job makes room. For that it must
        # know the ended jobs, whose steps it may remove.
        self._ended_jobs, self._unseen_jobs = (
            frozenset(self._owner.ended),
            frozenset(self._owner.unseen),
        )
        put_owner(self._backend, self._owner)
        # The date matters only for attempts of jobs that may be alive.
        date = self._backend.head(OWNER).modified if self._unseen_jobs else None
        listing = step_refs(self._backend)
        if self._takeover is None:
            self._takeover = Takeover(frozenset(listing), date)
        return listing

    def warn(self) -> None:
        """Log a warning if ``take`` would fail, since the root belongs to a job that is alive.
        There is none about another manager of this process, for whose saves ``take`` waits, and
        none on a rank that is not the leader.

        Raises:
            StorageError: The store has failed.
        """
        if self.is_claimed or self._takeover_post is not None:
            return
        owner = read_owner(self._backend)
        if owner is not None and refuses(owner, self._owner) and owner.work is None:
            _log.warning(
                "ckpt: %s belongs to a job that is alive (%s): this job may restore from it, but "
                "as long as the other job lives, a save of this job fails",
                self._backend.url,
                owner,
            )

    def use(self) -> None:
        """Check that no other job that may be alive owns the root.

        After this call, the job may remove the steps that ``may_remove`` allows.

        Raises:
            RootInUse: The root belongs to another job, which is not known to have ended. If this
                job has taken the root before, any other owner raises this error.
        """
        owner = read_owner(self._backend)
        is_of_other_job = owner is not None and owner.attempt != self.own_job
        if owner and is_of_other_job and (self._takeover is not None or not owner.has_ended):
            raise RootInUse(self._backend.url, str(owner), is_same_process=owner.is_in_this_process)
        self._last_owner = owner.attempt if owner is not None else self.own_job
        self._unseen_jobs = frozenset(owner.unseen if owner is not None else ())
        if owner is not None and not is_of_other_job:
            self._ended_jobs = frozenset(owner.ended)

    def act_for_ended(self, owner: Owner | None) -> None:
        """Use this claim although the processes of its job have ended. Only the agent does so.

        This writes nothing to the root, so the next job can take the root over. From now on,
        ``may_remove`` allows only checkpoints of this job, steps that it copies to the root
        (``note_copy``), and checkpoints of attempts that are known to have ended.

        Args:
            owner: The present owner of the root: the job itself, an earlier job, or None.
        """
        self._takeover = Takeover(frozenset(), None)
        self._last_owner = owner.attempt if owner is not None else self.own_job
        self._ended_jobs = frozenset(owner.ended if owner is not None else ())
        self._unseen_jobs = frozenset(owner.unseen if owner is not None else ())

    def confirm(self) -> bool:
        """Return True if ``writer.json`` names this job, and False if the root has no owner.

        Call this before each put of a manifest.

        Raises:
            RootInUse: Another job has taken the root over.
            RootLost: Another folder has taken the place of the root.
        """
        return confirm(self._backend, self._owner)

    def confirm_removal(self) -> None:
        """Check that no other job has taken the root over. Call this before each removal.

        Raises:
            RootInUse: Another job has taken the root over since ``take`` or ``use``.
        """
        owner = read_owner(self._backend)
        if owner is not None and owner.attempt not in {self.own_job, self._last_owner}:
            raise RootInUse(self._backend.url, str(owner), is_same_process=owner.is_in_this_process)

    def detach(self) -> None:
        """Leave the root to the agent, if this job still owns the root."""
        if self.is_claimed:
            detach(self._backend, self._owner)
            self.is_claimed = False

    def release(self) -> None:
        """Delete ``writer.json``, if this job still owns the root."""
        if self.is_claimed:
            release(self._backend, self._owner)

    def note_copy(self, ref: StepRef) -> None:
        """Remember that this job copies ``ref``, a step of another job, into the root."""
        self._copied_refs.add(ref)

    def is_copied(self, ref: StepRef) -> bool:
        """Return True if this job copies ``ref``, a step of another job, into the root."""
        return ref in self._copied_refs

    def may_remove(self, checkpoint: Checkpoint) -> bool:
        """Return True if this job may remove the checkpoint."""
        # The job has not taken the root, and only uses it. No living job owns the root.
        if self._takeover is None and self._takeover_post is None:
            return True
        ref = checkpoint.ref
        if ref in self._copied_refs or ref.job == self.own_job or ref.job in self._ended_jobs:
            return True
        # A job that may be alive may have committed the attempt after the listing.
        return ref in self.listing and (
            not self.may_be_committed(ref) or self._predates_takeover(checkpoint)
        )

    def _predates_takeover(self, checkpoint: Checkpoint) -> bool:
        """Return True if the manifest was put before ``writer.json``, by the clock of the store. A
        manifest without a date counts as older.
        """
        dates = {info.key: info.modified for info in checkpoint.objects}
        date, takeover = dates.get(checkpoint.ref.manifest), self.takeover
        if date is None:
            return True
        return takeover is not None and takeover.date is not None and date < takeover.date

    def is_dead(self, ref: StepRef) -> bool:
        """Return True if the job of the save ``ref`` is known to have ended, so that no process can
        complete that save.

        Only a job that owns the root, or takes it now, knows which jobs have ended. For any other
        job the result is False. It is also False for a step that this job copies to the root
        (``note_copy``).
        """
        return ref not in self._copied_refs and ref.job in self._ended_jobs

    def may_be_committed(self, ref: StepRef) -> bool:
        """Return True if a process of another job may still put the manifest of ``ref``: that job
        owned the root, lost it to another one, and is not known to have ended.
        """
        return ref.job in self._unseen_jobs

    @property
    def has_ended_jobs(self) -> bool:
        """Return True if any job that owned the root before is known to have ended."""
        return bool(self._ended_jobs)


class TakeoverPost:
    """What was on a tier when the leader of its ranks took the root.

    The leader posts it once, under a subject of the coordinator. The other ranks read it when they
    must make room.

    Args:
        coordinator: The connection to the ranks that share the store of the tier.
        index: The position of the tier, counted from the nearest.

    Thread safety: all methods may be called from any thread. ``_takeover`` is set once, and every
    thread would set it to the same value.
    """

    def __init__(self, coordinator: Coordinator, index: int) -> None:
        self._coordinator, self._subject = coordinator, f"taken/{index}"
        self._takeover: Takeover | None = None

    def post(self, takeover: Takeover) -> None:
        """Post what the leader has found, for the other ranks."""
        folders = [ref.folder for ref in takeover.refs]
        self._coordinator.set_once(self._subject, msgspec.json.encode((folders, takeover.date)))

    def takeover(self) -> Takeover | None:
        """Return what the leader posted; None if it has not posted it yet."""
        if self._takeover is None:
            message = self._coordinator.verdict(self._subject, timeout=0)
            if message is not None:
                folders, date = msgspec.json.decode(message, type=tuple[list[str], float | None])
                refs = map(parse_folder, folders)
                self._takeover = Takeover(frozenset(ref for ref in refs if ref is not None), date)
        return self._takeover
