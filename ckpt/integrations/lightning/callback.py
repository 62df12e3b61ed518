"""Lightning: ``CkptCheckpoint`` in the place of ``ModelCheckpoint``.

    trainer = Trainer(callbacks=[CkptCheckpoint("runs/digits", monitor="val_loss", save_top_k=2)])
    trainer.fit(model, ckpt_path="last")

The callback has the policy of ``ModelCheckpoint`` and saves through one ``CheckpointManager``. It
makes the strategy of its trainer a `CkptStrategy`, so that the manager gets the module and the
optimizers themselves. So no tensor is copied before the snapshot copies it, and a restore fills the
tensors in place.

A checkpoint has four entries: ``model``, ``optimizers``, ``lightning`` (the loops, callbacks,
schedulers, precision, hyper-parameters and data module of Lightning's own checkpoints) and ``rng``
(the random number generators). Each rank saves its own ``lightning`` and ``rng``.

Each try of a job at a step is an *attempt*, which a ``StepRef`` names. A *loader* is Lightning's
data loader, and the *generators* are those of random numbers.

Importing this module imports Lightning.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, Final, Unpack

import lightning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ckpt.catalog.step_listing import committed, creation_time
from ckpt.config import MEMORY, Mode, SaveConfig, Settings, with_settings
from ckpt.errors import ConfigError
from ckpt.integrations.lightning.loop_position import (
    begin_next_epoch,
    continues_epoch,
    ends_epoch,
    lacks_plateau_step,
    rebuild_train_loader,
    start_loader_again,
    validation_or_epoch_end_follows,
)
from ckpt.integrations.lightning.paths import BEST, NEWEST, Candidate, path_of, step_of
from ckpt.integrations.lightning.strategy import MODULE, CkptStrategy, mix_in
from ckpt.integrations.shared.once_warnings import warn_of_untested
from ckpt.integrations.shared.own_state import saved_as
from ckpt.manager import CheckpointManager
from ckpt.model.keys import StepRef, parse_folder
from ckpt.pending import PendingSave
from ckpt.state.tensors.per_rank import PerRank, RngState
from ckpt.storage.registry import open_backend
from ckpt.storage.tiers import Tiers, as_tiers, urls_of
from ckpt.storage.urls import is_folder, local_path

TESTED_RANGE: Final = ("2.6", "2.6")

_REFUSALS: Final = {
    "filename": "a step is a folder that ckpt names; leave filename out, and read best_model_path",
    "save_weights_only": "a step holds all that a resume needs; leave save_weights_only out, and "
    "take the weights with CheckpointManager(dirpath).restore({'model': model}, only='model')",
    "train_time_interval": "save by steps or epochs with every_n_train_steps or every_n_epochs",
    "save_on_train_epoch_end": "leave save_on_train_epoch_end out; every_n_epochs saves after the "
    "validation of its epoch",
    "save_on_exception": "the steps before the exception remain; leave save_on_exception out, and "
    "save more often with every_n_train_steps",
    "verbose": "leave verbose out; the command `ckpt ls` shows the steps",
    "auto_insert_metric_name": "ckpt names its steps; leave auto_insert_metric_name out",
    "enable_version_counter": "ckpt names its steps; leave enable_version_counter out",
}
"""Option of ``ModelCheckpoint`` that ckpt does not support -> what the user can do instead."""

_log = logging.getLogger("ckpt")


class _EmptyCheckpoint(dict[str, Any]):
    """A checkpoint that is false in a boolean context, so Lightning restores nothing from it."""

    def __bool__(self) -> bool:
        return False


class _DictState:
    """An object whose state is the dict ``content``. A restore replaces the dict as a whole."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.content = state


class CkptCheckpoint(ModelCheckpoint):
    """``ModelCheckpoint`` with the saves of a ``CheckpointManager``.

    ``Trainer.fit(ckpt_path=...)`` takes ``"last"`` (the newest step, also in a new process),
    ``"best"``, the folder of the checkpoints or of one step in it, and plain ``.ckpt`` files.

    Args:
        dirpath: A folder or URL, a `Tier`, or several of these, nearest first. A tier without
            ``keep_last`` keeps the steps that ``save_top_k`` asks for.
        monitor: The metric that decides which steps are the best.
        mode: Whether the smallest ("min") or the largest ("max") values are the best.
        save_top_k: The number of best steps that are kept; -1 keeps all steps. Without ``monitor``,
            1 keeps the newest step. The newest step is always kept.
        save_last: Whether every step that ``every_n_train_steps`` or ``every_n_epochs`` selects is
            saved. With False and ``monitor``, a selected step is saved only if it is one of the
            best steps.
        every_n_train_steps: Save whenever the global step is a multiple of this number. If a
            validation or the end of the epoch follows the batch, the save comes after it.
        every_n_epochs: Save at the end of every n-th epoch, after its validation. The default is 1
            if ``every_n_train_steps`` is not given.
        settings: Fields of `SaveConfig`.

    Raises:
        ConfigError: A setting or URL is wrong.
        MisconfigurationException: Lightning's own check of the policy failed.
    """

    def __init__(
        self,
        dirpath: Tiers,
        *,
        monitor: str | None = None,
        mode: Mode = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        _check_options(save_last, settings)
        super().__init__(
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
        )
        warn_of_untested("lightning", TESTED_RANGE, advice="save and resume once and compare")
        keeps_best = monitor is not None and save_top_k > 0
        keep_best = (monitor or "", mode, save_top_k) if keeps_best else None
        self._tiers = [
            replace(tier, keep_last=1, keep_best=keep_best)
            if save_top_k != -1 and tier.keep_last is None and tier.url != MEMORY
            else tier
            for tier in as_tiers(dirpath)
        ]
        self.root = _absolute(urls_of(self._tiers)[-1])
        self.dirpath = self.root
        self._settings = settings
        self._manager: CheckpointManager | None = None
        self._best_path = ""
        # Metrics of the best steps, and of those that they replaced
        self._score_by_path: dict[str, Tensor] = {}
        self._saves_of_best_steps: dict[str, PendingSave] = {}  # By path
        self._waits_to_save = False  # Whether a save waits for a validation or for the epoch's end
        # The restored states of the generators, until the first batch
        self._restored_rng: dict[str, Any] | None = None

    # -- paths -------------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The path of the best step, or, without ``monitor``, that of the newest step.

        If this callback knows no such step yet, the value is the ``ckpt://`` path with ``#best``,
        or an empty text without ``monitor``.
        """
        return self._best_path or (self._path(BEST) if self.monitor else "")

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._best_path = path

    def _path(self, step: int | str) -> str:
        return path_of(self.root, step)

    def find_step(self, path: str) -> int | str | StepRef | None:
        """Return the step in this callback's folder that ``path`` means.

        Returns:
            The number of the step, "newest" or "best". The result for the folder itself is
            "newest", and that for the folder of a step is the attempt at the step. None if ``path``
            is neither the folder, nor the folder of a step in it, nor a ``ckpt://`` path of it.

        Raises:
            ConfigError: ``path`` is a ``ckpt://`` path of the folder, and its text after ``#``
                names no step.
        """
        place, _, step = path.partition("#")
        if f"{place}#" == self._path(""):
            return step_of(path, step)
        folder = _absolute(path)
        if folder == self.root:
            return NEWEST
        parent, _, name = folder.rpartition("/")
        return parse_folder(name) if parent == self.root else None

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """Return a set with the path of this callback's newest step, if no other ``CkptCheckpoint``
        has a higher step.

        Otherwise return an empty set. If several callbacks have the same step, only the first of
        them returns its path. Each rank calls this by itself, and all ranks must get the same
        result.
        """
        # With only one callback, the tiers are not listed here, since the restore finds the step.
        if len(trainer.checkpoint_callbacks) == 1:
            return {Candidate(self._path(NEWEST), 0.0)}
        steps: dict[CkptCheckpoint, int] = {}
        times: dict[CkptCheckpoint, float] = {}
        for callback in _callbacks(trainer):
            if newest := callback.newest():
                steps[callback], times[callback] = newest
        if self is not max(steps, key=steps.__getitem__, default=None):
            return set()
        return {Candidate(self._path(NEWEST), times[self])}

    def newest(self) -> tuple[int, float] | None:
        """Return the newest step on the farthest tier, which all ranks share.

        Returns:
            The number of the step, and the time of its manifest in seconds since 1970. None if the
            tier has no step.
        """
        tier = self._tiers[-1]
        backend = open_backend(tier.url, tier.options)
        try:
            refs = committed(backend)
            return (refs[0].step, creation_time(backend, refs[0])) if refs else None
        finally:
            backend.close()

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: Trainer, del_filepath: Any = None
    ) -> str:
        del monitor_candidates, del_filepath
        return self._path(trainer.global_step)

    # -- the policy --------------------------------------------------------------------------------

    def _save_topk_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        self._forget_lost_steps(trainer)
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        self._save_last_checkpoint(trainer, monitor_candidates)

    def _update_best_and_save(
        self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        self._score_by_path |= self.best_k_models
        super()._update_best_and_save(current, trainer, monitor_candidates)
        self._score_by_path |= self.best_k_models

    def _forget_lost_steps(self, trainer: Trainer) -> None:
        """Remove from the best steps those that a rank knows to be on no tier. The steps that they
        have replaced take their places.

        All ranks must call this, and all remove the same steps.
        """
        # A decision is True if it is True on all ranks, or with ``all=False`` on any rank.
        decide, has_lost_step = trainer.strategy.reduce_boolean_decision, False
        for path, pending in list(self._saves_of_best_steps.items()):
            is_over = pending.done()
            if decide(is_over and not _is_on_a_tier(pending), all=False):
                has_lost_step = True
                del self._score_by_path[path], self._saves_of_best_steps[path]
            elif decide(is_over):
                del self._saves_of_best_steps[path]
        if has_lost_step:
            self._order_best_steps()
        if not self._saves_of_best_steps:
            self._score_by_path = dict(self.best_k_models)

    def _order_best_steps(self) -> None:
        """Set the attributes of ``ModelCheckpoint`` about the best steps, from their scores."""
        newest_first = reversed(self._score_by_path)
        order = sorted(
            newest_first, key=self._score_by_path.__getitem__, reverse=self.mode == "max"
        )
        best_paths = order if self.save_top_k == -1 else order[: self.save_top_k]
        self.best_k_models = {
            path: self._score_by_path[path] for path in self._score_by_path if path in best_paths
        }
        self.best_model_path = best_paths[0] if best_paths else ""
        self.best_model_score = self._score_by_path[best_paths[0]] if best_paths else None
        if len(best_paths) == self.save_top_k:
            self.kth_best_model_path = best_paths[-1]
            self.kth_value = self._score_by_path[best_paths[-1]]

    def _save_last_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        del monitor_candidates
        if self.save_last:
            self.last_model_path = self._path(trainer.global_step)
            if self._last_global_step_saved != trainer.global_step:
                self._save_checkpoint(trainer, self.last_model_path)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Begin to save the present step, which has the path ``filepath`` in Lightning."""
        if getattr(trainer, "fast_dev_run", False):  # Lightning does not check it in on_train_end
            return
        assert self._manager is not None
        strategy = trainer.strategy
        assert isinstance(strategy, CkptStrategy)
        metric_name = self.monitor or ""
        metric = trainer.callback_metrics.get(metric_name)
        metrics = {} if metric is None else {metric_name: metric}
        # The dump is Lightning's own checkpoint without the tensors.
        state = _state(strategy, _DictState(strategy.dump(trainer)), RngState())
        pending = self._manager.save_async(state, trainer.global_step, metrics=metrics)
        if filepath in self.best_k_models:
            self._saves_of_best_steps[filepath] = pending
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Do nothing, since the retention of each tier removes the step after the next commit."""

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return True if the metric ``current`` makes this step one of the best steps.

        If two steps have equal metrics, the newer step counts as better.
        """
        is_full = len(self.best_k_models) >= self.save_top_k > 0
        if current is None or not is_full:
            return super().check_monitor_top_k(trainer, current)
        worst_best = self.best_k_models[self.kth_best_model_path]
        better = current >= worst_best if self.mode == "max" else current <= worst_best
        # All ranks must get here and decide alike, also if the metric differs between them.
        return trainer.strategy.reduce_boolean_decision(bool(better))

    # -- restoring ---------------------------------------------------------------------------------

    def load(self, trainer: Trainer, target: int | str | StepRef) -> dict[str, Any]:
        """Restore the module from a step, and in ``fit`` also the optimizers.
        ``restore_generators`` sets the generators later. ``target`` is the result of ``find_step``.

        Returns:
            A checkpoint for Lightning with all other entries and the module's tensors. If there is
            no step, the checkpoint is false in a boolean context.

        Raises:
            ConfigError: ``target`` is an attempt, and the restore has taken another attempt at the
                step.
            CkptError: See ``CheckpointManager.restore``. For example, ``target`` is "best", and no
                step has the metric.
        """
        assert self._manager is not None
        strategy, module = trainer.strategy, trainer.lightning_module
        ref = target if isinstance(target, StepRef) else None
        extras, rng = _DictState({}), _DictState({})  # The restore fills them
        is_fit = trainer.state.fn == TrainerFn.FITTING
        report = self._manager.restore(
            _state(strategy, extras, rng) if is_fit else _state_of_model(strategy, extras),
            self._selector(target),
            only=None if is_fit else _EVALUATION_ENTRIES,
            strict=module.strict_loading,
        )
        if report is None:
            _log.warning("ckpt: there is no checkpoint in %s: nothing is restored", self.root)
            return _EmptyCheckpoint({"pytorch-lightning_version": lightning.__version__})
        if ref is not None and ref.attempt != report.attempt:
            actual = StepRef(report.step, report.attempt)
            raise ConfigError(
                f"ckpt_path names {ref.folder} in {self.root}, but a restore of that step takes "
                f"{actual.folder}: remove that folder first, or give its path"
            )
        if is_fit:
            # The generators stay as they are, since Lightning builds the loaders after this.
            self._restored_rng = rng.content or RngState().state_dict()
            self._last_global_step_saved = report.step
        return {**extras.content, MODULE: module.state_dict()}

    def _selector(self, target: int | str | StepRef) -> int | str | None:
        """Return the ``step`` of ``CheckpointManager.restore`` for ``target``."""
        if target == BEST:
            return f"best:{self.monitor or '-'}:{'max' if self.mode == 'max' else 'min'}"
        if target == NEWEST:
            return None
        return target.step if isinstance(target, StepRef) else int(target)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the list of best steps from ``state_dict``, unless ``dirpath`` has changed since the
        save.
        """
        super().load_state_dict(state_dict)
        self._score_by_path, self._saves_of_best_steps = {}, {}
        if state_dict["dirpath"] != self.dirpath:
            self._best_path = ""

    # -- hooks of the trainer ----------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the manager, and mix ``CkptStrategy`` into the trainer's strategy.

        Raises:
            ConfigError: Another callback has the same folder, or the strategy is not supported.
        """
        del pl_module, stage
        if any(
            callback.root == self.root for callback in _callbacks(trainer) if callback is not self
        ):
            raise ConfigError(
                f"two CkptCheckpoint callbacks write to {self.root}: give each a folder of its own"
            )
        mix_in(trainer.strategy, _callbacks(trainer))
        if self._manager is None:
            self._manager = CheckpointManager(self._tiers, **self._settings)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reserve memory for saves if no step was restored. Otherwise prepare Lightning's loops to
        continue from the restored step.

        If the step was saved at the end of an epoch, the training begins with the next epoch.

        Raises:
            ConfigError: No step was restored, and the folder has a step that is newer than the
                first step of this training.
        """
        super().on_train_start(trainer, pl_module)
        if self._restored_rng is None:
            assert self._manager is not None
            self._check_history(trainer, self._manager.steps())
            self._manager.prepare(_state(trainer.strategy, _DictState({}), RngState()))
            return
        if lacks_plateau_step(trainer):
            _log.warning(
                "ckpt: ReduceLROnPlateau misses the epoch that ends at step %d, since Lightning "
                "steps it after the save: the next losses may differ",
                trainer.global_step,
            )
        begin_next_epoch(trainer)

    def restore_generators(self, trainer: Trainer) -> None:
        """Set the random number generators to their restored states, if the training continues
        within an epoch, or if Lightning would build the train loader here without a resume.

        The strategy calls this after the hooks ``on_train_start``. Until then, the generators are
        those of a first run, so the loaders and hooks of the setup draw what they drew there.
        """
        if continues_epoch(trainer):
            self._apply_restored_rng()
        elif self._restored_rng is not None:
            start_loader_again(trainer)
            if rebuild_train_loader(trainer):
                self._apply_restored_rng()
                self._restored_rng = None  # The new loader draws from the generators first

    def _check_history(self, trainer: Trainer, steps: list[int]) -> None:
        newest = max(steps, default=0)
        if newest > trainer.global_step and not getattr(trainer, "fast_dev_run", False):
            raise ConfigError(
                f"{self.root} holds step {newest} of an earlier training, which a restart would "
                f"take before the steps after {trainer.global_step}: go on with "
                "fit(ckpt_path='last'), or give this training a dirpath of its own"
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the random number generators to their restored states, if Lightning starts the loader
        again after this hook.

        Lightning starts the loader before the training, which changes the generators. It starts the
        loader again unless the training continues within an epoch or begins with epoch 0.
        """
        del pl_module
        loop = trainer.fit_loop
        if trainer.current_epoch > 0 and not loop.is_resuming and not loop.epoch_loop.restarting:
            self._apply_restored_rng()

    def _apply_restored_rng(self) -> None:
        if self._restored_rng is not None:
            RngState().load_state_dict(self._restored_rng)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forget the restored states of the generators, which the training changes from now on."""
        del trainer, pl_module, batch, batch_idx
        self._restored_rng = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the step if it is due.

        If a validation or the end of the epoch follows, a later hook saves the step.
        """
        every = self._every_n_train_steps
        is_due = every > 0 and trainer.global_step % every == 0
        self._waits_to_save = (
            is_due
            and not self._should_skip_saving_checkpoint(trainer)
            and validation_or_epoch_end_follows(trainer)
        )
        if self._waits_to_save:
            return
        candidates = self._monitor_candidates(trainer)
        if is_due and self.monitor is not None and self.monitor not in candidates:
            if self.save_last and not self._should_skip_saving_checkpoint(trainer):
                self._save_last_checkpoint(
                    trainer, candidates
                )  # The step does not count as one of the best
                return
            _log.warning(
                "ckpt: step %d is not saved, since the metric %r has no value yet: set "
                "save_last=True to save each step",
                trainer.global_step,
                self.monitor,
            )
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a step that waits for this validation, unless the end of the epoch follows."""
        if not self._waits_to_save:
            super().on_validation_end(trainer, pl_module)
        elif not ends_epoch(trainer):
            self._save_waiting_step(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a step that waits for the end of this epoch."""
        if self._waits_to_save:
            self._save_waiting_step(trainer)
        else:
            super().on_train_epoch_end(trainer, pl_module)

    def _save_waiting_step(self, trainer: Trainer) -> None:
        self._waits_to_save = self._defer_save_until_validation = False
        self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the copies of snapshots, since the strategy moves the module to the CPU next."""
        super().on_train_end(trainer, pl_module)
        self._forget_lost_steps(trainer)
        if self._manager is not None:
            self._manager.fence()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish every save. The errors are those of ``CheckpointManager.close``."""
        del trainer, pl_module, stage
        self._close(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finish the saves under way, and notify the other ranks that this rank ends."""
        del trainer, pl_module
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        self._waits_to_save = False
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.__exit__(type(error) if error else None, error, None)


def _check_options(save_last: object, settings: Settings) -> None:
    """Raise ``ConfigError`` for an unsupported option of ``ModelCheckpoint``, or an unknown
    setting.
    """
    for name, way in _REFUSALS.items():
        if name in settings:
            raise ConfigError(f"CkptCheckpoint has no option {name}: {way}")
    if save_last == "link":
        raise ConfigError(
            "save_last='link': ckpt makes no link to a step; use save_last=True, and resume with "
            "ckpt_path='last'"
        )
    with_settings(SaveConfig(), settings)


def _state(strategy: Strategy, extras: _DictState, rng: RngState | _DictState) -> dict[str, Any]:
    """Return the four entries of a checkpoint. ``extras`` is the entry ``lightning``."""
    return {
        **_state_of_model(strategy, extras),
        "optimizers": saved_as(strategy.optimizers, "optimizers"),
        "rng": PerRank(rng, on_resize="same_rank"),
    }


def _state_of_model(strategy: Strategy, content: _DictState) -> dict[str, Any]:
    return {"model": strategy.model, "lightning": PerRank(content, on_resize="first")}


_EVALUATION_ENTRIES: Final = ("model", "lightning")  # The entries for validate, test and predict


def _is_on_a_tier(pending: PendingSave) -> bool:
    """Return True if some tier has the step of ``pending``, whose save is over."""
    return any(pending.exception(tier=tier) is None for tier in pending.tiers)


def _callbacks(trainer: Trainer) -> list[CkptCheckpoint]:
    return [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, CkptCheckpoint)
    ]


def _absolute(url: str) -> str:
    return os.path.abspath(local_path(url)) if is_folder(url) else url.rstrip("/")
