"""A mixin for Lightning's strategies, with which ckpt saves and restores the module and optimizers.

Without the mixin, Lightning would collect the tensors of the module and the optimizers for its own
checkpoint, and would load a checkpoint before the optimizers exist. A *dump* is the checkpoint that
Lightning collects, here without these tensors. A *reader* is an object that restores the steps of a
folder, such as ``CkptCheckpoint``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt.errors import ConfigError, UnsupportedValue
from ckpt.integrations.shared.once_warnings import warn_once
from ckpt.model.keys import StepRef, parse_folder
from ckpt.model.values import to_json

SCHEME: Final = "ckpt"
MODULE: Final = "state_dict"
"""The key of the module's tensors in Lightning's checkpoints."""
_OPTIMIZERS: Final = "optimizer_states"


class Reader(Protocol):
    """An object that restores the checkpoints of a folder, such as ``CkptCheckpoint``."""

    def find_step(self, path: str) -> int | str | StepRef | None:
        """Return the step or attempt that ``path`` means; None if ``path`` is not the reader's
        folder, and names no step of it.
        """
        ...

    def load(self, trainer: Trainer, target: int | str | StepRef) -> dict[str, Any]:
        """Fill the trainer's module and optimizers, and return a checkpoint for Lightning."""
        ...

    def restore_generators(self, trainer: Trainer) -> None:
        """Set the random number generators for a restored training, after all hooks
        ``on_train_start`` have run.
        """
        ...


class CkptStrategy(Strategy):
    """A mixin for a strategy whose module and optimizers ckpt saves and restores.

    ``CkptCheckpoint`` mixes this class into the strategy of its trainer. If a path is in the folder
    of no ``CkptCheckpoint``, Lightning loads it as without the mixin. If such a path is a
    ``ckpt://`` path or a folder with steps of ckpt, ``load_checkpoint`` raises ``ConfigError``.

    Attributes:
        readers: The ``CkptCheckpoint`` callbacks of the trainer.
    """

    readers: Sequence[Reader] = ()
    _dump_tensors: dict[str, Any] | None = None  # The module's tensors by name, during a dump
    _is_filled = False  # Whether a reader did the last load, in place
    _reader_tensors: Mapping[str, Any] | None = (
        None  # The module's tensors, until hooks have seen them
    )

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # The setup makes the optimizers, which a restore fills

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning restores the optimizers: not if a reader has already done so."""
        if not self._is_filled:
            return super().lightning_restore_optimizer
        assert self.lightning_module is not None
        if _OPTIMIZERS in self.lightning_module.trainer._checkpoint_connector._loaded_checkpoint:
            raise ConfigError(
                "an on_load_checkpoint hook has set checkpoint['optimizer_states'], but ckpt has "
                "restored the optimizers themselves: change the optimizers in on_train_start"
            )
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict. During a dump, note its tensors too."""
        if self._dump_tensors is None:
            return super().lightning_module_state_dict()
        assert self.lightning_module is not None
        tensors = self.lightning_module.state_dict()
        self._dump_tensors.update(tensors)
        return tensors

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return super().optimizer_state(optimizer) if self._dump_tensors is None else {}

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the closure (forward and backward) before the optimizer's step.

        The step waits for the copy of a snapshot. Lightning would run the closure within the step,
        so the closure would also wait.
        """
        results = [closure()]  # The optimizer's first call of the closure gets this result
        return super().optimizer_step(
            optimizer, lambda: results.pop() if results else closure(), model, **kwargs
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state from ``checkpoint``.

        If a reader has filled the module, this loads only what a hook ``on_load_checkpoint`` has
        changed.
        """
        tensors, self._reader_tensors = self._reader_tensors, None
        if tensors is None or _differ(tensors, checkpoint[MODULE]):
            super().load_model_state_dict(checkpoint, strict)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Let the reader that knows the path restore its step. Lightning loads any other path."""
        assert self.lightning_module is not None
        trainer, path = self.lightning_module.trainer, os.fspath(checkpoint_path)
        for reader in self.readers:
            if (target := reader.find_step(path)) is not None:
                self._is_filled = True
                checkpoint = reader.load(trainer, target)
                self._reader_tensors = dict(checkpoint.get(MODULE, {}))
                return checkpoint
        if path.startswith(f"{SCHEME}://") or _holds_steps(path):
            raise ConfigError(
                f"ckpt_path={path!r} is not below the folder of a CkptCheckpoint of this trainer: "
                f"give the callback that folder as dirpath"
            )
        self._is_filled, self._reader_tensors = False, None
        return super().load_checkpoint(checkpoint_path, weights_only)

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        for reader in self.readers:
            reader.restore_generators(self.lightning_module.trainer)

    def dump(self, trainer: Trainer) -> dict[str, Any]:
        """Return Lightning's checkpoint without the states of the module and the optimizers, and
        without the hyper-parameters that only pickle could save.

        Raises:
            ConfigError: A hook ``on_save_checkpoint`` has changed the module's state in the
                checkpoint.
        """
        tensors: dict[str, Any] = {}
        self._dump_tensors = tensors
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self._dump_tensors = None
        module, _ = checkpoint.pop(MODULE), checkpoint.pop(_OPTIMIZERS)
        if _differ(tensors, module):
            raise ConfigError(
                "an on_save_checkpoint hook has changed checkpoint['state_dict'], but ckpt saves "
                "the module itself: put what the hook makes under another key of the checkpoint"
            )
        return _with_plain_hparams(checkpoint)


def mix_in(strategy: Strategy, readers: Sequence[Reader]) -> None:
    """Make ``strategy`` a ``CkptStrategy`` with ``readers``, by a change of its class.

    Raises:
        ConfigError: The class of the strategy is not supported.
    """
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
        raise ConfigError(
            f"CkptCheckpoint cannot save for {type(strategy).__name__}: use one device, "
            "DDPStrategy or ModelParallelStrategy (FSDP2 and tensor parallelism)"
        )
    if not isinstance(strategy, CkptStrategy):
        kind = _mixin_type(type(strategy))
        strategy.__class__ = kind  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(strategy, CkptStrategy)
    strategy.readers = readers


def _differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return True unless both have the same objects under the same names."""
    return a.keys() != b.keys() or any(a[name] is not b[name] for name in a)


@functools.cache
def _mixin_type(kind: type[Strategy]) -> type[Strategy]:
    return type(f"Ckpt{kind.__name__}", (CkptStrategy, kind), {})


def _holds_steps(path: str) -> bool:
    """Return True if ``path`` is a folder with steps of ckpt, or the folder of one step."""
    names = [os.path.basename(path), *os.listdir(path)] if os.path.isdir(path) else []
    return any(map(parse_folder, names))


def _with_plain_hparams(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Remove from ``checkpoint`` the hyper-parameters that only pickle could save, and return it.

    A resumed training does not need these hyper-parameters.
    """
    for kind in (LightningModule, LightningDataModule):
        checkpoint.pop(kind.CHECKPOINT_HYPER_PARAMS_TYPE, None)
        hparams = checkpoint.pop(kind.CHECKPOINT_HYPER_PARAMS_KEY, {})
        if plain := {name: value for name, value in hparams.items() if _is_plain(name, value)}:
            checkpoint[kind.CHECKPOINT_HYPER_PARAMS_KEY] = plain
    return checkpoint


def _is_plain(name: str, value: object) -> bool:
    """Return True if a step can hold a hyper-parameter. If not, a warning says so once."""
    try:
        to_json(name, value)
    except UnsupportedValue as error:
        warn_once("ckpt: a hyper-parameter is not saved: %s", error)
        return False
    return True
