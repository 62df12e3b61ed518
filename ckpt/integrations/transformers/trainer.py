"""Saves by ckpt in the ``Trainer`` of transformers and in the trainers of TRL derived from it::

    trainer = make_ckpt_trainer(Trainer)(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint="auto")

`CkptTrainerMixin` makes the saves that ``TrainingArguments`` asks for. A step holds the model
(without the frozen parameters of a PEFT model), the optimizer, the scheduler, the scaler, the
random generators of every rank and the text of ``trainer_state.json``. The folder ``checkpoint-N``
has that text and a pointer to the step, and appears after the commit. So transformers only sees
folders whose steps are committed. In this module, the *text* is that of ``trainer_state.json``, and
the *folder* of a step is its ``checkpoint-N``. A *run* is one call of ``train()``. The metric
``BEST_STEP`` marks a step that was the best so far.

This module imports transformers, so install the extra ``hf`` first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from torch import nn
from transformers.trainer import Trainer  # pyright: ignore[reportMissingImports]
from transformers.trainer_callback import (  # pyright: ignore[reportMissingImports]
    ExportableState,
    TrainerState,
)
from transformers.trainer_utils import (  # pyright: ignore[reportMissingImports]
    get_last_checkpoint,
)
from transformers.training_args import TrainingArguments  # pyright: ignore[reportMissingImports]

from ckpt.config import Mode, SaveConfig, Tier
from ckpt.errors import ConfigError, NoCheckpoint, RestoreError
from ckpt.events import Event, Observer, SaveCommitted
from ckpt.integrations.shared.all_ranks import all_results, first_result
from ckpt.integrations.shared.once_warnings import warn_of_untested
from ckpt.integrations.shared.own_state import saved_as
from ckpt.integrations.transformers.adapters import frozen_names
from ckpt.integrations.transformers.trainer_folder import (
    SaveLimit,
    check_is_checkpoint,
    folder_of,
    pointed_step,
    remove_folders,
    step_named,
    steps_lost,
    write_folder,
)
from ckpt.manager import CheckpointManager
from ckpt.state.tensors.per_rank import PerRank, RngState
from ckpt.storage.tiers import Tiers, as_tiers

TESTED_RANGE: Final = ("5.23", "5.23")  # The first and the last release that every test ran with
BEST_STEP: Final = "trainer_best_step"
"""The name of a metric that a step gets if it is the best so far. Its value is the step's number.

So the step with the largest value is the best step of the Trainer.
"""
_FOLDER: Final = "ckpt"

_log = logging.getLogger("ckpt")
_Trainer: Any = object  # The class of the trainer, which comes after the mixin in the bases


class CkptTrainerMixin(_Trainer):  # type: ignore[misc]
    """A mixin that saves and resumes the steps of a trainer with ckpt.

    Put it before the trainer in the bases of a class: ``class Mine(CkptTrainerMixin, Trainer)``.
    The constructor takes the arguments of the trainer, and also these arguments:

    * ``ckpt_tiers``: the tiers, as for `CheckpointManager`; ``output_dir/ckpt`` by default. A tier
      without a ``keep_last`` of its own follows ``save_total_limit``.
    * ``ckpt_config``: the `SaveConfig` of the saves.
    * ``ckpt_observers``: functions that are called with each event (see `ckpt.events`).

    Raises:
        ConfigError: The arguments ask for a kind of training or saving that is not supported.
    """

    def __init__(
        self,
        *args: Any,
        ckpt_tiers: Tiers | None = None,
        ckpt_config: SaveConfig | None = None,
        ckpt_observers: Sequence[Observer] = (),
        **options: Any,
    ) -> None:
        warn_of_untested("transformers", TESTED_RANGE, advice="resume once and compare the losses")
        for value in (*args, *options.values()):
            if isinstance(value, TrainingArguments):
                _check_arguments(value)
        super().__init__(*args, **options)
        _check_trainer(self)
        tiers = os.path.join(self.args.output_dir, _FOLDER) if ckpt_tiers is None else ckpt_tiers
        has_best = self.args.metric_for_best_model is not None
        self._ckpt_limit = SaveLimit.of(self.args.save_total_limit, has_best=has_best)
        given_tiers = as_tiers(tiers)
        _check_best(self.args, given_tiers)
        self._ckpt_tiers = [_with_limit(tier, self._ckpt_limit) for tier in given_tiers]
        self._ckpt_config, self._ckpt_observers = ckpt_config, tuple(ckpt_observers)
        self._ckpt_rng = _StoredRng()
        # The step of the last evaluation, and its metrics
        self._ckpt_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._ckpt_run: _Run | None = None

    # -- the life of a manager ---------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        """Train as the trainer does. On return, every save has ended. The error of a save is
        raised, or only logged with ``on_error="warn"``.

        ``resume_from_checkpoint="auto"`` resumes from the newest step if there is one, and True
        raises an error if there is none. If the newest step is damaged, both values resume from the
        newest intact step before it.

        Raises:
            ConfigError: ``trial`` is given, ``resume_from_checkpoint`` is not the folder of a
                checkpoint or is that of a step in another ``output_dir``, or the tiers have a newer
                step than the one with which the run begins.
            NoCheckpoint: The folders in ``output_dir`` point to steps, and the tiers have no step.
            CkptError: The step cannot be restored, or a save has failed.
        """
        if trial is not None:
            raise ConfigError(
                "hyperparameter_search would save all trials into one root: run it with the "
                "trainer itself, without CkptTrainerMixin"
            )
        run = _Run(self.args.output_dir, self._ckpt_limit, writes=self.is_local_process_zero())
        run.may_resume_earlier = resume_from_checkpoint in (True, "auto")
        with self._ckpt_manager(run) as run.manager:
            self._ckpt_run = run
            try:
                checkpoint = self._ckpt_checkpoint_to_resume(run.manager, resume_from_checkpoint)
                return super().train(checkpoint, trial, *args, **options)
            finally:
                self._ckpt_run = None

    def _ckpt_manager(self, *run_observers: Observer) -> CheckpointManager:
        observers = (*run_observers, *self._ckpt_observers)
        return CheckpointManager(self._ckpt_tiers, config=self._ckpt_config, observers=observers)

    def _ckpt_checkpoint_to_resume(self, manager: CheckpointManager, target: Any) -> Any:
        """Return the value of ``resume_from_checkpoint`` for the trainer itself.

        If the value is the folder of a step of ckpt, write this folder first.

        Args:
            manager: The manager of the run.
            target: The value that ``train`` got.
        """
        if target in (True, "auto"):
            newest = self._ckpt_newest_folder(manager) or (True if target is True else None)
            if isinstance(newest, str) and pointed_step(newest) is not None:
                return newest
            target = newest
        if target is None or isinstance(target, bool):
            self._ckpt_check_history(manager, None)
            return target
        check_is_checkpoint(target, self.args.output_dir, manager.steps())
        target = os.fspath(target)
        if (step := pointed_step(target)) is None:
            self._ckpt_check_history(manager, target)
            return target
        if folder_of(self.args.output_dir, step) != os.path.normpath(target):
            raise ConfigError(
                f"{target} is not a checkpoint of output_dir={self.args.output_dir!r}: train with "
                f"output_dir={os.path.dirname(os.path.normpath(target))!r}"
            )
        try:
            step_and_text = self._ckpt_read_text(manager, step)
        except RestoreError as error:
            if not manager.steps():
                raise steps_lost(self.args.output_dir, self._ckpt_places()) from error
            raise RestoreError(
                f"{target} points to step {step}, which cannot be restored: {error}. "
                "resume_from_checkpoint=True takes the newest step that can"
            ) from error
        assert step_and_text is not None
        self._ckpt_write_text(manager, *step_and_text)
        return target

    def _ckpt_newest_folder(self, manager: CheckpointManager) -> str | None:
        """Write and return the folder of the newest step.

        If transformers itself has saved a newer checkpoint, return the folder of that checkpoint.
        Return None if there is neither a step nor a checkpoint.

        Raises:
            NoCheckpoint: The newest folder points to a step, and the tiers have no step at all.
        """
        folder = self.args.output_dir
        step = self._ckpt_write_folder_of(manager)
        last: str | None = get_last_checkpoint(folder) if os.path.isdir(folder) else None
        is_step_of_ckpt = last is not None and pointed_step(last) is not None
        if step is None:
            if is_step_of_ckpt:
                raise steps_lost(folder, self._ckpt_places())
            return last
        if last is not None and not is_step_of_ckpt and (step_named(last) or 0) > step:
            return last
        return folder_of(folder, step)

    def _ckpt_write_folder_of(
        self, manager: CheckpointManager, step: int | None = None
    ) -> int | None:
        """Write the folder of ``step``, and return the number of the step.

        If ``step`` is None, take the newest step. Return None if there is no step. Also remove the
        folders of steps that the tiers no longer have. All ranks must call this.
        """
        if (step_and_text := self._ckpt_read_text(manager, step)) is None:
            return None
        self._ckpt_write_text(manager, *step_and_text)
        return step_and_text[0]

    def _ckpt_read_text(
        self, manager: CheckpointManager, step: int | None
    ) -> tuple[int, str] | None:
        """Return the number of ``step`` and the text of ``trainer_state.json`` for its folder.

        If ``step`` is None, take the newest step. Return None if there is no step. All ranks must
        call this.
        """
        text = {"trainer": ""}
        report = manager.restore(text, step, only="trainer")
        return None if report is None else (report.step, text["trainer"])

    def _ckpt_write_text(self, manager: CheckpointManager, step: int, text: str) -> None:
        """Write the folder of ``step``, and remove the folders of steps that the tiers of no node
        have.

        All ranks must call this. If the call fails on one rank, it fails on all ranks.

        Args:
            manager: The manager of the run.
            step: The number of the step.
            text: The text of ``trainer_state.json``.
        """
        # The node of this rank may have tiers of its own, and lack even the step itself.
        steps_by_rank = all_results("cannot list the steps", manager.steps)
        steps_to_keep = {step, *chain.from_iterable(steps_by_rank)}

        def write() -> None:
            if self.is_local_process_zero():
                write_folder(self.args.output_dir, step, text)
                remove_folders(self.args.output_dir, keep=steps_to_keep)

        all_results(f"could not write the folder of step {step}", write)
        self.accelerator.wait_for_everyone()  # ``all_results`` only waits with torch.distributed

    def _ckpt_check_history(self, manager: CheckpointManager, folder: str | None) -> None:
        """Raise ``ConfigError`` if the tiers have a newer step than that of ``folder``.

        A restart would take the newer step instead of the steps of this run. If ``folder`` is None,
        the run begins at step 0.
        """
        start = (step_named(folder) if folder else None) or 0
        if newer := [step for step in manager.steps() if step > start]:
            way = "or give this run another output_dir"
            if start:
                folders = ", ".join(f"step-{step:09d}.*" for step in newer)
                way = (
                    "give this run another output_dir, or first remove the newer steps "
                    f"({folders} in {self._ckpt_places()})"
                )
            raise ConfigError(
                f"{self._ckpt_tiers[0].url} holds step {newer[-1]} of an earlier run, which a "
                f"restart would take: go on with resume_from_checkpoint=True, {way}"
            )

    def _ckpt_places(self) -> str:
        return ", ".join(tier.url for tier in self._ckpt_tiers)

    def _inner_training_loop(
        self, *args: Any, resume_from_checkpoint: str | None = None, **options: Any
    ) -> Any:
        """Train. If the step to resume from is damaged, resume from an earlier intact step.

        Only ``resume_from_checkpoint=True`` and ``"auto"`` allow an earlier step.
        """
        folder = resume_from_checkpoint
        while True:
            try:
                return super()._inner_training_loop(*args, resume_from_checkpoint=folder, **options)
            except _StepDamaged as error:
                folder = self._ckpt_folder_before(error)

    def _ckpt_folder_before(self, damage: _StepDamaged) -> str:
        """Write the ``checkpoint-N`` folder of the newest step before the damaged step whose
        trainer state can be restored, and return its path. The tensors of the step are not checked.

        All ranks choose the same step. If there is no such step, raise the error of the damaged
        step.
        """
        assert self._ckpt_run is not None
        manager = self._ckpt_run.manager
        steps = first_result("cannot list the steps", manager.steps)
        for step in reversed([step for step in steps if step < damage.step]):
            try:
                self._ckpt_write_folder_of(manager, step)
            except NoCheckpoint:
                continue  # This error is the same on all ranks, and was logged
            _log.warning("ckpt: step %d is damaged, resuming from step %d", damage.step, step)
            return folder_of(self.args.output_dir, step)
        raise damage.error

    # -- saving ------------------------------------------------------------------------------------

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        numbers = {
            name: float(value) for name, value in metrics.items() if isinstance(value, int | float)
        }
        self._ckpt_metrics = (self.state.global_step, numbers)
        is_best: bool = super()._determine_best_metric(metrics, trial)
        return is_best

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Begin to save the present step, unless a callback has let it be saved already."""
        del model, trial  # train() refuses trials, and the model is self.model
        if (run := self._ckpt_run) is None:
            raise ConfigError("a checkpoint is saved within train() only: call save_model() here")
        step, previous_best = self.state.global_step, self.state.best_model_checkpoint
        if run.last_step == step:  # A callback has asked for this step, so it is already saved
            if self.state.best_global_step == step:
                run.best_folders.append(previous_best)
                self.state.best_model_checkpoint = folder_of(self.args.output_dir, step)
                run.manager.add_metrics(step, {BEST_STEP: float(step)})
            return
        self.store_flos()
        metrics_step, last_metrics = self._ckpt_metrics
        metrics = last_metrics if metrics_step == step else {}
        if self.state.best_global_step == step:
            run.best_folders.append(previous_best)
            self.state.best_model_checkpoint = folder_of(self.args.output_dir, step)
            metrics = {**metrics, BEST_STEP: float(step)}
        text = self._ckpt_present_text()
        state = self._ckpt_state()
        if self.is_world_process_zero():  # Other ranks have other texts, such as run times
            state["trainer"] = text
        run.keep_text(step, text, self.state.best_model_checkpoint)
        if not run.save(state, step, metrics, frozen_names(self.model)):
            self.state.best_model_checkpoint = previous_best

    def _ckpt_present_text(self) -> str:
        """Return the text of ``trainer_state.json`` for the present state of the trainer."""
        objects: list[Any] = [*self.callback_handler.callbacks, self.control]
        exportable: list[Any] = [item for item in objects if isinstance(item, ExportableState)]
        snapshot = TrainerState(stateful_callbacks=exportable)
        self.state.stateful_callbacks = snapshot.stateful_callbacks
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"

    def _ckpt_state(self) -> dict[str, Any]:
        """Return the state to save, without the text of ``trainer_state.json``."""
        state = {
            "model": self.model_wrapped,
            "optimizer": self._ckpt_optimizer(),
            "scheduler": self.lr_scheduler,
            "rng": PerRank(self._ckpt_rng, on_resize="same_rank"),
        }
        if (scaler := getattr(self.accelerator, "scaler", None)) is not None:
            state["scaler"] = scaler
        return state

    def _ckpt_optimizer(self) -> Any:
        (optimizer,) = saved_as([self.optimizer], "optimizer")
        return optimizer

    # -- resuming ----------------------------------------------------------------------------------

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if (step := pointed_step(resume_from_checkpoint)) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self._ckpt_run is None:
            with self._ckpt_manager() as manager:
                manager.restore({"model": self.model_wrapped}, step, only="model")
        # Otherwise ``_load_optimizer_and_scheduler`` restores the model too.

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore the whole step if the folder points to one; else do as the trainer does."""
        self._ckpt_optimizer()  # This refuses an optimizer that no save takes
        if checkpoint is None or (step := pointed_step(checkpoint)) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self._ckpt_run is not None
        try:
            self._ckpt_run.manager.restore({**self._ckpt_state(), "trainer": ""}, step)
        except NoCheckpoint as error:
            if not self._ckpt_run.may_resume_earlier:
                raise
            raise _StepDamaged(step, error) from error

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or pointed_step(checkpoint) is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or pointed_step(checkpoint) is None:
            super()._load_rng_state(checkpoint)
        else:
            self._ckpt_rng.set()

    # -- the end -----------------------------------------------------------------------------------

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        assert self._ckpt_run is not None
        self._ckpt_run.finish()  # After this, the trainer needs all folders and the best model
        self.accelerator.wait_for_everyone()
        # A rank that skips a save by itself has another best step than the others.
        best = first_result("cannot find the best checkpoint", self._ckpt_best_folder)
        self.state.best_model_checkpoint = best
        return super()._finalize_training(*args, **options)

    def _ckpt_best_folder(self) -> str | None:
        """Return the folder of the best checkpoint, or of the best one before it if it has none,
        since its save was skipped or has failed.
        """
        assert self._ckpt_run is not None
        best: str | None = self.state.best_model_checkpoint
        folders = [
            folder
            for folder in (*self._ckpt_run.best_folders, best)
            if folder and os.path.isdir(folder)
        ]
        return folders[-1] if folders else best

    def _load_best_model(self) -> None:
        step = pointed_step(self.state.best_model_checkpoint)
        if step is None or self._ckpt_run is None:
            super()._load_best_model()
            return
        _log.info("ckpt: the best model is that of step %d (%s)", step, self.state.best_metric)
        self._ckpt_run.manager.restore({"model": self.model_wrapped}, step, only="model")


def make_ckpt_trainer(cls: type[Any]) -> type[Any]:
    """Return a new subclass of ``cls`` with `CkptTrainerMixin`, or ``cls`` itself if it has the
    mixin already.

    ``cls`` must be ``transformers.Trainer`` or a subclass of it. The function does not change it.

    Raises:
        ConfigError: ``cls`` is no trainer.
    """
    if not (isinstance(cls, type) and issubclass(cls, Trainer)):
        raise ConfigError(f"make_ckpt_trainer takes transformers.Trainer or a subclass, not {cls}")
    if issubclass(cls, CkptTrainerMixin):
        return cls
    return type(f"Ckpt{cls.__name__}", (CkptTrainerMixin, cls), {"__module__": cls.__module__})


class _StoredRng:
    """The random number generators of a rank. A restore only stores their states here, and ``set``
    sets the generators to these states.

    The trainer calls ``set`` after it has skipped the batches before the step.
    """

    def __init__(self) -> None:
        self._rng = RngState()
        self._state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return self._rng.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def set(self) -> None:
        if self._state is not None:
            self._rng.load_state_dict(self._state)


class _StepDamaged(Exception):
    """The step to resume from is damaged, and the run may resume from an earlier step.

    All ranks raise this error.
    """

    def __init__(self, step: int, error: NoCheckpoint) -> None:
        self.step, self.error = step, error
        super().__init__(str(error))


class _Run:
    """The saves of one ``train()``. As an observer, it writes the folder of each committed step.

    Thread safety: the training thread calls the methods, and background threads deliver events. The
    text of a step is added before the save begins, and only one event takes it.

    Attributes:
        manager: The manager of the saves.
        may_resume_earlier: Whether the run may resume from an earlier step if the step is damaged.
        last_step: The number of the last step that was saved; None before the first save.
        best_folders: The folders of the best checkpoints before the present one, oldest first.
    """

    manager: CheckpointManager
    may_resume_earlier = False
    last_step: int | None = None

    def __init__(self, output_dir: str, limit: SaveLimit, *, writes: bool) -> None:
        self._output_dir, self._limit, self._writes_folders = output_dir, limit, writes
        self._text_and_best: dict[int, tuple[str, str | None]] = {}  # By step, see ``keep_text``
        self._pending: list[Any] = []
        self.best_folders: list[str | None] = []

    def keep_text(self, step: int, text: str, best: str | None) -> None:
        """Keep the text for the folder of ``step``, which is written once the step is committed.

        ``best`` is the folder of the best step so far; None if there is no best step.
        """
        self._text_and_best[step] = (text, best)

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        metrics: Mapping[str, float],
        exclusions: Sequence[str],
    ) -> bool:
        """Begin a save without the names in ``exclusions``. Return True if the save has begun.
        Return False if it was skipped or, with ``on_error="warn"``, could not begin.
        """
        try:
            pending = self.manager.save_async(
                state, step, metrics=metrics, exclude=exclusions or None
            )
        except BaseException:
            self._text_and_best.pop(step, None)
            raise
        if pending.done() and pending.durable_seconds is None and pending.unreported_error is None:
            self._text_and_best.pop(step, None)  # No slot was free, or no tier takes the step
            return False
        self.last_step = step
        self._pending = [*(save for save in self._pending if not save.done()), pending]
        return True

    def __call__(self, event: Event) -> None:
        if not isinstance(event, SaveCommitted) or event.tier.startswith("shm://"):
            return  # A step in memory is lost with the machine
        if (
            text_and_best := self._text_and_best.pop(event.step, None)
        ) is not None and self._writes_folders:
            text, best_folder = text_and_best
            write_folder(self._output_dir, event.step, text)
            self._limit.apply(self._output_dir, event.step, best_folder)

    def finish(self) -> None:
        """Wait until every save has ended and every folder is written.

        Raises:
            CkptError: A save has failed, and its error was neither raised nor logged yet.
        """
        for pending in self._pending:
            pending.wait()
            if pending.unreported_error is not None:  # Other errors were raised or logged
                pending.result()


def _with_limit(tier: Tier, limit: SaveLimit) -> Tier:
    """Return ``tier`` with the settings of ``limit`` in place of the retention settings that it
    lacks. A tier without any limit and the tier in memory are returned unchanged.
    """
    keep_last = tier.keep_last or limit.step_count
    if keep_last is None or tier.url == "memory":
        return tier
    best: tuple[str, Mode] | None = (BEST_STEP, "max") if limit.has_best else None
    best_counts = tier.best_counts or tier.keep_last is None
    keep_best = tier.keep_best or best
    return replace(tier, keep_last=keep_last, keep_best=keep_best, best_counts=best_counts)


def _check_best(args: Any, tiers: Sequence[Tier]) -> None:
    """Raise ``ConfigError`` if a tier may remove the best step, which the trainer loads at the end
    of the training.
    """
    for tier in tiers:
        if args.load_best_model_at_end and tier.keep_best is not None:
            raise ConfigError(
                f"load_best_model_at_end=True needs the best step, and keep_best={tier.keep_best} "
                f"of the tier {tier.url} may remove it: leave keep_best out, and the tier keeps "
                "the best step of metric_for_best_model"
            )


def _check_arguments(args: Any) -> None:
    """Raise ``ConfigError`` for unsupported arguments, before the trainer uses the arguments."""
    for name in [name for name in ("FSDP", "DeepSpeed") if getattr(args, name.lower(), None)]:
        raise _unsupported_error(name)
    if args.save_only_model:
        raise ConfigError(
            "save_only_model=True leaves out what resuming needs: remove it. save_model() writes "
            "the weights alone"
        )
    if args.push_to_hub and args.hub_strategy != "end":
        raise ConfigError(
            f"hub_strategy={str(args.hub_strategy.value)!r} uploads the files of each checkpoint, "
            'which are not in its folder here: use hub_strategy="end"'
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True starts the training again in mid run, and would save the "
            "same steps twice: remove it, and set per_device_train_batch_size"
        )
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True would make a folder before its step is committed: remove "
            "it. The newest committed step survives a SIGTERM"
        )


def _check_trainer(trainer: Any) -> None:
    """Raise ``ConfigError`` if the trainer uses an unsupported kind of training.

    The arguments of the trainer alone do not show this, since accelerate may also take settings
    from other places, such as environment variables.
    """
    is_sharded = getattr(trainer, "is_distributed_loading_by_transformers", False)
    refusals = {
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "a model that transformers has sharded": is_sharded,
    }
    for name in [name for name, is_set in refusals.items() if is_set]:
        raise _unsupported_error(name)
    if getattr(trainer, "use_adaptive_entropy", False):
        raise ConfigError(
            "use_adaptive_entropy=True changes entropy_coef at each step, and no checkpoint has "
            "it: set use_adaptive_entropy=False, and entropy_coef"
        )


def _unsupported_error(name: str) -> ConfigError:
    return ConfigError(
        f"CkptTrainerMixin does not support {name}: use the trainer without it, or a loop of your "
        "own with CheckpointManager, which supports FSDP2 and DeepSpeed ZeRO"
    )
