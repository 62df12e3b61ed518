"""Copy steps from the tiers of single nodes to a tier that all nodes share. The agents of all nodes
do this together.

An agent sees only its node's part of each step: the files of the ranks on its node. It copies this
part to the nearest shared tier, and the agents of the other nodes copy their parts
(``ckpt.catalog.transfer_by_rank``). In the folder of the step on the shared tier, each agent first
puts a note for each rank of its node. The note says that the rank has ended and that the node has
its files. An agent copies nothing before all ranks of the job have notes. An agent that finds all
parts on the shared tier puts the manifest. In this module, to bring a step is to do all of that.

The newest step may differ from node to node, since the ranks may have been killed when only some
nodes had the manifest. So an agent also copies its part of a step for which another agent has put a
note, and tries again for some time if its node has a newer part without the manifest. Only an agent
whose node has the manifest commits, because the manifest proves that the save was committed.

A node may be lost together with its agent. Then the ranks of that node get no notes, or their files
do not arrive. If this node is a buddy of the lost node and has copies of these files, the agent of
this node first waits for the other agent, and then copies the files itself. If this node's copies
belong to an older step, the agent brings the older step.

A rank is *noted* in the folder of a step once a note there says that it has ended. A rank is
*silent* if it is not noted there and no agent has marked its files to bring. A silent rank may
still remove its files.

An *attempt* is the id of one incarnation of a job. If the job went back to an older step, the later
steps are not on the current *branch*, and the agent does not bring them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ckpt.agent.messages import Job
from ckpt.agent.worker_messages import Copied, OnReport, progress_of
from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.catalog.step_listing import is_committed, own_objects, read_packed
from ckpt.catalog.transfer_by_rank import (
    commit_parts,
    copy_rank,
    mark_to_bring,
    note_ends,
    noted_ends,
    ranks_marked_to_bring,
)
from ckpt.catalog.verify import Meter, StepFolder
from ckpt.errors import (
    AccessDenied,
    CkptError,
    CommitError,
    IntegrityError,
    LinkRefused,
    OutOfSpace,
    RootInUse,
    RootLost,
    StorageError,
    TransientStorageError,
)
from ckpt.model.keys import StepRef, fragment_name, whole_ranks
from ckpt.model.manifest import Manifest
from ckpt.model.readable import rank_list
from ckpt.model.rollback import on_branch
from ckpt.pipeline.workers import Workers
from ckpt.root.attempts import attempts_of
from ckpt.storage.api import StorageBackend
from ckpt.upkeep.step_copier import StepCopier

_log = logging.getLogger("ckpt")
_PATIENCE_SECONDS: Final = 10.0
"""How long one try at a step waits for the agents of other nodes. The agent tries again later."""
_POLL_SECONDS: Final = 0.5
_WAIT_SECONDS: Final = 3600.0
"""How long after it was written a part without a manifest keeps the agent from ending its work."""


@dataclass(frozen=True, slots=True)
class _Part:
    """This node's part of a step.

    Attributes:
        stores: The tiers of the node that have the files of all ranks of the node, nearest first.
        step: The inventory's entry for the step on the nearest of these tiers.
        copies: The ranks of other nodes whose files are on these tiers as copies.
    """

    step: StoredStep
    stores: tuple[StorageBackend, ...]
    copies: frozenset[int]

    @property
    def is_committed(self) -> bool:
        return any(is_committed(store, self.step.ref) for store in self.stores)


class NodeParts:
    """Copies one node's parts of the steps to the nearest tier that all nodes share.

    ``_target`` is the store of the shared tier. After ``_deadline``, the present try waits for no
    other agent. A *fragment* is the record of what one rank has written. The files of a rank have
    arrived once its fragment is there.

    Args:
        job: The job. Its processes on this node have ended.
        stores: The tiers of this node, nearest first.
        copier: The copier to the shared tier. It decides which steps that tier lacks and would
            keep, knows the rollback that counts, and confirms that no other job has taken the
            roots.
        workers: The threads that copy.
        report: Called with the progress of each copy, and with each step that has become a
            checkpoint on the shared tier.

    Thread safety: one thread.
    """

    def __init__(
        self,
        job: Job,
        stores: Sequence[StorageBackend],
        copier: StepCopier,
        workers: Workers,
        report: OnReport,
    ) -> None:
        self._job, self._stores, self._copier = job, stores, copier
        self._workers, self._report = workers, report
        self._target = copier.tier.backend
        self._ranks, self._node_ranks = set(range(job.ranks)), set(job.node_ranks)
        self._deadline = time.monotonic() + _PATIENCE_SECONDS

    def bring(self) -> None:
        """Make steps checkpoints on the shared tier, together with the agents of the other nodes:
        copy this node's files, wait for the files of the other nodes, and put the manifest.

        The steps are the newest committed step of this node if it is newer than the newest
        checkpoint on the shared tier, the steps that the tier lacks and would keep, and newer steps
        that other agents have begun. If a step fails because agents of other nodes are silent, the
        agent also tries an older step that this node's copies may complete (``_older_part``).
        Before the copy of each step, this agent puts notes into the folder of the step on the
        shared tier, which say that the ranks of this node have ended. It also puts these notes into
        the folder of the newest checkpoint on that tier.

        If an earlier call has already put this node's notes for a step, the failure of that step is
        raised only if this node has the manifest and the shared tier has no checkpoint that is as
        new. Otherwise the failure is only logged.

        Raises:
            CommitError: A step still lacks the part of another node, and another try may help.
            IntegrityError: Files of a step are damaged.
            CkptError: A store has failed, or another job has taken the roots.
        """
        parts = self._parts()
        newly_noted_refs, failures = set[StepRef](), dict[StepRef, CkptError]()
        tried_refs: set[StepRef] = set()
        # Another agent may begin a newer step while this agent copies the steps that it knows.
        while refs_to_bring := [ref for ref in self._refs_to_bring(parts) if ref not in tried_refs]:
            # If an earlier call has put this node's notes for a step, the step may lack the part of
            # a lost node, and then every try fails. The failure of such a step is raised below only
            # if the shared tier has no newer step.
            unnoted_refs = {
                ref
                for ref in refs_to_bring
                if not self._node_ranks <= noted_ends(self._folder(ref))
            }
            for ref in unnoted_refs:
                note_ends(self._folder(ref), self._node_ranks)
            self._note_newest()
            self._deadline = time.monotonic() + _PATIENCE_SECONDS
            failures |= self._bring_all(parts[ref] for ref in refs_to_bring)
            newly_noted_refs |= unnoted_refs
            tried_refs.update(refs_to_bring)
        self._note_newest()
        if (older_part := self._older_part(parts, failures)) is not None:
            note_ends(self._folder(older_part.step.ref), self._node_ranks)
            failures |= self._bring_all([older_part])
        newest_number = self._newest_number()
        for ref, failure in failures.items():
            if ref in newly_noted_refs or (ref.step > newest_number and parts[ref].is_committed):
                raise failure
            _log.info("ckpt: %s", failure)

    def _bring_all(self, parts: Iterable[_Part]) -> dict[StepRef, CkptError]:
        """Call ``_bring`` for each of ``parts``, one after the other. Return the error of each step
        for which it fails. An error is raised instead if it concerns the whole store or root: a
        store is full, denies access or does not answer, or a root is lost or has another owner.
        """
        failures: dict[StepRef, CkptError] = {}
        for part in parts:
            try:
                self._bring(part)
            except LinkRefused as error:  # It concerns a single object
                failures[part.step.ref] = error
            except (RootInUse, AccessDenied, OutOfSpace, RootLost, TransientStorageError):
                raise
            except (CommitError, IntegrityError, StorageError) as error:
                failures[part.step.ref] = error
        return failures

    def check_newer(self) -> None:
        """Check that no other node is likely to bring a newer step than the shared tier has, of
        which this node has its part without the manifest.

        The other node brings such a step once its ranks have ended, and needs this node's part. A
        node that is lost never does, so a part counts only in the hour after it was written.

        Raises:
            CommitError: This node has such a part, and must try again later.
        """
        newest, earliest = self.newest(), time.time() - _WAIT_SECONDS
        if newest is None:  # There is no folder in which nodes note that their ranks have ended
            return
        for ref, part in self._parts().items():
            is_recent = (part.step.last_change or 0) > earliest
            if ref.step <= newest.step or not is_recent or part.is_committed:
                continue
            if self.may_be_whole(ref):
                missing = rank_list(self._silent_ranks(self._folder(newest)) or self._ranks)
                raise CommitError(
                    f"step {ref.step} may be a checkpoint on another node: it waits for the agents "
                    f"of rank(s) {missing}"
                )

    def newest(self) -> StepRef | None:
        """Return the newest step of the job that is a checkpoint on the shared tier, or None."""
        return next(
            (ref for ref in self._steps_on_target() if is_committed(self._target, ref)), None
        )

    def unnoted_ranks(self) -> set[int]:
        """Return the ranks that are not noted as ended in the newest checkpoint of the job on the
        shared tier. Return all ranks if the job has no checkpoint there.
        """
        newest = self.newest()
        return set(self._ranks) if newest is None else self._unnoted_ranks(self._folder(newest))

    def may_be_whole(self, ref: StepRef) -> bool:
        """Return True if the step ``ref`` may still become a checkpoint with this node's part.

        An agent notes the ranks of its node in each step that it wants to bring, and after that in
        the newest checkpoint of the shared tier. Once all ranks are noted in that checkpoint, no
        agent begins another step. A rank whose files another node has marked to bring counts as
        noted, because the agent of a lost node begins no step. From then on, the answer is True
        only if another node has noted its ranks in ``ref``.

        Args:
            ref: A step whose manifest this node does not have.
        """
        newest = self.newest()
        if newest is None or self._silent_ranks(self._folder(newest)):
            return True
        return not noted_ends(self._folder(ref)) <= self._node_ranks

    def _note_newest(self) -> None:
        """Note in the newest checkpoint of the shared tier that the ranks of this node have ended.
        Do nothing if there is no checkpoint.
        """
        newest = self.newest()
        if newest is not None and not self._node_ranks <= noted_ends(
            folder := self._folder(newest)
        ):
            note_ends(folder, self._node_ranks)

    # -- the steps on each tier --------------------------------------------------------------------

    def _folder(self, ref: StepRef) -> StepFolder:
        return StepFolder(self._target, ref, self._workers)

    def _steps_on_target(self) -> list[StepRef]:
        """Return the steps of the job on the shared tier, committed or not, newest first. Abandoned
        steps are left out.
        """
        refs = attempts_of(self._target, self._job.owner.attempt)
        return on_branch(self._copier.rollback, refs)

    def _newest_number(self) -> int:
        newest = self.newest()
        return -1 if newest is None else newest.step  # -1 is before any step

    def _parts(self) -> dict[StepRef, _Part]:
        """Return this node's part of each step of the job, newest step first. A step is left out if
        it is abandoned, or if no tier of the node has the files of all ranks of the node.
        """
        parts: dict[StepRef, _Part] = {}
        for store in self._stores:
            for step in Inventory(store, part=True).look():
                is_own = step.ref.job == self._job.owner.attempt
                if (
                    is_own
                    and on_branch(self._copier.rollback, [step.ref])
                    and (step.state == "committed" or step.is_part)
                    and self._has_all_ranks(step)
                ):
                    part = parts.get(step.ref) or _Part(step, (), frozenset())
                    copies = part.copies | self._copies(step)
                    parts[step.ref] = _Part(part.step, (*part.stores, store), copies)
        return dict(sorted(parts.items(), reverse=True))

    def _has_all_ranks(self, step: StoredStep) -> bool:
        """Return True if the fragments of all ranks of this node are among the files of a step.
        Then the data files are too, since a rank puts its data before its fragment.
        """
        names = {info.name for info in step.objects}
        return all(fragment_name(rank) in names for rank in self._node_ranks)

    def _copies(self, step: StoredStep) -> frozenset[int]:
        """Return the ranks of other nodes whose files this node has in the folder of a step."""
        names = {info.name for info in step.objects}
        return frozenset(whole_ranks(names) - self._node_ranks)

    def _older_part(
        self, parts: dict[StepRef, _Part], failures: Collection[StepRef]
    ) -> _Part | None:
        """Return this node's part of an older step that this node's copies may complete.

        An older step is tried only if the newest of the ``failures`` steps has silent ranks, which
        are the ranks that ``_silent_ranks`` returns. The older step must be committed on this node
        and newer than the newest checkpoint on the shared tier, and this node must have copies of
        the files of a silent rank. Return the part of the newest step of that kind, or None if
        there is none.
        """
        silent_ranks = self._silent_ranks(self._folder(max(failures))) if failures else set[int]()
        newest_number = self._newest_number()
        return next(
            (
                part
                for ref, part in parts.items()
                if ref not in failures and ref.step > newest_number
                if part.is_committed and part.copies & silent_ranks
            ),
            None,
        )

    def _refs_to_bring(self, parts: dict[StepRef, _Part]) -> list[StepRef]:
        """Return the steps to bring, newest first.

        They are this node's newest committed step, the committed steps that the shared tier lacks
        and would keep, and the steps that other agents have begun. The newest step and the begun
        steps count only if they are newer than the newest checkpoint on the shared tier. A begun
        step counts only if ``parts`` has this node's part of it.
        """
        newest_number = self._newest_number()
        committed_steps = [part.step for part in parts.values() if part.is_committed]
        newest = [step for step in committed_steps[:1] if step.ref.step > newest_number]
        newest = self._copier.not_being_removed(newest)  # Its removal there has not begun
        missing_steps = self._copier.missing_steps(committed_steps, self._job.backlog + 1)
        begun_refs = [
            ref for ref in self._steps_on_target() if ref in parts and ref.step > newest_number
        ]
        refs = {*(step.ref for step in (*newest, *missing_steps)), *begun_refs}
        return sorted(refs, reverse=True)

    # -- one step ----------------------------------------------------------------------------------

    def _bring(self, part: _Part) -> None:
        """Make a step a checkpoint on the shared tier, together with the other agents.

        Raises:
            CommitError: Some ranks are not known to have ended (``_wait_until_files_stay``), or the
                part of another node or the manifest has not arrived in time.
            IntegrityError: No tier of this node has the files of a rank intact.
        """
        ref, target, folder = part.step.ref, self._target, self._folder(part.step.ref)
        began = time.perf_counter()
        marked_ranks = self._wait_until_files_stay(part, folder)
        if not is_committed(target, ref):
            copy_began = time.perf_counter()
            self._copy(part, folder, self._node_ranks | marked_ranks)
            self._replace_silent(part, folder, time.perf_counter() - copy_began)
        manifest = self._manifest(part)
        while not is_committed(target, ref):
            missing_ranks = self._ranks_without_fragments(folder)
            if not missing_ranks and manifest is not None:
                commit_parts(folder, manifest, self._copier.confirm)
                break
            if time.monotonic() > self._deadline:
                raise CommitError(
                    f"step {ref.step} on {target.url} waits for the agents of other nodes: "
                    + (
                        f"the files of rank(s) {rank_list(missing_ranks)} are missing"
                        if missing_ranks
                        else "its manifest is missing, which this node does not have"
                    )
                )
            time.sleep(_POLL_SECONDS)
        self._report(Copied(ref.step, target.url))
        seconds = time.perf_counter() - began
        _log.info("ckpt: step %d is on %s now, in %.2f s", ref.step, target.url, seconds)

    def _wait_until_files_stay(self, part: _Part, folder: StepFolder) -> set[int]:
        """Wait until no rank can remove its files of the step from the shared tier any more.

        This is so once each rank is noted as ended, or has a marker which says that an agent copies
        the files of the rank (``mark_to_bring``). The wait also ends when the step is committed on
        the shared tier. If the wait takes too long, put such markers for the remaining ranks whose
        files this node has as copies, and wait again.

        Returns:
            The ranks of other nodes whose files this node has marked, and must copy. Empty if it
            has marked none.

        Raises:
            CommitError: Some ranks may still remove their files, and this node has no copies of
                these files.
        """
        ref, url = folder.ref, self._target.url

        def files_stay() -> bool:
            return is_committed(self._target, ref) or not self._silent_ranks(folder)

        if self._wait_until(files_stay):
            return set()
        if marked_ranks := mark_to_bring(folder, part.copies & self._silent_ranks(folder)):
            self._log_silent(ref, marked_ranks)
            self._deadline = time.monotonic() + _PATIENCE_SECONDS
            if self._wait_until(files_stay):
                return marked_ranks
        missing = rank_list(self._silent_ranks(folder))
        raise CommitError(
            f"step {ref.step} is not brought to {url} yet: rank(s) {missing} have not "
            "ended, or their nodes do not have the step, or have no agent"
        )

    def _replace_silent(self, part: _Part, folder: StepFolder, seconds: float) -> None:
        """Wait for the files of other nodes. If some do not arrive and this node has copies of
        them, copy them from this node.

        Args:
            seconds: How long this node took to copy its own files. Other nodes may need as long.
        """

        def is_whole() -> bool:
            return is_committed(self._target, folder.ref) or not self._ranks_without_fragments(
                folder
            )

        if part.copies:
            self._deadline = max(self._deadline, time.monotonic() + seconds)
        if self._wait_until(is_whole) or not (
            ranks := part.copies & self._ranks_without_fragments(folder)
        ):
            return
        self._log_silent(folder.ref, ranks)
        self._copy(part, folder, ranks)
        self._deadline = time.monotonic() + _PATIENCE_SECONDS

    def _log_silent(self, ref: StepRef, ranks: Collection[int]) -> None:
        _log.info(
            "ckpt: step %d: the agent of rank(s) %s is silent: their files come from the copies on "
            "this node",
            ref.step,
            rank_list(ranks),
        )

    def _copy(self, part: _Part, folder: StepFolder, ranks: Collection[int]) -> None:
        """Copy the files of ``ranks`` from this node to the shared tier."""
        on_progress = progress_of(part.step.ref.step, self._target.url, self._report)
        meter = Meter(part.step.staged_bytes or part.step.stored_bytes, on_progress)
        for rank in sorted(ranks):
            self._copier.confirm()
            copy_rank(part.stores, folder, rank, self._copier.tier.tier.codec, meter.add)

    def _manifest(self, part: _Part) -> Manifest | None:
        """Return the manifest of the step from a tier of this node, or None if no tier has it
        intact.
        """
        for store in part.stores:
            if is_committed(store, part.step.ref):
                try:
                    manifest, _ = read_packed(store, part.step.ref)
                except IntegrityError as error:
                    _log.warning("ckpt: %s", error)
                else:
                    return manifest
        return None

    def _unnoted_ranks(self, folder: StepFolder) -> set[int]:
        return self._ranks - noted_ends(folder)

    def _silent_ranks(self, folder: StepFolder) -> set[int]:
        """Return the ranks that may still remove their files of a step from the shared tier: those
        that are not noted as ended, and whose files no agent has marked to bring.
        """
        return self._unnoted_ranks(folder) - ranks_marked_to_bring(folder)

    def _ranks_without_fragments(self, folder: StepFolder) -> set[int]:
        names = {info.name for info in own_objects(self._target, folder.ref)}
        return {rank for rank in self._ranks if fragment_name(rank) not in names}

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until ``condition`` holds or the deadline has passed. Return True if it holds."""
        while not (holds := condition()) and time.monotonic() < self._deadline:
            time.sleep(_POLL_SECONDS)
        return holds
