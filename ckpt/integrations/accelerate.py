"""Accelerate: ``save_state`` and ``load_state`` of an ``Accelerator``, in the background.

    checkpoints = AcceleratorCheckpoints(accelerator, "runs/digits")
    checkpoints.load_state()  # after accelerator.prepare(...)
    ...
    checkpoints.save_state()  # returns after milliseconds

A checkpoint holds the same objects as one of ``accelerator.save_state``: every prepared model,
optimizer, scheduler and loader, the scaler, the registered objects, the random number generators of
every rank, and ``accelerator.step``. The objects have the names ``model``, ``model_1``,
``optimizer``, ``scheduler`` and so on. So a ``CheckpointManager`` in a program without Accelerate
can restore ``{"model": model, "optimizer": optimizer}`` from such a checkpoint with ``only=``, in
any layout. ``PerRank`` marks a value of which each rank saves its own, and the argument
``on_resize`` says what the ranks get if their number has changed.

This module imports accelerate when the first `AcceleratorCheckpoints` is made.

``_has_restored`` and ``_has_begun_save`` of an `AcceleratorCheckpoints` say whether this run has
loaded a step, and whether it has saved one. Once either is True, the steps of earlier runs are no
reason to refuse a save.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.config import MEMORY, Tier
from ckpt.data.worker_seeds import give_generator
from ckpt.errors import CkptError, ConfigError, EntryMissing, EntryUnexpected, RestoreError
from ckpt.errors.base import few
from ckpt.events import Event, Restored
from ckpt.integrations.shared.once_warnings import warn_of_untested, warn_once
from ckpt.integrations.shared.own_state import saved_as
from ckpt.integrations.shared.resizing import refusing_resize, same_or_first
from ckpt.manager import CheckpointManager
from ckpt.model.metrics import Metrics
from ckpt.pending import PendingSave
from ckpt.restore.report import RestoreReport
from ckpt.state.tensors.per_rank import PerRank, RngState
from ckpt.state.walk.state_objects import inherits_stateful
from ckpt.storage.tiers import Tiers, as_tiers
from ckpt.storage.urls import is_folder, local_path

TESTED_RANGE: Final = ("1.0", "1.15")
"""The first and the last release of accelerate that the tests ran with."""
# The name is not "checkpoints", since accelerate deletes the contents of its folder of that name.
_FOLDER_NAME: Final = "ckpt"
_REFUSALS: Final = {
    "DEEPSPEED": "put ckpt.integrations.deepspeed.zero_state(engine) into a state of your own",
    "MEGATRON_LM": "Megatron keeps its own checkpoints",
    "XLA": "torch_xla keeps the tensors on its own devices",
}

_REFUSE_RESIZE: Final = refusing_resize(
    "the position of a StatefulDataLoader",
    "begin the epoch again with "
    'load_state(only=["model*", "optimizer*", "scheduler*", "accelerate"])',
)


class AcceleratorCheckpoints:
    """Saves and restores the objects that an ``Accelerator`` has prepared.

    Every rank makes an object of this class, and makes the same calls.

    Args:
        accelerator: The ``Accelerator``. Objects that are prepared later are saved as well.
        tiers: As for `CheckpointManager`. If it is None, the folder ``ckpt`` in the ``project_dir``
            is used, which requires ``automatic_checkpoint_naming``. A tier that is given as a
            folder or URL, and not as a `Tier` or "memory", keeps as many of the newest steps as
            ``total_limit`` of the ``ProjectConfiguration`` says.
        settings: Further arguments of the `CheckpointManager`.

    Attributes:
        manager: The `CheckpointManager` that saves and restores.

    Raises:
        ConfigError: ``accelerator`` is no ``Accelerator``, the kind of training is not supported,
            ``tiers`` is left out and has no default, a tier is a folder that
            ``accelerator.save_state`` has written, or a setting or URL is wrong. Nothing was
            written.
        UnsupportedValue: An optimizer with a ``state_dict()`` of its own has sharded parameters.
    """

    def __init__(
        self,
        accelerator: Any,
        tiers: Tiers | None = None,
        **settings: Any,
    ) -> None:
        _check_accelerator(accelerator)
        _entries_of_optimizers(accelerator)  # This refuses an optimizer that no save takes
        project = accelerator.project_configuration
        if tiers is None:
            if not (project.automatic_checkpoint_naming and accelerator.project_dir):
                raise ConfigError(
                    "AcceleratorCheckpoints(accelerator) names no place: give a folder or URL, or "
                    "set project_dir and automatic_checkpoint_naming in the ProjectConfiguration"
                )
            tiers = os.path.join(accelerator.project_dir, _FOLDER_NAME)
        items = list(tiers) if isinstance(tiers, list | tuple) else [tiers]
        limited_tiers = [_with_total_limit(item, project.total_limit) for item in items]
        self._urls = [tier.url for tier in limited_tiers]
        self._folders = [Path(local_path(url)) for url in self._urls if is_folder(url)]
        for folder in self._folders:
            if _is_accelerate_folder(folder):
                raise ConfigError(_foreign_folder_text(folder))
        self._accelerator = accelerator
        self._has_restored = self._has_begun_save = False
        self._seed_workers(0)  # The workers of the prepared loaders
        observers = (*settings.pop("observers", ()), self._note_restored)
        self.manager = CheckpointManager(limited_tiers, observers=observers, **settings)

    def save_state(self, step: int | None = None, *, metrics: Metrics | None = None) -> PendingSave:
        """Save in the background, as `CheckpointManager.save_async` does.

        Args:
            step: The number of the step. If it is None, the number is ``iteration`` of the
                ``ProjectConfiguration``, which counts the calls of ``save_state``. ``load_state``
                restores that counter.
            metrics: Numbers by name for ``Tier(keep_best=...)``.

        Returns:
            The handle of the save.

        Raises:
            ConfigError: ``step`` is no number, but the path of a folder as for
                ``Accelerator.save_state``. Or no step was loaded, and an earlier run has saved a
                step with this number or a higher number. Nothing was saved.
            CkptError: See `CheckpointManager.save_async`.
        """
        _check_step(step, "save_state")
        project = self._accelerator.project_configuration
        number = project.iteration if step is None else step
        self._refuse_earlier_run(number)
        # ``save_async`` may begin this save and then raise the error of an earlier save. So the
        # save is counted first.
        project.iteration += 1
        self._seed_workers(number)  # Loaders may have been prepared after this object was made
        _warn_of_hooks("save", self._accelerator._save_model_state_pre_hook)
        return self.manager.save_async(self._state(), number, metrics=metrics)

    def load_state(self, step: int | None = None, **options: Any) -> RestoreReport | None:
        """Restore ``step``, or the newest intact step. Call it after ``accelerator.prepare``.

        Args:
            step: The number of the step; None for the newest.
            options: Further arguments of `CheckpointManager.restore`, such as ``strict=False``.

        Returns:
            The report, or None if there is no checkpoint.

        Raises:
            ConfigError: ``step`` is the name of a folder, or all checkpoints in the folders were
                saved by ``accelerator.save_state``. Nothing was changed.
            RestoreError: The prepared and registered objects are not those that were saved.
                Nothing was changed.
            CkptError: See `CheckpointManager.restore`.
        """
        _check_step(step, "load_state")
        _warn_of_hooks("load", self._accelerator._load_model_state_pre_hook)
        self._seed_workers(0)
        state = self._state()
        try:
            report = self.manager.restore(state, step, **options)
        except (EntryMissing, EntryUnexpected) as error:
            if objects := [name for name in error.names if _is_object_name(name)]:
                verb = "has no" if isinstance(error, EntryMissing) else "also holds"
                reason = f"step {error.step} {verb} {few(objects)}"
                raise RestoreError(f"{reason}, and {self._object_counts_text()}") from error
            raise
        if report is None:
            self._refuse_accelerate_folders()
            return None
        counters = state["accelerate"]
        self._accelerator.step = counters["step"]
        self._accelerator.project_configuration.iteration = counters["iteration"]
        self._seed_workers(report.step)
        return report

    def close(self, timeout: float | None = None) -> None:
        """Finish every save (`CheckpointManager.close`). The end of the process does this, too."""
        self.manager.close(timeout)

    def __enter__(self) -> Self:
        self.manager.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.manager.__exit__(*error)

    def _state(self) -> dict[str, Any]:
        """Return the state to save: each object that is prepared or registered now, by its name."""
        accelerator = self._accelerator
        state: dict[str, Any] = {}
        for name, objects in _objects_of(accelerator).items():
            state |= {
                name if number == 0 else f"{name}_{number}": value
                for number, value in enumerate(objects)
            }
        if accelerator.scaler is not None:
            state["scaler"] = accelerator.scaler
        state["rng"] = PerRank(RngState(), on_resize="same_rank")
        iteration = accelerator.project_configuration.iteration
        return state | {"accelerate": {"step": accelerator.step, "iteration": iteration}}

    def _seed_workers(self, step: int) -> None:
        """Keep the prepared loaders from drawing from the global generator, which ``load_state``
        restores. Their workers get other seeds for each ``step``.
        """
        for number, loader in enumerate(self._accelerator._dataloaders):
            give_generator(loader, number, step)

    def _object_counts_text(self) -> str:
        counts = {name: len(objects) for name, objects in _objects_of(self._accelerator).items()}
        counts_text = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return (
            f"the accelerator has {counts_text}: prepare and register the same objects, in the "
            "same "
            "order and with the same configuration, as the run that saved it"
        )

    def _refuse_earlier_run(self, number: int) -> None:
        """Raise ``ConfigError`` on all ranks if an earlier run has saved step ``number`` or a later
        step.

        A restart would take that step instead of the first step of this run. There is no check if
        this run has restored a step, and only the first save is checked. The manager makes the same
        check, but in the background, when later saves may already have begun.
        """
        if self._has_begun_save:
            return
        newest: list[int | None] = [None]
        if self._accelerator.process_index == 0 and not self._has_restored:
            with suppress(CkptError):  # The save meets the same error, and reports it or retries
                newest = [self.manager.latest_step()]
        import_module("accelerate.utils").broadcast_object_list(newest)  # Sets the items elsewhere
        (newest_step,) = newest
        if newest_step is not None and newest_step >= number:
            places = ", ".join(self._urls)
            raise ConfigError(
                f"{places} holds step {newest_step} of an earlier run, which a restart would take "
                f"before step {number}: call load_state() before the first save_state(), or give "
                "this run another place"
            )
        self._has_begun_save = True

    def _note_restored(self, event: Event) -> None:
        self._has_restored = self._has_restored or isinstance(event, Restored)

    def _refuse_accelerate_folders(self) -> None:
        """Raise ``ConfigError`` if a folder has a checkpoint of ``accelerator.save_state``.

        The folders are the tiers, and ``checkpoints`` in the ``project_dir``.
        """
        project_dir = self._accelerator.project_dir
        folders = [*self._folders, *([Path(project_dir, "checkpoints")] if project_dir else [])]
        for folder in folders:
            for inner in sorted(folder.glob("checkpoint_*")):
                if _is_accelerate_folder(inner):
                    raise ConfigError(_foreign_folder_text(inner))


class _LoaderOrder:
    """The state that decides the order of the samples in the next epochs of a prepared loader.

    This state is the loader's count of epochs (``iteration``), and the seed or the random generator
    of the loader's sampler. ``accelerator.save_state`` does not save most of it.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        sampler = self._loader.get_sampler()
        state = {"iteration": self._loader.iteration}
        if hasattr(sampler, "initial_seed"):
            state["seed"] = sampler.initial_seed
        if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
            state["generator"] = generator.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sampler = self._loader.get_sampler()
        self._loader.iteration = state["iteration"]
        if "seed" in state and hasattr(sampler, "initial_seed"):
            sampler.initial_seed = state["seed"]
        if "generator" in state and hasattr(sampler, "generator"):
            sampler.generator = sampler.generator or torch.Generator()
            sampler.generator.set_state(state["generator"])


class _LoaderPosition:
    """The position of a ``StatefulDataLoader``."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        # Without this assignment, a save before the next batch would save the state before the
        # restore.
        self._loader.dl_state_dict = state


def _objects_of(accelerator: Any) -> dict[str, list[Any]]:
    """Return the objects that ``accelerator.save_state`` saves: kind -> list of objects."""
    return {
        "model": accelerator._models,
        "optimizer": _entries_of_optimizers(accelerator),
        "scheduler": accelerator._schedulers,
        "loader": [dict(_loader_entries(loader)) for loader in accelerator._dataloaders],
        "registered": [_entry_of(value) for value in accelerator._custom_objects],
    }


def _entries_of_optimizers(accelerator: Any) -> list[Any]:
    """Return what a state holds of the optimizers.

    Raises:
        UnsupportedValue: An optimizer with a ``state_dict()`` of its own has sharded parameters.
    """
    is_sharded = accelerator.distributed_type.value == "FSDP"
    return saved_as(accelerator._optimizers, "optimizer", is_sharded=is_sharded)


def _loader_entries(loader: Any) -> Iterator[tuple[str, PerRank]]:
    yield "order", PerRank(_LoaderOrder(loader), on_resize=same_or_first)
    if loader.use_stateful_dataloader:
        yield "position", PerRank(_LoaderPosition(loader), on_resize=_REFUSE_RESIZE)


def _entry_of(value: Any) -> Any:
    """Return a registered object as an entry of the state.

    Modules, optimizers, `PerRank` values, and objects whose class inherits from ``Stateful`` of
    ``torch.distributed.checkpoint`` are returned unchanged. For any other object, each rank saves
    its own value (`PerRank`).
    """
    if isinstance(value, nn.Module | Optimizer | PerRank) or inherits_stateful(value):
        return value
    return PerRank(value, on_resize=same_or_first)


def _is_object_name(name: str) -> bool:
    """Return True for the name of a whole object, such as ``model_1`` or ``loader/order``.

    Return False for the name of a part of an object, such as ``model/weight``.
    """
    return "/" not in name or name.endswith(("/order", "/position"))


def _with_total_limit(place: Any, total_limit: int | None) -> Tier:
    """Return the tier ``place``, which keeps ``total_limit`` steps unless it has its own limit."""
    (tier,) = as_tiers(place)
    # "memory" keeps what its slots hold.
    has_own_limit = isinstance(place, Tier) or tier.url == MEMORY
    return tier if has_own_limit else Tier(tier.url, keep_last=total_limit)


def _check_accelerator(accelerator: Any) -> None:
    """Raise ``ConfigError`` if ``accelerator`` is no ``Accelerator``, or of an unsupported type.
    Log a warning if the installed release of accelerate is not tested.
    """
    import accelerate

    if not isinstance(accelerator, accelerate.Accelerator):
        raise ConfigError(
            f"AcceleratorCheckpoints needs an accelerate.Accelerator, not a "
            f"{type(accelerator).__name__}"
        )
    kind = accelerator.distributed_type.value
    if kind in _REFUSALS:
        raise ConfigError(f"an Accelerator of type {kind} is not supported: {_REFUSALS[kind]}")
    warn_of_untested("accelerate", TESTED_RANGE, advice="save and restore once and compare")


def _warn_of_hooks(verb: str, hooks: Mapping[int, Any]) -> None:
    """Log a warning, once in a process, if the user has registered ``hooks``.

    Accelerate calls these hooks before it saves or loads (``verb``), and ckpt does not call them.
    """
    if hooks:
        warn_once(
            "ckpt: %d hook(s) of %s are not called, since no folder is %s: call them yourself if "
            "they keep more than the models",
            len(hooks),
            f"register_{verb}_state_pre_hook",
            "written" if verb == "save" else "read",
        )


def _check_step(step: object, verb: str) -> None:
    if isinstance(step, str | os.PathLike):
        raise ConfigError(
            f"{verb}({os.fspath(step)!r}): give the number of a step. The place is given once, to "
            "AcceleratorCheckpoints(accelerator, place); accelerator.load_state(folder) loads a "
            "folder that accelerator.save_state has written"
        )


def _is_accelerate_folder(folder: Path) -> bool:
    """Return True for a folder that ``accelerator.save_state`` has written."""
    return any(folder.glob("random_states_*.pkl"))


def _foreign_folder_text(folder: Path) -> str:
    return (
        f"{folder} is a checkpoint of accelerator.save_state: load it once with "
        f"accelerator.load_state({str(folder)!r}) instead of AcceleratorCheckpoints.load_state, "
        "and save into another folder from then on"
    )
