"""What the loader and the engine for vLLM share."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn
from vllm import version  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

from ckpt.errors import RestoreError
from ckpt.errors.base import few
from ckpt.integrations.shared.once_warnings import warn_of_untested

TESTED_RANGE: Final = ("0.32", "0.32")
_LOADER_ATTRIBUTE: Final = "weight_loader"


def warn_if_untested() -> None:
    """Log a warning, once in a process, if this release of vLLM is not tested."""
    warn_of_untested(
        "vllm",
        TESTED_RANGE,
        release=version.__version__,
        advice="compare what a model generates with what its trainer has",
    )


def names_of_load(
    model: nn.Module, weights: Mapping[str, torch.Tensor], step: int
) -> Collection[str] | None:
    """Return the names of the parameters that ``model.load_weights`` would set; None if that cannot
    be told. The model stays as it is: it gets tensors without values, and its parameters take
    nothing.

    Raises:
        RestoreError: The model refuses a name.
    """
    try:
        with _idle_weight_loaders([*model.parameters(), *model.buffers()]):
            names: Collection[str] | None = model.load_weights(  # type: ignore[operator]
                (name, value.to("meta")) for name, value in weights.items()
            )
            return names
    except (LookupError, ValueError) as error:
        raise RestoreError(
            f"step {step} does not fit {type(model).__name__} of vLLM ({error}): give names= the "
            "names that vLLM expects"
        ) from None
    except RuntimeError:  # The model reads values, or copies them without the weight loaders
        return None


@contextmanager
def _idle_weight_loaders(tensors: Sequence[torch.Tensor]) -> Generator[None]:
    """Let the weight loaders of vLLM's parameters do nothing in the block."""

    def load_nothing(*_: object, **__: object) -> bool:
        return True  # As the loaders of experts do for a weight that this worker has

    loaders = [(tensor, getattr(tensor, _LOADER_ATTRIBUTE, None)) for tensor in tensors]
    try:
        for tensor in tensors:
            setattr(tensor, _LOADER_ATTRIBUTE, load_nothing)
        yield
    finally:
        for tensor, loader in loaders:
            if loader is None:
                delattr(tensor, _LOADER_ATTRIBUTE)
            else:
                setattr(tensor, _LOADER_ATTRIBUTE, loader)


def check_complete(model: nn.Module, loaded_names: Collection[str] | None, step: int) -> None:
    """Check that a load has set all parameters of a model that is not quantized.

    Args:
        model: The model.
        loaded_names: What ``model.load_weights`` has returned: the names of the parameters that it
            has set, or None if the model does not tell.
        step: The step that the weights come from.

    Raises:
        RestoreError: Some parameters were not set.
    """
    if loaded_names is None:
        return
    names = [name for name, _ in model.named_parameters() if name not in loaded_names]
    if names:
        raise RestoreError(
            f"step {step} does not set {few(names)} of {type(model).__name__}: save the whole "
            "model, and let names= leave out only what vLLM does not need"
        )
