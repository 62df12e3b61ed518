"""What the loader and the engine for vLLM share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from torch import nn
from vllm import version  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

from ckpt.errors import RestoreError
from ckpt.errors.base import few
from ckpt.integrations.shared.tested import warn_of_untested

TESTED_RANGE: Final = ("0.32", "0.32")


def warn_if_untested() -> None:
    """Log a warning, once in a process, if this release of vLLM is not tested."""
    warn_of_untested(
        "vllm",
        TESTED_RANGE,
        release=version.__version__,
        advice="compare what a model generates with what its trainer has",
    )


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
