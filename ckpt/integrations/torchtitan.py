"""torchtitan: ``CkptManager`` in the place of its ``CheckpointManager``.

    config.checkpoint = CkptManager.Config(enable=True, folder="s3://bucket/run42", interval=100)

torchtitan still decides when to save, what the last step holds and what is loaded first, and it
still reads and writes Hugging Face folders. A ``CheckpointManager`` of ckpt saves and restores all
other checkpoints.

A checkpoint holds ``model``, ``optimizer``, ``lr_scheduler``, ``dataloader``, ``train_state`` and
``rng``. Parameters have the names of ``named_parameters()``. The hooks of ``state_dict()`` are not
called, since those of a fused attention would gather its weights on every rank.

torchtitan's own checkpoints are those of ``torch.distributed.checkpoint`` (DCP). ``PerRank`` marks
a value of which each rank saves its own, and ``on_resize`` says what the ranks get if their number
has changed.

Importing this module imports torchtitan.

``CkptManager`` uses what torchtitan's class has: ``states`` are the parts of the training state by
name, and the fields of the configuration that begin with ``last_save``, ``initial_load``,
``exclude_from`` and ``export`` are attributes. ``_should_save`` says whether a step is due,
``_save_last_step`` writes the last one as a Hugging Face folder, and ``_find_load_step`` finds the
newest step of DCP. ``save_future`` is the save under way. ``_waits_for_each_save`` is True with
``async_mode="disabled"``.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal

import torch
import tyro  # pyright: ignore[reportMissingImports]
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import (  # pyright: ignore[reportMissingImports]
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    CheckpointManager,
)
from torchtitan.tools import filesystem  # pyright: ignore[reportMissingImports]

from ckpt import manager
from ckpt.config import MEMORY, Tier
from ckpt.data.worker_seeds import give_generator
from ckpt.errors import ConfigError, EntryMissing, RestoreError
from ckpt.errors.base import few
from ckpt.errors.sanitize import redact
from ckpt.integrations.shared.all_ranks import first_result
from ckpt.integrations.shared.framework_manager import FrameworkManager
from ckpt.integrations.shared.once_warnings import warn_of_untested
from ckpt.integrations.shared.resizing import refusing_resize, same_or_first
from ckpt.model.keys import StepRef
from ckpt.state.tensors.layout import holders_of
from ckpt.state.tensors.per_rank import PerRank, RngState
from ckpt.state.tensors.sharded import hookless_state
from ckpt.state.walk.module_entries import Entry, ModuleItems, Part
from ckpt.state.walk.modules import canonical
from ckpt.state.walk.stand_in import ModuleStandIn

TESTED_RANGE: Final = ("0.3", "0.3")
_RNG: Final = "rng"
_NOT_FOUND: Final = "has not found the step to load"
_DCP: Final = "dcp"
"""The text that stands for the attempt in the `StepRef` of a step that DCP has saved."""
_NEWEST: Final = -1
"""The number that stands for the newest step in torchtitan."""
_STEP_FOLDER: Final = re.compile(r"step-([0-9]+)")
_log = logging.getLogger("ckpt")
_REFUSE_RESIZE: Final = refusing_resize(
    "the position in the data",
    'set checkpoint.exclude_from_loading to ["dataloader"] to begin with the first sample',
)


class CkptManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoint manager with the saves of ckpt.

    ``folder`` may be a folder or any URL of ckpt. A checkpoint of DCP in a local ``folder`` is
    still found, and is loaded if it is newer than the steps of ckpt.

    Attributes:
        manager: The ``CheckpointManager`` of ckpt that saves and restores.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The settings of torchtitan's manager, and those of ckpt."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Save in the background; "disabled" waits until each save is durable."""

        nearer: list[str] = field(default_factory=list)
        """Tiers in front of the folder, nearest first: "memory", folders and URLs."""

        settings: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Fields of ``SaveConfig``, for configurations in Python."""

    save_future: Any  # A PendingSave, which has the result() of a future

    def __init__(self, config: Any, **parts: Any) -> None:
        warn_of_untested("torchtitan", TESTED_RANGE, advice="resume once and compare the losses")
        # With these values, torchtitan starts no process group for DCP and no thread that removes
        # folders.
        super().__init__(replace(config, async_mode="disabled", keep_latest_k=0), **parts)
        if not self.enable:
            return
        self._waits_for_each_save = config.async_mode == "disabled"
        self._model = _ModelParts(parts["model_parts"])
        # The loader draws from a generator of its own, so that a resume shifts no random numbers.
        give_generator(self.states[DATALOADER], 0)
        self.keep_latest_k = config.keep_latest_k
        base = parts.get("base_folder", "")
        tiers = [
            Tier(filesystem.join(base, url), keep_last=config.keep_latest_k or None)
            if url != MEMORY
            else Tier(MEMORY)
            for url in (*config.nearer, config.folder)
        ]
        self.manager = FrameworkManager(tiers, **config.settings)

    # -- what torchtitan calls ---------------------------------------------------------------------

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save the step if it is due by torchtitan's rules, and return True if it is."""
        if not self._should_save(curr_step, last_step):
            return False
        if last_step and self.last_save_in_hf:
            self._save_last_step(curr_step)
            return True
        is_model_only = last_step and self.last_save_model_only
        state = {MODEL: self._model.cast(self.export_dtype)} if is_model_only else self._state()
        self.save_future = self.manager.save_async(state, curr_step, final=last_step)
        if last_step or self._waits_for_each_save:
            self._wait_for_saving()
        return True

    def _load(self, step: int = _NEWEST) -> bool:
        """Load a step of ckpt, or let torchtitan load one of DCP. Return True if there was one."""
        is_step_given = step != _NEWEST
        # Rank 0 decides for all ranks.
        is_in_ckpt, step, has_model_only = first_result(_NOT_FOUND, lambda: self._find_step(step))
        if not is_in_ckpt:
            is_loaded: bool = super()._load(step)
            if is_step_given:  # The steps of ckpt after this one may be saved again
                self.manager.continue_from(StepRef(step, _DCP))
            return is_loaded
        all_names = self._state().keys() - set(self.exclude_from_loading)
        names = {MODEL} if has_model_only else all_names
        self._restore(self.manager, None if step == _NEWEST else step, names)
        return True

    def _find_step(self, step: int) -> tuple[bool, int, bool]:
        """Find the step to load.

        Args:
            step: The number of the step that is asked for; -1 for the newest.

        Returns:
            Whether ckpt (and not DCP) has the step; the number of the step; and whether the step is
            a seed checkpoint, which holds the model alone. The number is -1 for the newest step of
            ckpt, and also if there is no step at all.

        Raises:
            FileNotFoundError: Neither ckpt nor DCP has the step that is asked for.
        """
        steps, newest_of_dcp = self.manager.steps(), self._find_load_step()
        if step == _NEWEST:
            if not steps or newest_of_dcp > max(steps):
                return False, newest_of_dcp, False
            has_seed_only = steps == [0]
            return True, 0 if has_seed_only else _NEWEST, has_seed_only
        dcp_steps = self._steps_of_dcp()
        if step not in {*steps, *dcp_steps}:
            steps_text = few(
                [str(number) for number in sorted({*steps, *dcp_steps})], 20, quote=False
            )
            raise FileNotFoundError(
                f"--checkpoint.load_step={step} not found in {redact(self.folder)}: "
                + (f"it has the steps {steps_text}" if steps_text else "it has no steps")
            )
        if newest_of_dcp > step:
            _log.warning(
                "ckpt: %s holds step %d of torchtitan's own manager, and this job continues from "
                "step %d: a restart takes the higher step, so remove it, or save higher steps",
                redact(self.folder),
                newest_of_dcp,
                step,
            )
        return step in steps, step, step == 0

    def _steps_of_dcp(self) -> set[int]:
        """Return the numbers of the steps in ``folder`` that torchtitan's own manager has saved."""
        names = filesystem.listdir(self.folder) if filesystem.isdir(self.folder) else []
        return {
            int(match[1]) for name in names if (match := _STEP_FOLDER.fullmatch(name)) is not None
        }

    def _wait_for_saving(self) -> None:
        pending, self.save_future = self.save_future, None
        pending.wait()
        if pending.unreported_error is not None:  # Other errors were raised or logged
            pending.result()

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing, since the fence holds each optimizer's step until its tensors are copied."""

    def _close(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load ``checkpoint_id``, which has steps of ckpt, or is a checkpoint of DCP or Hugging
        Face.

        torchtitan calls this with the ``initial_load_path``, for example.
        """
        if not from_hf:
            with manager.CheckpointManager(checkpoint_id) as source:
                if first_result(_NOT_FOUND, lambda: bool(source.steps())):
                    all_names = self._state().keys()
                    names = {MODEL} if self.initial_load_model_only else all_names
                    self._restore(source, None, names)
                    return
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    # -- inside ------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        """Return the state to save. ``exclude_from_loading`` has names of its entries."""
        schedule = {LR_SCHEDULER: self.states[LR_SCHEDULER]}
        per_rank_values = {
            name: PerRank(value, on_resize=_REFUSE_RESIZE if name == DATALOADER else same_or_first)
            for name, value in self.states.items()
            if name not in (MODEL, OPTIMIZER, LR_SCHEDULER) and value is not None
        }
        rng = PerRank(RngState(), on_resize="same_rank")
        optimizer = _optimizer_entry(self.states[OPTIMIZER].optimizers)
        return {MODEL: self._model, OPTIMIZER: optimizer, **schedule, **per_rank_values, _RNG: rng}

    def _restore(
        self, source: manager.CheckpointManager, step: int | None, names: Set[str]
    ) -> None:
        """Restore the entries ``names`` from a step of ``source``; from the newest one if ``step``
        is None.
        """
        state = self._state()
        if unknown := set(self.exclude_from_loading) - state.keys():
            raise ConfigError(
                f"checkpoint.exclude_from_loading names {sorted(unknown)}: the state has "
                f"{', '.join(state)}"
            )
        try:
            selection = None if names == state.keys() else sorted(names)
            # DCP converts dtypes as well
            report = source.restore(state, step, only=selection, cast=True)
        except EntryMissing as error:
            if not any(name.startswith(OPTIMIZER) for name in error.names):
                raise
            raise RestoreError(
                f"step {error.step} holds the model alone, as last_save_model_only asks for: set "
                "checkpoint.load_step to the step before it, or give its folder as "
                "checkpoint.initial_load_path of a new run"
            ) from error
        for name, entry in state.items():
            if isinstance(entry, PerRank) and name in self.states:
                self.states[name] = entry.value
        if report is None:
            return
        give_generator(self.states[DATALOADER], report.step)
        if source is self.manager:  # Even if a part was excluded
            self.manager.continue_from(StepRef(report.step, report.attempt))


class _ModelParts(ModuleStandIn):
    """The model parts of this rank as one module, which is saved without ``state_dict()`` hooks."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._items: ModuleItems | None = None

    def refresh(self) -> None:
        """Do nothing, since the sharded parameters of FSDP2 stay the same objects."""

    def take_restored_values(self) -> None:
        """Do nothing, since a restore fills the tensors of the parts themselves."""

    def items(self, path: str) -> ModuleItems:
        """Return the parameters and persistent buffers of all parts, with the path ``path`` of the
        model in the state.

        ``fqn`` is the name of an entry without the additions of wrappers.
        """
        if self._items is None:
            entries = [
                Entry(key=f"parts.{number}.{key}", fqn=canonical(part)(key), value=value)
                for number, part in enumerate(self.parts)
                for key, value in hookless_state(part).items()
            ]
            parameters = [entry for entry in entries if isinstance(entry.value, nn.Parameter)]
            self._items = ModuleItems(
                entries=tuple(entries),
                parts={id(entry.value): (Part(f"{path}/{entry.fqn}"),) for entry in parameters},
                holders={
                    id(entry.value): holders_of(entry.value)
                    for entry in parameters
                    if isinstance(entry.value, DTensor)
                },
            )
        return self._items

    def cast(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the items by name, with floating point tensors converted to ``dtype``."""
        return {
            entry.fqn: entry.value.detach().to(dtype)
            if isinstance(entry.value, torch.Tensor) and entry.value.is_floating_point()
            else entry.value
            for entry in self.items(MODEL).entries
        }


def _optimizer_entry(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the optimizer if there is only one, else a dict of all optimizers by class name.

    A repeated class name gets a number.
    """
    if len(optimizers) == 1:
        return optimizers[0]
    counts: Counter[str] = Counter()
    by_name: dict[str, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        by_name[f"{kind}_{counts[kind]}" if counts[kind] else kind] = optimizer
        counts[kind] += 1
    return by_name
