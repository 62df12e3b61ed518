"""Restore the newest intact step into the state, the same step on all ranks.

1. The leader lists the steps and proposes one.
2. Every rank matches the checkpoint with its state.
3. If the state fits on all ranks, every rank reads, each chunk from the nearest tier that has it
   intact. Read-through first stores files of farther tiers in the nearest folder.
4. After all ranks have read everything, plain values are set and objects are loaded. Before that,
   only the memory of tensors is changed.

If a rank needs a chunk that is intact on no tier, all ranks go on with the previous step.

A *candidate* is a committed step that may be proposed. A *rollback* is the record on the tiers that
the run goes on from an older step: it begins a new *branch*, and abandons the later steps. The
*heads* are the newest step of each attempt, and the *rivals* of a step are other committed attempts
at it. A *surplus* name of the checkpoint has no counterpart in the state. A *claim* is what a job
knows about a root, and says what the job may remove there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Final

import msgspec

from ckpt.catalog.branch_metrics import step_on
from ckpt.catalog.candidates import Candidate, candidates
from ckpt.catalog.finalize import Finisher
from ckpt.catalog.tiered_reader import Repair, SourceManifest, TieredReader
from ckpt.checks import check_bool
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.restore_rounds import DamageError, RestoreRounds
from ckpt.errors import CkptError, ConfigError, EntryUnexpected, NoCheckpoint, RestoreError
from ckpt.errors.base import few
from ckpt.events import CommitFinished, Observers, Repaired, Restored, StepDamaged
from ckpt.model.keys import StepRef, parse_folder
from ckpt.model.patterns import no_match_error
from ckpt.model.rollback import Rollback, heads_of, last_rollback
from ckpt.model.selector import NamedStep, Selector
from ckpt.model.values_by_level import without_collector
from ckpt.nodes.node_survey import NodeSurvey, Sources
from ckpt.nodes.wire import Peer
from ckpt.observe.metric_modes import modes_of_run
from ckpt.pipeline.chunk_reader import Sink
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.plan.copies_per_node import nearest_copies
from ckpt.plan.restore import RestorePlan, plan_restore
from ckpt.restore.read_through import CacheContext, ReadThrough, no_claim
from ckpt.restore.report import OVERWRITE_NOTE, RestoreReport, reasons_of, why_none
from ckpt.root.claim import Claim
from ckpt.state.match.broadcast import Broadcast, can_broadcast
from ckpt.state.match.match_state import match
from ckpt.state.match.matcher import StateMatch
from ckpt.state.match.selection import WHOLE_STATE, Selection
from ckpt.state.match.sink import TensorSink
from ckpt.state.walk.last_walk import LastWalk
from ckpt.storage.tiers import OpenTier

_PATIENCE_SECONDS: Final = 3600.0
"""How long ranks wait for each other in a restore. Reading may take this long on slow storage."""

_PATTERN_PREFIX: Final = "\0"
"""The prefix that marks a pattern in a list of names. No name begins with this character."""

_OVERFLOW_WARNING: Final = (
    "ckpt: cast=True: values of %s are beyond the range of the new dtype, and so infinite, NaN or "
    "its largest value now: restore these names into their own dtype"
)
_log = logging.getLogger("ckpt")


class _Proposal(msgspec.Struct, frozen=True):
    """The step that the leader proposes.

    Attributes:
        folder: The name of the folder of the step; empty if there is no step left to propose.
        nearest: The index of the nearest tier on which the step is committed.
        tiers: The indices of the tiers that may be asked for the step.
        peers: The records of all nodes about their parts of the step; empty if no tier is local.
        rejections: Pairs (step, reason) of newer steps that the leader has passed over since the
            last proposal, because they are not complete any more.
        finished_commits: Pairs (step, URL of the tier) of the commits that this restore has
            finished so far.
        broadcast: Whether the leader was called with ``broadcast=True``.
        rollback: The rollback that counts; None if there is none.
    """

    folder: str
    nearest: int
    tiers: tuple[int, ...]
    peers: tuple[Peer, ...] = ()
    rejections: tuple[tuple[int, str], ...] = ()
    finished_commits: tuple[tuple[int, str], ...] = ()
    broadcast: bool = False
    rollback: Rollback | None = None


@dataclass(frozen=True, slots=True)
class _Fit:
    """The manifest, the matched state, the restore plan and the caches, with which a rank reads a
    step that fits its state. ``cache`` is None if nothing is put into a nearer tier.
    """

    stored_step: SourceManifest
    state_match: StateMatch
    plan: RestorePlan
    cache: ReadThrough | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreContext:
    """The tiers, connections and threads that all restores of one manager share.

    Attributes:
        tiers: All tiers, nearest first.
        coordinator: The connection to the other ranks.
        listers: The threads that list tiers. Such a thread may still wait for a tier after a
            restore has ended.
        observers: The observers that get the events of the restore.
        steps_in_use: Returns the steps that saves under way still read from nearer tiers.
        rollback: The rollback that this job has made or found before; None if there is none. It may
            not be on the tiers yet.
        set_chosen: Called on the leader with each step before the ranks restore it.
        claim_of: Returns the claim of the running job on the root of a tier, by the URL of the
            tier; None if the job has not taken the root.
        last_walk: The results of the last walk over the state; None if there was none.
    """

    tiers: Sequence[OpenTier]
    coordinator: Coordinator
    listers: Workers
    observers: Observers
    steps_in_use: Callable[[], frozenset[StepRef]] = frozenset
    rollback: Rollback | None = None
    set_chosen: Callable[[StepRef], None] = lambda _: None
    claim_of: Callable[[str], Claim | None] = no_claim
    last_walk: LastWalk | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """The options that the user gives for a restore. See ``CheckpointManager.restore``.

    Attributes:
        evaluates: Whether the job does not go on from the step (``rollback=False``).
    """

    selection: Selection = WHOLE_STATE
    read_through: bool = True
    broadcast: bool = False
    evaluates: bool = False


class Restorer:
    """Performs one restore.

    Args:
        context: The tiers, connections and threads that all restores of the manager share.
        options: The options that the user gives.
        workers: The threads that read.
        serial: The number of this restore among the restores of the manager. It is a part of the
            subjects of the messages, since a subject can be used only once.

    Raises:
        ConfigError: ``options.broadcast`` is not a bool, or it is True and there is no process
            group of all ranks.

    Attributes:
        rollback: The rollback that counted when the step was chosen; None if there was none.
        heads: On the leader, the newest step of each attempt on any tier or under way.
        rivals: On the leader, the rivals of the step that was wanted (see ``rollback.is_newest``).
        outdated_tiers: On the leader, the shared tiers that lack ``rollback``, which another tier
            has.

    ``_filled_names`` are the names of the state that this restore may have overwritten so far, and
    ``_is_overwritten`` is True once it may have overwritten any. ``_selection`` says which names
    are restored, and how. ``_last_walk`` has the results of the last walk over the state.
    ``_is_broadcast`` is True if one rank reads what several ranks want.

    With ``_rounds``, all ranks get the leader's next proposal, or do the same work: if it fails on
    one rank, it fails on all. ``_listers`` are the threads that list tiers. See `RestoreContext`
    about the fields that are taken from it.

    The methods get ``node_survey``, what all nodes know of the steps on tiers of their own (None if
    there are no such tiers), and ``origin``, which reads the chunks of a step from the nearest tier
    that has them intact.

    Thread safety: only the training thread may use it. All ranks call ``restore`` alike.
    """

    def __init__(
        self, context: RestoreContext, options: RestoreOptions, workers: Workers, *, serial: int
    ) -> None:
        coordinator = context.coordinator
        self._tiers, self._coordinator, self._workers = context.tiers, coordinator, workers
        self._notify, self._listers = context.observers.notify, context.listers
        self._retry = RetryPolicy()
        self._read_through, self._selection = options.read_through, options.selection
        self._evaluates = options.evaluates
        self._steps_in_use, self._claim_of = context.steps_in_use, context.claim_of
        self._set_chosen, self._known_rollback = context.set_chosen, context.rollback
        self._last_walk = context.last_walk
        self._is_broadcast = _check_broadcast(options.broadcast, coordinator)
        self._rounds = RestoreRounds(
            coordinator, subject=f"restore/{serial}", patience=_PATIENCE_SECONDS
        )
        self._is_overwritten = False
        self._filled_names: list[str] = []
        self.rollback: Rollback | None = None
        self.heads: list[StepRef] = []
        self.rivals: tuple[StepRef, ...] = ()
        self.outdated_tiers: list[OpenTier] = []

    def restore(
        self, state: MutableMapping[str, Any], step: Selector | None
    ) -> RestoreReport | None:
        """Fill ``state`` from a checkpoint.

        Args:
            state: The state to fill.
            step: The selector of the step, which the leader resolves; None for the newest intact
                step.

        Returns:
            The report; None if ``step`` is None and there is no checkpoint.

        Raises:
            RestoreError: The state does not fit, no step is intact, an object of the state has
                raised an error while it was loaded, or another rank has failed. If no step is
                intact, the message says whether tensors may have been overwritten.
            FormatUnsupported: This ckpt cannot read the format of the step.
            NoCheckpoint: There is no step that ``step`` names.
            StorageError: The tiers cannot be listed, or a tier denies access or does not answer.
                Or the leader cannot resolve ``step``, and this is another rank.
            CommitTimeout: Other ranks have not answered in time.
            ConfigError: A pattern of the selection matches no name on any rank.
        """
        began = time.perf_counter()
        skips: list[tuple[int, str]] = []
        subject = f"{self._rounds.subject}/nodes"
        number = step if isinstance(step, int) else None
        node_survey: NodeSurvey | None = None
        if any(tier.is_node_local for tier in self._tiers):
            node_survey = NodeSurvey(self._tiers, self._coordinator, subject=subject, step=number)
        with node_survey or nullcontext():
            outcome = self._restore_first(state, step, skips, node_survey)
        if outcome is not None:
            state_match, report = outcome
            _apply(state_match, report.step)
            seconds = time.perf_counter() - began
            report = replace(report, seconds=seconds, skipped=tuple(skips))
            self._announce(report, is_empty=not state_match.leaves)
            return report
        urls = ", ".join(tier.url for tier in self._tiers)
        if not skips and step is None:
            if self._coordinator.rank == LEADER:  # A first start is normal, so this is no warning
                _log.info("ckpt: nothing is restored: there is no checkpoint in %s", urls)
            return None
        raise NoCheckpoint(urls, why_none(step, skips, self._is_overwritten))

    def _restore_first(
        self,
        state: MutableMapping[str, Any],
        step: Selector | None,
        skips: list[tuple[int, str]],
        node_survey: NodeSurvey | None,
    ) -> tuple[StateMatch, RestoreReport] | None:
        """Restore the first proposed step that is intact.

        The steps that were tried before are appended to ``skips``. Returns the matched state,
        whose plain values and objects are still to be set, and the report. Returns None if no step
        is intact.
        """
        proposals = (
            self._proposals(step, node_survey) if self._coordinator.rank == LEADER else iter(())
        )
        while (proposal := self._rounds.next(proposals, _Proposal)) is not None:
            skips += proposal.rejections
            self.rollback = proposal.rollback
            if not proposal.folder:
                break
            url, ref = self._tiers[proposal.nearest].url, _ref_of(proposal)
            try:
                return self._restore_proposal(state, proposal, node_survey)
            except RestoreError as misfit:
                if skips and self._is_overwritten:
                    reasons = f"{reasons_of(skips)}{OVERWRITE_NOTE}"
                    raise RestoreError(f"{misfit} ({reasons})") from misfit
                raise
            except DamageError as damage:
                _log.warning(
                    "ckpt: step %d on %s is damaged%s: %s",
                    ref.step,
                    url,
                    "" if isinstance(step, int) else ", and an earlier step is tried",
                    damage,
                )
                self._notify(StepDamaged(step=ref.step, tier=url, error=damage.__cause__ or damage))
                skips.append((ref.step, str(damage)))
        return None

    def _announce(self, report: RestoreReport, *, is_empty: bool) -> None:
        """Log the report, and notify the observers. ``is_empty`` is True if no tensor was read."""
        if report.uninitialised:
            _log.warning(
                "ckpt: these tensors are still on the meta device: %s",
                ", ".join(report.uninitialised),
            )
        if report.left_alone:
            _log.warning(
                "ckpt: step %d holds a part of a state: %d names keep their values (%s)",
                report.step,
                len(report.left_alone),
                few(report.left_alone),
            )
        if report.missing and is_empty:
            _log.warning(
                "ckpt: step %d has nothing of the state: all tensors kept what they had",
                report.step,
            )
        _log.info("ckpt: restored %s", report)
        for step, tier in report.finished:
            self._notify(CommitFinished(step=step, tier=tier))
        for repair in report.repaired:
            self._notify(Repaired(step=report.step, **asdict(repair)))
        self._notify(
            Restored(
                step=report.step, tier=report.tier, nbytes=report.nbytes, seconds=report.seconds,
                evaluates=self._evaluates,
            )
        )  # fmt: skip

    # -- the leader's choice -----------------------------------------------------------------------

    def _proposals(
        self, step: Selector | None, node_survey: NodeSurvey | None
    ) -> Iterator[_Proposal]:
        """Yield the steps to try, newest first. Only the leader calls this.

        If steps were passed over after the last of these, a proposal without a folder follows. It
        carries the reasons to all ranks. A candidate names stores by their positions in the list.
        While the stores are listed, commits of ended jobs that lack only the manifest are finished.
        The mode of a metric says whether its lowest or its highest value is the best.
        """
        stores = node_survey.stores() if node_survey else [tier.backend for tier in self._tiers]
        # A save under way may have nothing on any tier at the time of the listing.
        refs_in_use = self._steps_in_use()
        rejections: list[tuple[int, str]] = []
        finisher = Finisher(self._workers)  # Finishes the commits of jobs that have ended
        finish = node_survey.on_shared_tiers(finisher.finish) if node_survey else finisher.finish
        node_rollback = node_survey.rollback() if node_survey else None
        tier_settings, urls = zip(*((tier.tier, tier.url) for tier in self._tiers), strict=True)
        metric_modes = partial(modes_of_run, tier_settings, urls)
        number = step_on(stores, step, metric_modes) if isinstance(step, NamedStep) else step
        rollback = last_rollback([node_rollback, self._known_rollback])
        for candidate in candidates(
            stores, number, workers=self._listers, finish=finish, rollback=rollback
        ):
            node_heads = node_survey.heads() if node_survey else ()
            self.heads = heads_of([*candidate.heads, *node_heads, *refs_in_use])
            self.rivals = candidate.rivals
            if candidate.rollback is not None:
                self._judge_rollbacks(candidate, node_rollback, is_newest=step is None)
            if node_survey and (fault := node_survey.fault(candidate, stores)):
                _log.warning(
                    "ckpt: step %d is not whole, and another step is tried: %s",
                    candidate.ref.step,
                    fault,
                )
                rejections.append((candidate.ref.step, fault))
                continue
            self._set_chosen(candidate.ref)
            yield _Proposal(
                candidate.ref.folder,
                candidate.nearest,
                candidate.reachable,
                node_survey.peers(candidate.ref) if node_survey else (),
                tuple(rejections),
                tuple(finisher.finishes),
                self._is_broadcast,
                candidate.rollback,
            )
            rejections.clear()
        if rejections:
            yield _Proposal(
                "", 0, (), rejections=tuple(rejections), finished_commits=tuple(finisher.finishes)
            )

    def _judge_rollbacks(
        self, candidate: Candidate, node_rollback: Rollback | None, *, is_newest: bool
    ) -> None:
        """Note which tiers lack the rollback that counts, unless it waits for the first save of
        this job. Log a warning if the newest step has to be an abandoned one. ``node_rollback`` is
        the one that counts on the local tiers of all nodes.
        """
        rollback = candidate.rollback
        if last_rollback([node_rollback, *candidate.rollbacks.values()]) == rollback:
            self.outdated_tiers = [
                self._tiers[position]
                for position, tier_rollback in candidate.rollbacks.items()
                if tier_rollback != rollback
                and not (self._tiers[position].nodes or self._tiers[position].in_memory)
            ]
        if is_newest and rollback is not None and not rollback.keeps(candidate.ref):
            _log.warning(
                "ckpt: step %d was abandoned, and it is the newest step that is left: no step of "
                "the current branch is on any tier (`ckpt log` shows the branches)",
                candidate.ref.step,
            )

    # -- every rank's part -------------------------------------------------------------------------

    def _restore_proposal(
        self, state: MutableMapping[str, Any], proposal: _Proposal, node_survey: NodeSurvey | None
    ) -> tuple[StateMatch, RestoreReport]:
        """Match the proposed step with the state on all ranks, and then read it on all ranks.

        The sources are the stores that this rank may read from, including the stores of other
        nodes. The fit says what this rank reads: it has the manifest, the matched state, the plan
        and the cache.

        Returns:
            The matched state, whose plain values and objects are still to be set, and the report
            without ``seconds`` and ``skipped``.

        Raises:
            DamageError: Some rank needs data that is intact on no tier. All ranks raise this.
            RestoreError: The state does not fit on some rank. If the misfit was found while
                matching, nothing was changed on any rank.
        """
        ref = _ref_of(proposal)
        tiers = tuple(self._tiers[index] for index in proposal.tiers)
        sources = node_survey.sources(tiers, ref, proposal.peers) if node_survey else Sources(tiers)
        origin = TieredReader(
            [tier.backend for tier in sources.tiers], ref,
            retry=self._retry, on_repair=partial(_warn_of_repair, ref), partial=sources.partial,
        )  # fmt: skip
        # Names that no rank's state has, and patterns that match no name on any rank
        fit, surplus = self._rounds.do(
            "match",
            ref.step,
            lambda: self._fit(state, sources, origin, broadcast=proposal.broadcast),
            lambda fit: (
                *fit.state_match.surplus_names,
                *map(_as_pattern, fit.state_match.idle_patterns),
            ),
        )
        surplus_names = tuple(name for name in surplus if not name.startswith(_PATTERN_PREFIX))
        if unused_patterns := [name for name in surplus if name.startswith(_PATTERN_PREFIX)]:
            patterns = [pattern[1:].replace(_PATTERN_PREFIX, "/") for pattern in unused_patterns]
            raise no_match_error(patterns, map(str, state))
        if surplus_names and self._selection.strict:
            raise EntryUnexpected(surplus_names, ref.step)
        self._is_overwritten = True
        self._filled_names += fit.state_match.names
        reader = _Reader(fit, origin, self._workers)
        read_bytes, received_bytes = self._read_step(reader, fit, ref.step)
        if reader.sink.overflow_names:
            _log.warning(_OVERFLOW_WARNING, few(reader.sink.overflow_names))
        return fit.state_match, RestoreReport(
            step=ref.step,
            attempt=ref.attempt,
            tier=reader.main_url,
            nbytes=fit.plan.wanted_bytes,
            read_bytes=read_bytes,
            received_bytes=received_bytes,
            seconds=0.0,
            saved_world_size=fit.stored_step.manifest.world_size,
            skipped=(),
            repaired=origin.repairs,
            cached_bytes=fit.cache.cached_bytes if fit.cache else 0,
            missing=fit.state_match.missing,
            left_alone=fit.state_match.left_alone,
            unexpected=surplus_names,
            renamed=fit.state_match.renames,
            converted=fit.state_match.conversions,
            uninitialised=fit.state_match.meta_names,
            finished=proposal.finished_commits,
        )

    def _read_step(self, reader: _Reader, fit: _Fit, step: int) -> tuple[int, int]:
        """Read all data of the step into the tensors, on all ranks.

        Returns the number of bytes that this rank has read, and the number of bytes that it has
        received from other ranks.
        """

        def on_all_ranks(action: str, work: Callable[[], object]) -> None:
            """Do ``work`` on each rank. No names are compared between ranks."""
            self._rounds.do(action, step, work, lambda _: ())

        if not self._is_broadcast:
            on_all_ranks("read", lambda: reader.read_all(fit.plan))
            return fit.plan.read_bytes, 0
        on_all_ranks("cache", lambda: reader.fill_caches(replace(fit.plan, reads=())))
        broadcast = Broadcast(fit.plan, reader.sink, reader.read, workers=self._workers)
        broadcast.run(on_all_ranks)
        on_all_ranks("mend", reader.mend)
        return broadcast.read_bytes, broadcast.received_bytes

    def _fit(
        self,
        state: MutableMapping[str, Any],
        sources: Sources,
        origin: TieredReader,
        *,
        broadcast: bool,
    ) -> _Fit:
        """Match the state with the manifest, plan the reads, and look for files to fetch.

        This changes neither the state nor a tier.
        """
        if broadcast != self._is_broadcast:  # The ranks would wait for each other in other rounds
            raise ConfigError(
                f"broadcast={self._is_broadcast}, but rank {LEADER} has broadcast={broadcast}: "
                "give the same value on all ranks"
            )
        with without_collector():  # The garbage collector would only take time
            stored_step, state_match, plan = origin.try_manifests(
                partial(self._match, state, sources, origin)
            )
        context = CacheContext(
            coordinator=self._coordinator,
            subject=f"{self._rounds.subject}/fetch",
            patience=_PATIENCE_SECONDS,
            workers=self._workers,
            retry=self._retry,
            steps_in_use=self._steps_in_use,
            claim_of=self._claim_of,
        )
        filled_names, step = self._filled_names, stored_step.manifest.step
        if filled_names and (names := state_match.unrestored_names(filled_names)):
            raise RestoreError(
                f"step {step} lacks {few(names)}, which a newer and damaged step may have "
                f"overwritten: build the state again, and restore(state, step={step})"
            )
        cache: ReadThrough | None = None
        if self._read_through and not self._selection.is_part and len(sources.tiers) > 1:
            cache = ReadThrough(sources.tiers, origin, stored_step, context)
            cache.find_missing(plan)
        return _Fit(stored_step, state_match, plan, cache)

    def _match(
        self,
        state: MutableMapping[str, Any],
        sources: Sources,
        origin: TieredReader,
        stored_step: SourceManifest,
    ) -> tuple[SourceManifest, StateMatch, RestorePlan]:
        """Match the state with the manifest ``stored_step``, and plan the reads.

        Return the manifest with the needed fragments filled in, the matched state, and the plan.
        """
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        state_match = match(
            state, stored_step.manifest, rank=rank, world_size=world_size,
            selection=self._selection, last_walk=self._last_walk,
        )  # fmt: skip
        stored_step = origin.with_fragments(stored_step, state_match.leaves)
        plan = plan_restore(stored_step.manifest, state_match.leaves)
        # With ``broadcast``, all ranks must choose copies alike, so distance is ignored.
        distances = dict.fromkeys(sources.distance, 0) if self._is_broadcast else sources.distance
        if distances and any(distances.get(read.rank) != 0 for read in plan.reads):
            # A copy of the data on a nearer node may be in the file of any rank. Only the fragments
            # name such copies.
            stored_step = origin.with_fragments(stored_step, None)
            plan = plan_restore(stored_step.manifest, state_match.leaves)
            plan = nearest_copies(plan, stored_step.manifest, distances)
        return stored_step, state_match, plan


class _Reader:
    """Reads the data of a step that one rank wants, and counts the bytes by their tiers.

    The caches are nearer tiers into which whole files are copied first (read-through).

    Thread safety:
        One thread at a time.
    """

    def __init__(self, fit: _Fit, origin: TieredReader, workers: Workers) -> None:
        self._fit, self._origin, self._workers = fit, origin, workers
        self._nbytes = Counter({fit.stored_step.position: 0})

    @cached_property
    def sink(self) -> TensorSink:
        """The tensors of the state.

        ``fill_caches`` takes it first, in work that all ranks do together, so that they all learn
        of an error.
        """
        return TensorSink(self._fit.state_match.leaves, self._fit.state_match.targets)

    def fill_caches(self, plan: RestorePlan) -> RestorePlan:
        """Fill the caches. Return ``plan`` without the chunks that were copied to the state while
        the caches were filled.
        """
        sink = self.sink
        if (cache := self._fit.cache) is None:
            return plan
        rest = cache.fill(plan, sink)
        self._nbytes.update(cache.nbytes_by_source)
        return rest

    def mend(self) -> None:
        """Repair the caches."""
        if self._fit.cache is not None:
            self._fit.cache.mend()

    def read_all(self, plan: RestorePlan) -> None:
        """Fill the caches, read all of ``plan`` into the state, and repair the caches."""
        self.read(self.fill_caches(plan), self.sink)
        self.mend()

    def read(self, plan: RestorePlan, sink: Sink) -> None:
        """Read ``plan`` into ``sink``, and count the bytes by the tiers from which they came. A
        file that was fetched into a cache before came from a farther tier.
        """
        # For each tier, the part of the plan that was read there
        parts = self._origin.read(plan, sink, workers=self._workers)
        source_by_rank = self._fit.cache.source_by_rank if self._fit.cache is not None else {}
        for position, part in enumerate(parts):
            for read in part.reads:
                self._nbytes[max(position, source_by_rank.get(read.rank, 0))] += read.nbytes

    @property
    def main_url(self) -> str:
        """Return the URL of the tier from which most bytes came."""
        main_position = max(self._nbytes, key=lambda position: (self._nbytes[position], -position))
        return self._origin.sources[main_position].url


def _as_pattern(pattern: str) -> str:
    """Return ``pattern`` marked as a pattern. The result has no slashes, so that it does not count
    as a name below another name.
    """
    return _PATTERN_PREFIX + pattern.replace("/", _PATTERN_PREFIX)


def _check_broadcast(broadcast: bool, coordinator: Coordinator) -> bool:
    """Return True if one rank is to read the data that several ranks want, and broadcast it.

    Raises:
        ConfigError: ``broadcast`` is not a bool, or there is no process group with all ranks.
    """
    check_bool("broadcast", broadcast)
    if not broadcast or coordinator.world_size == 1:
        return False
    if not can_broadcast(coordinator.world_size):
        raise ConfigError(
            "broadcast=True needs torch.distributed with all ranks of this manager: call "
            "init_process_group() first"
        )
    return True


def _apply(state_match: StateMatch, step: int) -> None:
    """Set the plain values of the state, and load its objects."""
    try:
        state_match.apply()
    except CkptError:
        raise
    except Exception as error:
        raise RestoreError(
            f"step {step} was read, but an object of the state did not take its part: {error!r}"
        ) from error


def _ref_of(proposal: _Proposal) -> StepRef:
    ref = parse_folder(proposal.folder)
    assert ref is not None, proposal.folder
    return ref


def _warn_of_repair(ref: StepRef, repair: Repair) -> None:
    """Log a warning about a repair."""
    _log.warning(
        "ckpt: step %d: %s does not have it intact, the next tier is asked: %s",
        ref.step,
        repair.tier,
        repair.reason,
    )
