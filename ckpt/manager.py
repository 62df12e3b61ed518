"""``CheckpointManager``, the class with which a training script saves and restores its state.

The manager divides its work. The *saver* writes to the tiers on background threads, and knows the
steps of the job (``saver.steps``). The *ledger* has the handle of each save, and its error until a
call has raised it; a save is *kept* once a tier has its step. The *fence* holds an optimizer's step
until the copies of its tensors have ended. The *origin* is the step from which the job continues.
The *guard* refuses calls that are not possible now. *Listers* are threads that list tiers.

An *attempt* is one incarnation of the job. It may try a step again: the *trial* is the number of
such a further try, and 0 for the first try. A ``StepRef`` names a step of one attempt and trial. A
*plan* says where each tensor stands in the *image*, this rank's part of the state in host memory,
and a *slot* is a buffer for an image. A *walk* collects the tensors of a state, and the *live* part
of a state is the part in which it may find some. The *owner* of a root, the folder or URL of a
tier, is the job that may write to it, and a *claim* is what a job knows of that. If a job goes on
from an older step, a *branch* begins, and the later steps are *abandoned*. A *rollback* is the
record of this on the tiers.

``_requests`` makes the request of a save, which tells the saver what to write. ``_plans`` makes the
plan of a save, or takes the plan of an earlier save. ``_reserver`` makes slots before a save needs
them. ``_last_step`` is the number of the last step that was saved or restored, and ``_newest_ref``
the newest save that the saver has begun. ``_goes_on_from_parts`` is True for a subclass that
continues from a step of which it has restored only a part. ``_stop`` listens for a planned stop,
and ``_closer`` ends all of this.

The walk gives the ``parts`` of a state, its ``optimizers``, and the patterns that fit no name
(``idle_patterns``). ``_plans`` prepares the plan for them, and the *snapshot*, which copies the
state into a slot. A *hand-over* passes the snapshot on to the threads of the saver, and can be
called off until they have begun to write. ``saver.suspicions`` looks for signs that training is
*dead*, such as tensors that do not change. *Deltas* are the differences to the last step. A
*selector* names a step by its number, its place in the history, or a metric.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, Final, NoReturn, Self, Unpack

import torch

from ckpt.agent.registration import register
from ckpt.catalog.branch_metrics import MetricsReader, branch_metrics
from ckpt.catalog.late_metrics import add_metrics
from ckpt.catalog.step_listing import Listing
from ckpt.closing import Closer, Holdings
from ckpt.config import Metadata, Mode, SaveConfig, Settings, load_config, with_settings
from ckpt.coordination.coordinator import LEADER, Coordinator
from ckpt.coordination.leaving import own_coordinator
from ckpt.coordination.node_commits import agree
from ckpt.coordination.torch_store import find_coordinator
from ckpt.elastic.manager_calls import CallGuard, one_at_a_time
from ckpt.elastic.planned_stop import StopSignals
from ckpt.elastic.stop_listener import StopListener
from ckpt.errors import CkptError, ConfigError, ManagerClosed, SaveSkipped, StepExists
from ckpt.errors.storage import with_short_traceback
from ckpt.events import MetricsAdded, Observer, Observers
from ckpt.model.keys import StepRef, step_of
from ckpt.model.metrics import METRICS, Metrics, as_metrics
from ckpt.model.patterns import Names, Patterns, no_match_error, patterns_for
from ckpt.model.selector import BestStep, resolve, selector_of
from ckpt.observe.journal import default_journal, journals_of
from ckpt.observe.metric_modes import modes_of_run
from ckpt.pending import PendingSave, SaveRecord
from ckpt.pipeline.workers import Workers, close_at_exit, has_script_ended
from ckpt.restore.branch import BranchPoint, begin_branch, share_rollback
from ckpt.restore.report import RestoreReport
from ckpt.restore.restorer import RestoreContext, RestoreOptions, Restorer
from ckpt.root.owner import attend
from ckpt.save.active_save import EARLIER_FAILED, NO_SLOT, HandOver, MissedSteps, Reports
from ckpt.save.ledger import SaveLedger
from ckpt.save.reserver import Reserver
from ckpt.save.save_request import SaveRequests
from ckpt.save.saver import Saver
from ckpt.staging.fence import Fence
from ckpt.state.match.selection import Rename, Selection
from ckpt.state.walk.collect import collect
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.plan_cache import PlanCache
from ckpt.state.walk.restored_step import Origin
from ckpt.state.walk.state_objects import StateView, without_plain
from ckpt.storage.tiers import Tiers, as_tiers, closed_on_error, open_tiers
from ckpt.torch_private import warn_of_untested

_log = logging.getLogger("ckpt")
_READERS: Final = 4  # A restore has the machine to itself, so it may use more threads than a save


class CheckpointManager:
    """Saves a training state while training goes on, and restores the newest intact state.

    Under ``torch.distributed`` every rank builds a manager after ``init_process_group``, and all
    ranks make the same calls of ``save_async``, ``restore`` and ``close``. A manager makes no
    process group. By default the ranks exchange messages through the store (such as a TCPStore) of
    the default process group.

    Args:
        tiers: A folder or URL, a `Tier`, or several of these, nearest first.
        config: The settings of saves (`SaveConfig`). Its fields may also be given as keywords:
            ``on_busy="skip"``.
        metadata: JSON values that every manifest keeps.
        observers: Functions that are called with each event (see `ckpt.events`), also from
            background threads. They must not block.
        coordinator: Carries messages between ranks. By default the manager finds one for the job.

    Raises:
        ConfigError: A setting or URL is wrong. Nothing was written.
        UnsupportedValue: ``metadata`` is not made of plain values.
        CommitTimeout: There is a local tier or an agent, and some rank did not build
            its manager within 300 s.
        CommitError: The job's store cannot be reached.
        AgentError: ``agent="required"``, and there is no agent.
        ThreadLimit: The system starts no more threads.
        ManagerClosed: The main thread has ended, so that no thread may be started.

    Thread safety:
        Call all methods from the training thread, except for ``request_stop``, which any thread may
        call. While ``save_async``, ``restore`` or the begin of ``save`` is interrupted by a signal
        handler, these methods and ``close`` raise `ConfigError` in the handler.
    """

    _goes_on_from_parts: ClassVar[bool] = False
    """Whether the job continues from a step of which it has restored only a part."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        config: SaveConfig | None = None,
        metadata: Metadata | None = None,
        observers: Sequence[Observer] = (),
        coordinator: Coordinator | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        if has_script_ended():
            raise ManagerClosed(has_script_ended=True)
        warn_of_untested(torch.__version__)
        self._guard = CallGuard()
        self._config = with_settings(config or SaveConfig(), settings)
        self._requests = SaveRequests(metadata or {})
        self._tiers = open_tiers(as_tiers(tiers))
        with closed_on_error(self._tiers):
            self._coordinator = own_coordinator(coordinator or find_coordinator())
            self._tiers = agree(self._tiers, self._coordinator, self._config.tls)
            make_journal = partial(default_journal, self._tiers, self._coordinator.rank)
            journals = journals_of(self, observers, make_journal if self._config.journal else None)
            self._observers = Observers(list(dict.fromkeys((*observers, *journals))))
            self._ledger = SaveLedger(self._observers, self._config, self._tiers)
            self._listing = Listing([tier.backend for tier in self._tiers], self._guard.check_open)
            self._metrics = [MetricsReader(tier.backend) for tier in self._tiers]
            missed_steps = MissedSteps(tier.url for tier in self._tiers if tier.in_memory)
            reports = Reports(self._ledger, self._observers, missed_steps)
            notify = self._observers.notify
            self._agent = agent = register(self._config, self._tiers, self._coordinator, notify)
            try:
                self._saver = Saver(self._tiers, self._coordinator, self._config, reports, agent)
            except BaseException:
                if self._agent is not None:
                    self._agent.forget()
                raise
        attend(self._coordinator.attempt, self, self._ledger)
        self._fence, self._last_walk, self._origin = Fence(), LastWalk(), Origin(self._coordinator)
        walk, captured = self._last_walk, self._fence.captured_optimizers
        rank = self._coordinator.rank
        self._collect = partial(collect, rank=rank, last_walk=walk, captured=captured)
        self._plans = PlanCache.of(self._coordinator.rank, self._config, self._tiers)
        collect_lasting = partial(self._collect, lasting=True)
        self._reserver = Reserver(self._saver, self._plans, walk, collect_lasting, self._config)
        self._last_step: int | None = None
        self._newest_ref: StepRef | None = None  # The newest save that the saver has begun
        self._restore_count = 0
        self._stop = StopListener(self._coordinator)
        # These threads outlive a restore, which must not wait for a tier that does not answer.
        self._listers = Workers("list", 4 * len(self._tiers))
        self._fence.listen()  # A graph that captures a step before the first save may replay it
        self._closer = Closer(
            Holdings(
                config=self._config, tiers=self._tiers, coordinator=self._coordinator,
                saver=self._saver, ledger=self._ledger, agent=agent, guard=self._guard,
                stop=self._stop, listers=self._listers, fence=self._fence, plans=self._plans,
                last_walk=self._last_walk, journals=journals,
            )
        )  # fmt: skip
        close_at_exit(self)

    @property
    def skipped(self) -> int:
        """The number of saves that were skipped, such as for lack of a free slot
        (``on_busy="skip"``). See `SaveSkipped`.
        """
        return self._ledger.skipped

    @property
    def failed(self) -> int:
        """The number of saves that have failed. Skipped saves do not count."""
        return self._ledger.failed

    @classmethod
    def from_config(
        cls, path: str | os.PathLike[str] | None = None, **settings: Unpack[Settings]
    ) -> Self:
        """Return a manager as the file ``path``, or ``./ckpt.toml``, describes it.

        Raises:
            ConfigError: There is no file, the file is not valid, or it names no tier.
        """
        config = load_config(path)
        if not config.tiers:
            if config.path is None:
                raise ConfigError(
                    f"there is no ckpt.toml in {os.getcwd()}: give the path of a file"
                )
            raise ConfigError(f'{config.path} names no place: write root = "..." or [[tiers]]')
        return cls(config.tiers, config=config.save, metadata=config.metadata, **settings)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Reserve host memory for saves of ``state`` in the background, so that the first save is
        as fast as the later ones.

        For a state with an optimizer, ``restore`` does the same, whether it has found a checkpoint
        or not, but only logs errors. Memory for optimizer state that does not exist yet is reserved
        too.

        Raises:
            HostMemoryExhausted: There is not enough memory, even for a slot that is smaller than an
                image. Without this call, the first save raises this error.
            CkptError: The state cannot be saved.
        """
        self._guard.check_open()
        self._reserver.reserve(state)

    # -- saving ------------------------------------------------------------------------------------

    def save_async(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        metrics: Metrics | None = None,
        only: Names = None,
        exclude: Names = None,
        final: bool = False,
    ) -> PendingSave:
        """Save ``state`` as ``step`` in the background.

        On return, everything in ``state`` may be changed except for the parameters and the state of
        its optimizers. Only the optimizers' own ``step()`` may change these tensors, since it waits
        for the copy. Call ``fence`` before any other change, or set ``overlap="off"``.

        Args:
            state: A nested dict of tensors, DTensors, modules, optimizers, NumPy arrays, objects
                with ``state_dict``, generators of torch, NumPy and Python, plain values and
                `PerRank`.
            step: Defaults to ``state["step"]`` if that is an int, and otherwise to the last step
                plus one.
            metrics: Numbers by name, such as ``{"loss": 1.2}``, for ``Tier(keep_best=...)``. Only
                the metrics that rank 0 gives are kept.
            only: The part of ``state`` to save: names (with all names below them), or patterns like
                ``"model/*lora*"``, as for ``restore``. All ranks must give the same value. If any
                state of an optimizer is saved, its settings are saved too.
            exclude: Names and patterns to leave out. If a parameter is left out, the state that an
                optimizer has of the parameter is left out too.
            final: Whether this is the last step of the run, so that every tier takes it, whatever
                its ``every`` is. All ranks must give the same value.

        Returns:
            The handle of the save.

        Raises:
            CkptError: The state cannot be saved, or an earlier save has failed and its error was
                not raised yet (unless ``on_error="warn"``). If some tier has that earlier step,
                this save has begun all the same.
            ConfigError: A pattern fits no name of the state. With more than one rank the call does
                not raise this error, since another rank may have the name. If no rank has the name,
                the save fails with the error.
        """
        pending = self._begin(state, step, metrics, only, exclude, final=final)
        if pending.step != self._saver.steps.last_step:  # For the last step, close() raises errors
            self._ledger.raise_unreported(but=pending)
        return pending

    @one_at_a_time("save_async")
    def _begin(
        self,
        state: Mapping[str, Any],
        step: int | None,
        metrics: Metrics | None,
        only: Names,
        exclude: Names,
        *,
        final: bool,
    ) -> PendingSave:
        """Begin a save, and return its handle.

        If an error prevents the save, this rank votes that its part of the step has failed, so that
        the other ranks do not wait.
        """
        began = time.perf_counter()
        self._guard.check_open()
        view = StateView.of(state)
        if restored_ref := self._origin.save(view.live):
            # This state is from ``restored_ref``, and a later restore has filled another state.
            self._continue_from(restored_ref, removes=False)
        last_step, step = self._last_step, step_of(state, step, last=self._last_step)
        self._last_step = step
        if last_step is not None and step < last_step and self._coordinator.rank == LEADER:
            _log.warning(
                "ckpt: step %d is saved after step %d: a restore takes the highest number",
                step,
                last_step,
            )
        is_planned_stop = self._stop.signals is not None and self._stop.signals.requested(step)
        if final or is_planned_stop:
            self._saver.steps.last_step = step
            if is_planned_stop and (pending := self._ledger.save_of(step)) is not None:
                return pending  # The training loop has already saved this step
        trial = self._ledger.next_trial(step)
        # Each further try at a step has a folder of its own, since a folder that may be committed
        # is never written to again.
        ref = StepRef(step, self._coordinator.attempt)
        if trial:
            ref = ref.retry(trial)
        reason = EARLIER_FAILED
        try:
            if step != self._saver.steps.last_step:  # No earlier error may prevent the last save
                # The error of a farther tier must not cost this step.
                self._ledger.raise_unreported(includes_kept=False)
            reason = ""
            if self._ledger.has(step):
                raise StepExists(step, self._tiers[0].url)
            patterns = patterns_for(only, exclude)
            checked_metrics = as_metrics(metrics) if metrics else {}
            notes = (
                {METRICS: checked_metrics}
                if checked_metrics and self._coordinator.rank == LEADER
                else {}
            )
            return self._save(view, ref, trial, began, notes, patterns)
        except BaseException as error:
            # The other ranks must not wait for this one, so it votes that its part has failed.
            if self._coordinator.world_size > 1 and self._newest_ref != ref:
                self._saver.give_up(ref, trial, reason or f"{type(error).__name__}: {error}")
            if not self._ledger.warns_of(error):  # True only with on_error="warn"
                raise
            return self._ledger.failed_save(step, error, has_begun=self._newest_ref == ref)

    def save(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        metrics: Metrics | None = None,
        only: Names = None,
        exclude: Names = None,
        final: bool = False,
        timeout: float | None = None,
    ) -> PendingSave:
        """Save ``state`` as ``save_async`` does, wait for the commit, and return the handle.

        The call raises the errors of ``save_async`` and ``PendingSave.result``. With
        ``on_error="warn"`` it raises no error of a save: ``PendingSave.exception`` returns it.
        """
        pending = self._begin(state, step, metrics, only, exclude, final=final)
        if self._config.on_error == "warn":
            pending.exception(timeout)
        else:
            pending.result(timeout)
        self._ledger.raise_unreported()
        return pending

    def add_metrics(self, step: int, metrics: Metrics) -> None:
        """Add ``metrics`` to ``step`` after its save, for ``Tier(keep_best=...)``.

        It is enough if one rank calls this. Several ranks may call it with the same numbers. With
        local tiers, one rank of each node must call it. On return the metrics are durable on each
        durable tier that has the step. If the save of the step is under way, the call waits for its
        end. The step also keeps the metrics that were given to the save. No metric can be changed.

        Args:
            step: A step that is on a tier, of this job or of an earlier one.
            metrics: Numbers by name, as for ``save_async``.

        Raises:
            ConfigError: No durable tier has the step, the step already has one of the metrics with
                another value, or a value is no number. Nothing was written.
            StorageError: A tier does not answer. The call may be repeated.
        """
        self._guard.check_open()
        step, checked_metrics = step_of({}, step, last=None), as_metrics(metrics)
        self._ledger.await_end(step)
        durable = [tier.backend for tier in self._tiers if not tier.in_memory]
        add_metrics(durable, step, checked_metrics, own=self._coordinator.attempt)
        self._observers.notify(MetricsAdded(step=step, metrics=checked_metrics))

    def fence(self) -> None:
        """Wait until the saves under way have copied their tensors. On return, any code may change
        these tensors.

        Raises:
            CkptError: A save could not copy its tensors, or an earlier save has failed and its
                error was not raised yet.
        """
        self._guard.check_open()
        self._fence.wait()
        for pending in self._ledger.pending:
            if not pending.done():
                try:
                    pending.wait_staged()
                except CkptError as error:
                    if not self._ledger.warns_of(error):  # Otherwise the end of the save reports it
                        raise
        self._ledger.raise_unreported()

    # -- finding and restoring ---------------------------------------------------------------------

    @with_short_traceback
    @one_at_a_time("restore")
    @torch.inference_mode(False)
    def restore(
        self,
        state: MutableMapping[str, Any],
        step: int | str | None = None,
        *,
        only: Names = None, exclude: Names = None, rename: Rename | None = None,
        cast: bool = False, strict: bool = True, read_through: bool = True, broadcast: bool = False,
        rollback: bool = True, discard_newer: bool = False,
    ) -> RestoreReport | None:  # fmt: skip
        """Fill ``state`` with ``step``, or with the newest intact step.

        Each chunk comes from the nearest tier that has it intact. If a chunk of a step is intact on
        no tier, the restore takes the next older step instead. The log and the report name each
        file that a tier did not have intact, and each step that was damaged. All ranks restore the
        same step or none.

        The training continues from the step that was restored last. A restore does not count if it
        fills a part of the state (``only``, ``exclude``), or other tensors than those that are
        saved. If ``step`` is older than others, a branch begins: no later restore takes the steps
        after it for the newest, even if this job saves nothing. Their numbers may be saved again.

        Args:
            state: The state in the form in which it was saved.
            step: The only step to restore: its number, ``"best:loss"`` for the best value of a
                metric (see ``best``; ``"best:loss:max"`` for the largest), or ``"latest~3"`` for
                the step that is three checkpoints older than the newest, or ``"branch:NAME"`` (see
                `ckpt branch`). None: the newest intact step. If the save of this step is under way,
                the call waits until a tier has it or the save fails: for the newest step
                at most half a minute, else at most ``commit_timeout_seconds``. For ``best`` and
                ``latest~3``, it waits for all saves under way.
            only: Names (with all names below them), or patterns such as ``"model/*"`` (``*``
                matches slashes and dots too). Other names keep their values, and need not be in
                ``state``.
            exclude: Names and patterns of what keeps its values. If a parameter is excluded, the
                state that an optimizer has of the parameter keeps its values too.
            rename: Names in the state -> names in the checkpoint: a dict such as
                ``{"model/encoder.*": "model/backbone.*"}`` (see `RenameRules`), or a function. If a
                parameter is renamed, the optimizer's state of the parameter is renamed too.
            cast: Whether floats may change their dtype, and integers may become wider. If False,
                a dtype that differs from that in the checkpoint is an error.
            strict: Whether state and checkpoint must have the same names. Otherwise the report
                lists names that are ``missing`` in the checkpoint, which keep their values, and
                ``unexpected`` ones.
            read_through: Whether data of farther tiers is put into the nearest folder, once for all
                ranks of a node, so that the next restore is local. It has no effect if a part is
                restored.
            broadcast: Whether one of the ranks that want the same bytes reads them and broadcasts
                them over gloo, for a store that is slower than the network. Otherwise each of them
                reads.
            rollback: Whether the job goes on from the step, so that the restore of an older
                ``step`` begins a branch. Give False to evaluate: the restore begins none, and does
                not count as one of a training, for which `ckpt rm` and `ckpt rollback` wait. A
                restore beside a job that is alive, or that may be alive on another machine, begins
                no branch before this manager saves.
            discard_newer: Whether the steps that the branch abandons are removed at once, on all
                durable tiers. They cannot be restored any more. Pinned steps stay.

        Returns:
            The report, or None if ``step`` is None and there is no checkpoint at all.

        Raises:
            RestoreError: State and checkpoint do not fit. The state is unchanged. Or ``step`` does
                not exist, or no step is intact. The message then says whether tensors were
                overwritten.
            StorageError: The tiers cannot be listed.
            CommitTimeout: Some ranks did not answer in time.
            FormatUnsupported: The step is in a format that this ckpt does not read.
            ConfigError: ``only``, ``exclude`` or a rule of ``rename`` matches nothing, or an
                argument is invalid.
        """
        self._guard.check_open()
        selector = selector_of(step)
        selection = Selection.of(only, exclude, strict=strict, rename=rename, cast=cast)
        if discard_newer and (selector is None or selection.is_part or not rollback):
            raise ConfigError(
                "discard_newer=True goes with the restore of a whole older step: give step=, and "
                "neither only=, exclude= nor rollback=False"
            )
        options = RestoreOptions(
            selection=selection, read_through=read_through, broadcast=broadcast,
            evaluates=not rollback,
        )  # fmt: skip
        Fence.wait_for_all()  # A copy under way must not read what is restored
        self._ledger.await_restorable(selector)
        readers = Workers("read", max(_READERS, self._config.threads))
        with (
            self._saver.owner_warnings(
                self._listers, for_newest=selector is None, evaluates=not rollback
            ),
            readers as workers,
            self._last_walk.forget_on_error(),
        ):
            context = RestoreContext(
                tiers=self._tiers, coordinator=self._coordinator, listers=self._listers,
                observers=self._observers, steps_in_use=self._saver.steps.awaited_refs,
                claim_of=self._saver.claim_of, set_chosen=self._saver.set_chosen,
                rollback=self._saver.steps.rollback, last_walk=self._last_walk,
            )  # fmt: skip
            restorer = Restorer(context, options, workers, serial=self._restore_count)
            self._restore_count += 1
            report = restorer.restore(state, selector)
            if restorer.outdated_tiers:  # Some tiers lack the newest rollback
                share_rollback(restorer.outdated_tiers, self._listers, restorer.rollback)
        live_state = without_plain(state)
        if report is not None:
            ref = StepRef(report.step, report.attempt)
            self._saver.steps.rollback = restorer.rollback
            is_start_of_job = selector is None and self._last_step is None
            counts_as_part = selection.is_part and not self._goes_on_from_parts
            # True if the job continues from this step
            if self._origin.restore(
                ref, live_state, is_part=counts_as_part, is_first=is_start_of_job
            ):
                if selector is not None and rollback and not counts_as_part:
                    self._begin_branch(ref, restorer, context, discards=discard_newer)
                self._continue_from(ref, removes=not counts_as_part)
        self._reserver.reserve_quietly(live_state)
        return report

    def _begin_branch(
        self, ref: StepRef, restorer: Restorer, context: RestoreContext, *, discards: bool
    ) -> None:
        """Abandon the steps after ``ref``, if there are any. All ranks call this.

        Args:
            ref: The step from which the job goes on.
            restorer: What has restored it. It knows the newest step of each attempt (``heads``),
                and the steps that may be newer than ``ref`` (``rivals``).
            context: The tiers, connections and threads of the restore.
            discards: Whether the abandoned steps are removed now.
        """
        point = BranchPoint(
            ref=ref,
            heads=restorer.heads,
            rivals=restorer.rivals,
            last_rollback=restorer.rollback,
            trial=self._ledger.next_branch_trial,
            is_certain=self._origin.is_certain,
        )
        subject = f"branch/{self._restore_count}"
        rollback = begin_branch(context, point, subject=subject, discards=discards)
        if rollback is not None:
            self._saver.steps.rollback = rollback
            self._ledger.begin_branch(rollback)

    def _continue_from(self, ref: StepRef, *, removes: bool = True) -> None:
        """Note that the training continues from the state of ``ref``.

        Args:
            ref: The step.
            removes: Whether other steps of earlier jobs are removed from memory now, and not at the
                first commit. A caller that has looked at a part of ``ref`` may yet load another.
        """
        self._last_step = ref.step
        self._saver.set_restored(ref, removes=removes)

    def steps(self) -> list[int]:
        """Return the committed steps on any tier, ascending: the lineage of the newest one, since
        abandoned steps are not among them. A step whose manifest is damaged on all tiers is not
        either.

        The call lists all tiers, and reads each manifest once, so it is too slow for every training
        step.
        """
        return self._listing.steps(self._saver.steps.rollback)

    def latest_step(self) -> int | None:
        """Return the newest committed step on any tier, or None if there is none."""
        return self._listing.latest(self._saver.steps.rollback)

    @with_short_traceback
    def best(self, metric: str, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best value of ``metric`` on any tier, or None if no
        step has a finite value.

        NaN and infinite values are never the best. Of equal values, that of the newer step is.
        Abandoned steps do not count. Metrics that ``add_metrics`` has added count. The call lists
        all tiers, and reads each manifest once, as ``steps`` does.

        Args:
            metric: The name of a metric.
            mode: Whether the smallest ("min") or the largest values ("max") are the best. None: as
                ``Tier(keep_best=...)`` of this job or of an earlier one says, or else the smallest
                of a metric with "loss" in its name.

        Raises:
            ConfigError: Other metrics are there and this one is not, or ``mode`` is needed.
            StorageError: A tier denies access or does not answer.
        """
        self._guard.check_open()
        selector = BestStep(metric, mode)
        metrics_by_tier = [reader.read(selector) for reader in self._metrics]
        urls = (tier_metrics.url for tier_metrics in metrics_by_tier)
        modes = modes_of_run((tier.tier for tier in self._tiers), urls)
        return resolve(selector, branch_metrics(metrics_by_tier), modes)

    # -- the end -----------------------------------------------------------------------------------

    def on_signals(
        self, *signals: int, grace_seconds: float = 25.0, reraise: bool = True
    ) -> StopSignals:
        """Handle SIGTERM and SIGUSR1 (or ``signals``) from now on. All ranks call this.

        After a signal on any rank, ``requested(step)`` of the returned object becomes True on all
        ranks after the same step. The loop must then save that step and end. This save goes to
        every tier, and waits for a slot even with ``on_busy="skip"``. ``close`` raises the signal
        again when all saves have ended, so that the process ends as it would have ended without
        ckpt. With ``reraise=False`` it only returns. If ``close`` has not ended ``grace_seconds``
        after the signal, the process is ended. See `ckpt.elastic.planned_stop.StopSignals`.

        Raises:
            ConfigError: The call is not in the main thread, an argument is invalid, or a manager
                already listens for a stop.
            ThreadLimit: The system starts no more threads.
        """
        self._guard.check_open()
        return self._stop.on_signals(signals, grace_seconds, reraise=reraise, owner=self)

    def on_stop_request(self) -> StopSignals:
        """Listen for ``request_stop`` on any rank, and handle no signal. All ranks call this.

        Unlike ``on_signals``, this need not be called in the main thread. After ``on_signals`` it
        is not needed, and returns the same object. ``requested(step)`` of the returned object works
        as after ``on_signals``.

        Raises:
            ThreadLimit: The system starts no more threads.
        """
        self._guard.check_open()
        return self._stop.on_stop_request(owner=self)

    def request_stop(self, deadline: float | datetime | None = None) -> None:
        """Stop all ranks after the same step, as a signal to ``on_signals`` does.

        This is for preemptions that no signal announces. It is enough if one rank calls it, and
        further calls do no harm. Any thread may call it. The call returns at once. Later
        ``requested(step)`` becomes True, and ``close`` returns after the last save.

        Args:
            deadline: Seconds from now, or a datetime with a time zone. At that time every rank that
                has not closed its manager is ended by SIGTERM. None: no rank is ended.

        Raises:
            ConfigError: Neither ``on_signals`` nor ``on_stop_request`` was called before. Or the
                deadline is in the past, or of a wrong type.
        """
        self._guard.check_open()
        self._stop.request(deadline)

    def close(self, timeout: float | None = None, *, detach: bool = False) -> None:
        """Finish every save, and free memory and threads. A second call does nothing, unless Ctrl-C
        has interrupted the first call. Then the second call completes the first one, with the
        ``detach`` of the first. If Ctrl-C ended a ``with`` block, and the process goes on, a
        further call waits until what the end of the block has given up is over.

        If the call takes more than two seconds, it logs for each tier how many steps it waits for.
        While an exception ends the process (see `ckpt.elastic.ending_error`), ``timeout`` defaults
        to ``exit_seconds``, and saves that are given up are logged and not raised. A job with an
        agent is then left to the agent, as with ``detach``.

        Args:
            timeout: How many seconds to wait. Saves that are not finished by then are given up.
                Threads that wait for a store end by themselves.
            detach: Whether to return once the nearest durable tier has all steps that it takes. The
                agent copies the steps to farther tiers. All ranks must give the same value.

        Raises:
            ConfigError: ``detach`` is True, and the manager has ``agent="off"``. The manager is
                still open.
            AgentError: ``detach`` is True, and there is no agent. If the job had none, the manager
                is still open. Otherwise it is closed, and a nearer tier has the steps.
            StepsMissing: A tier lacks steps that were to go there, and no call has raised their
                errors yet.
            CkptError: A save has failed on all tiers, or was suspicious
                (``on_suspicious="raise"``), and no call has raised its error yet.
        """
        error = self._closer.check(timeout, detach=detach)
        self._closer.close(error, timeout, detach=detach)

    def __repr__(self) -> str:
        count = sum(not save.done() for save in self._ledger.pending)
        state = "closed" if self._guard.is_closed else f"{count} saves under way"
        step = "" if self._last_step is None else f", step {self._last_step}"
        return f"<CheckpointManager {', '.join(tier.url for tier in self._tiers)}{step}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a CheckpointManager cannot be copied or pickled: build one in each process"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._closer.close(error)
        except CkptError as close_error:
            if error is None:
                raise
            _log.error("ckpt: %s", close_error)  # The error of the ``with`` block is raised instead

    # -- inside ------------------------------------------------------------------------------------

    # Code outside of inference mode may not write to views that were made in this mode.
    @torch.inference_mode(False)
    def _save(
        self,
        view: StateView,
        ref: StepRef,
        trial: int,
        began: float,
        notes: Metadata,
        patterns: Patterns,
    ) -> PendingSave:
        """Make the snapshot of the state, and hand the save to the background threads.

        Args:
            view: The state.
            ref: The step.
            trial: The number of the try at the step.
            began: ``time.perf_counter()`` at the call.
            notes: Values for the manifest beside the user's metadata.
            patterns: Which names of the state are saved.
        """
        tiers = self._saver.tier_names_of(ref.step)
        if not tiers:  # This is the same on all ranks
            pending = SaveRecord(ref.step, 0, None, began=began)
            reason = SaveSkipped(ref.step, "no tier takes this step (every)")
            pending.finish(reason, is_reported=True)
            return pending
        collection = self._collect(view, patterns=patterns)
        # Another rank may have the name.
        if collection.idle_patterns and self._coordinator.world_size == 1:
            raise no_match_error(collection.idle_patterns, map(str, view.state))
        preparation = self._plans.prepare(collection)
        if self._config.deltas is not None:
            self._saver.expect_deltas(preparation.plan, is_whole=patterns == Patterns())
        wait = self._config.on_busy == "wait" or self._saver.steps.last_step == ref.step
        devices = preparation.devices
        slot = self._saver.slots.acquire(preparation.plan.size, wait=wait, devices=devices)
        if slot is None:
            if self._coordinator.world_size > 1:
                self._saver.give_up(ref, trial, NO_SLOT)
            return self._ledger.failed_save(ref.step, SaveSkipped(ref.step))
        hand_over: HandOver | None = None
        try:
            overlap, check = self._config.overlap == "auto", self._config.check
            snapshot = preparation.snapshot(
                slot, collection.parts, ref.step, overlap=overlap, check=check
            )
            job = self._requests.request(ref, trial, preparation, snapshot, collection, notes)
            trainable = self._saver.suspicions.trainable(collection)
            self._fence.guard(collection.optimizers)
            snapshot.copy_eager()
            pending = SaveRecord(
                ref.step, preparation.plan.size, snapshot, began=began, tiers=tiers,
                metrics=notes.get(METRICS),
            )  # fmt: skip
            hand_over = self._saver.hand_over(job, snapshot, pending, slot, trainable)
            self._newest_ref = ref
            self._ledger.begin(pending, ref, owner=self)
            if not snapshot.has_landed:
                self._fence.watch(snapshot)
            hand_over.begin()
        except BaseException as error:
            if hand_over is None or hand_over.call_off(error):
                self._newest_ref = None
                self._ledger.cancel(ref)
                self._saver.slots.release(slot)
            raise
        pending.call_seconds = pending.age
        if self._config.slots > 1:  # Make the next slot before a save asks for it
            self._saver.reserve_quietly(preparation.plan.size, devices)
        return pending
