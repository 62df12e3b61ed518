"""Put the trained part of a model into a state, in place of the model.

The items of a module are the values of its state dict that are saved, and an entry is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ckpt.errors import ConfigError
from ckpt.state.walk.last_walk import LastWalk
from ckpt.state.walk.module_entries import Entry, ModuleItems
from ckpt.state.walk.stand_in import ModuleStandIn


def trainable(model: nn.Module) -> nn.Module:
    """Return an object to put into a state for the trained part of ``model``.

    ``{"model": ckpt.trainable(model), "optimizer": optimizer}`` saves and restores the parameters
    that require a gradient at the time of the save or restore, under the names that they have in
    the whole model. It also saves the buffers and the extra state of each module that directly
    holds such a parameter. All other parameters and buffers are left out. This includes the buffers
    of a ``BatchNorm(affine=False)``, which holds no parameter. The manifest names the values that
    are left out. So a restore of the whole model does not change them, and its report lists them.

    Raises:
        ConfigError: No parameter requires a gradient, or ``model`` is no module.
    """
    return _Trainable(model)


class _Trainable(ModuleStandIn):
    """Stands for the trained part of a model in a state. See ``trainable``.

    ``_last_items`` has the items of the model at the last call, which of them are trained, and the
    result. ``_last_walk`` finds the items of the model.
    """

    fills_module = True

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"trainable({type(model).__name__}): give a module")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "trainable(model): no parameter of the model requires a gradient: call it after "
                "the adapter is in place, or give the model itself"
            )
        super().__init__()
        self.model = model
        self._last_walk = LastWalk()
        self._last_items: tuple[ModuleItems | None, Sequence[bool], ModuleItems | None] = (
            None,
            (),
            None,
        )

    def refresh(self) -> None:
        """Do nothing, since ``items`` reads the model on every call."""

    def take_restored_values(self) -> None:
        """Do nothing, since a restore fills the model's own tensors."""

    def key_module(self) -> nn.Module:
        """Return the model."""
        return self.model

    def items(self, path: str) -> ModuleItems:
        """Return the items of the model to save. They depend on which parameters require a gradient
        now.
        """
        whole = self._last_walk.items(path, self.model)
        flags = [_is_trained(entry.value) for entry in whole.entries]
        last_whole, last_flags, part = self._last_items
        if part is None or last_whole is not whole or last_flags != flags:
            part = _trained_items(whole, flags)
            self._last_items = whole, flags, part
        return part


def _trained_items(whole: ModuleItems, flags: Sequence[bool]) -> ModuleItems:
    """Return ``whole`` without the entries to leave out. ``flags`` says for each entry whether it
    is a trained parameter.
    """
    flagged_entries = list(zip(whole.entries, flags, strict=True))
    trained_modules = {_module_name(entry) for entry, is_trained in flagged_entries if is_trained}
    keep_flags = [
        is_trained
        or (id(entry.value) not in whole.parts and _module_name(entry) in trained_modules)
        for entry, is_trained in flagged_entries
    ]
    return replace(
        whole,
        entries=tuple(
            entry for (entry, _), keep in zip(flagged_entries, keep_flags, strict=True) if keep
        ),
        omissions=tuple(
            entry.fqn
            for (entry, _), keep in zip(flagged_entries, keep_flags, strict=True)
            if not keep
        ),
    )


def _module_name(entry: Entry) -> str:
    """Return the canonical name of the module that directly holds the entry."""
    return entry.fqn.rpartition(".")[0]


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
