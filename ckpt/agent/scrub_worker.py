"""The worker that verifies the steps of a job while the agent has nothing else to do. The worker
compares the steps with their checksums, and writes damaged files again from a tier that has them
intact.

The worker removes no step, and may be killed at any instruction. Tiers in memory are left out,
since the next saves overwrite their slots. If nodes have folders of their own, the agent of each
node verifies the files of its ranks in these folders. The agent of the leader's node verifies the
tiers that the nodes share.

A *fault* is what is wrong with one file. To *mend* a file is to write it again. The *journal* of a
tier is a file that records what has happened to its steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from ckpt.agent.job_tiers import open_tier
from ckpt.agent.worker_messages import Ended, OnReport, Order, Verified, Verifying, at_intervals
from ckpt.catalog.step_listing import committed, is_committed, read_packed
from ckpt.catalog.step_repair import mend_step
from ckpt.catalog.transfer_by_rank import mend_rank
from ckpt.catalog.verify import Fault, StepFolder, VerifyReport, verify_step
from ckpt.coordination.coordinator import LEADER
from ckpt.errors import AccessDenied, CkptError, LinkRefused, RootInUse, TransientStorageError
from ckpt.model.keys import StepRef, rank_of
from ckpt.observe.journal import note_verified
from ckpt.pipeline.rate_limit import Pace
from ckpt.pipeline.workers import Workers
from ckpt.root.claim import Claim
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, eq=False)
class _Root:
    """A tier that this job may verify: its owner is this job, has ended, or does not exist.

    Attributes:
        claim: The claim of the job on the root.
        ranks: For a folder of one node, the ranks whose files must be in it. None for all ranks.
    """

    tier: OpenTier
    claim: Claim
    ranks: frozenset[int] | None


class Scrub:
    """One round of verification over the steps of a job.

    The *claim* of the job, ``root.claim``, confirms that no other job has taken the root. If
    ``root.ranks`` is not None, the round verifies only a *part* of each step, the files of these
    ranks. An *attempt* is the id of one incarnation of a job.

    Args:
        order: The job, and the steps that need no verification now.
        workers: The threads that read.
        report: Called with the result for each step, and with the progress.

    Thread safety: one thread calls all methods.
    """

    def __init__(self, order: Order, workers: Workers, report: OnReport) -> None:
        self._job, self._fresh_steps = order.job, frozenset(order.verified)
        self._workers, self._report = workers, report
        self._pace = Pace(order.job.scrub_mb_per_s)  # Sleeps to keep the rate
        self._errors: dict[str, str] = {}
        """The first error of each tier that cannot be verified as a whole, by the tier's URL."""
        self._silent_urls: set[str] = set()
        """The URLs of the tiers that do not answer or deny access. They are not asked again."""
        self._tiers: list[OpenTier] = []
        for index, settings in enumerate(order.job.tier_settings()):
            try:
                self._tiers.append(open_tier(order.job, index))
            except CkptError as error:
                self._errors[settings.url] = str(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tier in self._tiers:
            tier.backend.close()

    def run(self) -> Ended:
        """Verify the steps that are due, and mend damaged files: the newest step first, and each
        step on the nearest tier first.

        A ``CkptError`` is not raised. The outcome has the first one. ``RootInUse`` is only logged.
        """
        due: list[tuple[StepRef, _Root]] = []
        for tier in self._tiers:
            if not tier.in_memory and self._verifies(tier):
                self._run_task(tier, partial(self._add_due_steps, tier, due))

        def urgency(due_step: tuple[StepRef, _Root]) -> tuple[int, int]:
            ref, root = due_step
            return -ref.step, root.tier.index

        for ref, root in sorted(due, key=urgency):
            if root.tier.url not in self._silent_urls:
                self._run_task(root.tier, partial(self._scrub_step, root, ref))
        if self._errors:
            return Ended("failed", next(iter(self._errors.values())))
        return Ended("done")

    def _verifies(self, tier: OpenTier) -> bool:
        """Return True if the agent of this node verifies ``tier``, and not the agent of another
        node.
        """
        node_ranks = self._job.node_ranks
        return not node_ranks or tier.local or LEADER in node_ranks

    def _run_task(self, tier: OpenTier, work: Callable[[], None]) -> None:
        """Call ``work``, and note its ``CkptError`` for ``tier`` instead of raising it. Other tiers
        can then still be verified, and so can other steps of the tier, unless the tier does not
        answer or denies access.
        """
        try:
            work()
        except RootInUse as error:  # The agent of the job that owns the root verifies it
            _log.info("ckpt: %s is not verified: %s", tier.url, error)
        except CkptError as error:
            self._errors.setdefault(tier.url, str(error))
            is_silent = isinstance(error, AccessDenied | TransientStorageError)
            if is_silent and not isinstance(error, LinkRefused):
                self._silent_urls.add(tier.url)

    def _add_due_steps(self, tier: OpenTier, due: list[tuple[StepRef, _Root]]) -> None:
        """Append to ``due`` each step of ``tier`` that must be verified now, with the tier's root.

        These are the committed steps that the order does not list as verified. On a tier of this
        node alone, steps of other jobs are left out.

        Raises:
            RootInUse: The root belongs to another job, which is not known to have ended.
        """
        ranks = frozenset(self._job.node_ranks) if self._job.node_ranks and tier.local else None
        root = _Root(tier, Claim(tier.backend, self._job.owner), ranks)
        root.claim.use()
        refs = committed(tier.backend)
        if ranks is not None:  # An earlier job may have had other ranks on this node
            refs = [ref for ref in refs if ref.job == self._job.owner.attempt]
        due += [(ref, root) for ref in refs if f"{tier.url} {ref.folder}" not in self._fresh_steps]

    def _scrub_step(self, root: _Root, ref: StepRef) -> None:
        """Verify a step, mend it if it is damaged, report the result, and record it in the journals
        of the tiers. Report and record nothing if another process has removed the step meanwhile.
        """
        began, url = time.perf_counter(), root.tier.url
        faults, reason = dict[str, Fault](), ""
        report = self._verify(root, ref)
        while new_faults := {
            fault.key: fault for fault in report.faults if fault.key not in faults
        }:
            # Once a manifest or fragment is mended, more damage may become visible. The next pass
            # of this loop mends it.
            faults |= new_faults
            if is_committed(root.tier.backend, ref):
                mend = self._mend if root.ranks is None else self._mend_part
                reason = mend(root, ref, report.faults)
            report = self._verify(root, ref)
        if not is_committed(root.tier.backend, ref):
            return
        damaged_keys = {fault.key for fault in report.faults}
        damage = _damage_of(faults, damaged_keys, reason)
        mended_keys = tuple(key for key in faults if key not in damaged_keys)
        self._report(
            Verified(
                step=ref.step,
                tier=url,
                folder=ref.folder,
                nbytes=report.verified_bytes,
                seconds=time.perf_counter() - began,
                mended=mended_keys,
                damage=damage,
            )
        )
        for tier in self._tiers:
            # All nodes share the journal of a shared tier. So that journal gets no entry about a
            # step if this node verifies only its own part of the step.
            if root.ranks is None or tier.local:
                note_verified(url, ref.step, damage, journal=tier.url)

    def _verify(self, root: _Root, ref: StepRef) -> VerifyReport:
        """Compare a step with its checksums at the rate of the job, and report the progress."""
        last_bytes, url = 0, root.tier.url
        report = at_intervals(
            lambda done_bytes, total_bytes: self._report(
                Verifying(ref.step, url, done_bytes, total_bytes)
            )
        )

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal last_bytes
            report(done_bytes, total_bytes)  # before the pause, which may take long
            self._pace.spend(done_bytes - last_bytes)
            last_bytes = done_bytes

        return verify_step(
            root.tier.backend,
            ref,
            workers=self._workers,
            on_progress=progress,
            ranks=root.ranks,
        )

    def _mend(self, root: _Root, ref: StepRef, faults: Sequence[Fault]) -> str:
        """Write damaged files of a step again. Return why a file could not be mended; the text is
        empty if all files are mended. Raises ``RootInUse`` if another job has taken the root over.
        """
        try:
            mend_step(
                self._sources(root, ref),
                StepFolder(root.tier.backend, ref, self._workers),
                faults,
                codec=root.tier.tier.codec,
                confirm=root.claim.confirm_removal,
                on_bytes=self._pace.spend,
            )
        except RootInUse:
            raise
        except CkptError as error:
            return str(error)
        return ""

    def _mend_part(self, root: _Root, ref: StepRef, faults: Sequence[Fault]) -> str:
        """Write the files of each rank of this node that has a damaged file again. The manifest is
        not mended. Return and raise the same as ``_mend``.
        """
        sources, folder = (
            self._sources(root, ref),
            StepFolder(root.tier.backend, ref, self._workers),
        )
        reason, codec = "", root.tier.tier.codec
        keys = {fault.key for fault in faults} - {ref.manifest}
        folder_keys = (key for key in keys if key.startswith(f"{ref.folder}/"))
        ranks = {rank_of(key.rpartition("/")[2]) for key in folder_keys}
        if not ranks:
            return ""
        try:
            manifest, _ = read_packed(folder.backend, ref)
        except CkptError as error:
            return str(error)
        for fragment_ref in (part for part in manifest.fragments if part.rank in ranks):
            root.claim.confirm_removal()
            try:
                mend_rank(sources, folder, fragment_ref, codec, self._pace.spend)
            except CkptError as error:
                reason = reason or str(error)
        return reason

    def _sources(self, root: _Root, ref: StepRef) -> list[StorageBackend]:
        """Return the stores of the other tiers on which the step is committed, nearest first."""
        stores = [tier.backend for tier in self._tiers if tier is not root.tier]
        return [store for store in stores if _is_committed_on(store, ref)]


def _is_committed_on(store: StorageBackend, ref: StepRef) -> bool:
    """Return True if the step is committed on ``store``. Return False if it is not, or if the store
    fails.
    """
    try:
        return is_committed(store, ref)
    except CkptError:
        return False


def _damage_of(faults: Mapping[str, Fault], damaged_keys: Collection[str], reason: str) -> str:
    """Return a text about the damage that could not be mended; empty if all damage was mended.

    Args:
        faults: The faults that all passes have found, by the keys of their files.
        damaged_keys: The keys of the files that are still damaged.
        reason: Why a file could not be mended.
    """
    if not damaged_keys:
        return ""
    fault = next(fault for key, fault in faults.items() if key in damaged_keys)
    count_text = f" (and {len(damaged_keys) - 1} more)" if len(damaged_keys) > 1 else ""
    reason_text = f": {reason}" if reason else ""
    return f"{fault.key} {fault.what}{count_text}, and no tier could mend it{reason_text}"
