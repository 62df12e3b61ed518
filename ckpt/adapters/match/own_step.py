"""The state that an optimizer's own step makes for a parameter.

A value of a class that ckpt does not know, such as a quantised moment, can only be made by the code
that owns the class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.adapters.torch_private import without_step_hooks
from ckpt.errors import RestoreError


def state_of_step(
    name: str, optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> Mapping[Any, Any]:
    """The state of ``parameter`` after a first step with a gradient of zeros.

    A stand-in of the optimizer steps a stand-in of the parameter, without the hooks of the
    optimizer. Neither these two nor the random number generators change.

    Raises:
        RestoreError: The step fails; ``name`` is what it should have made.
    """
    kind = type(optimizer)
    stand_in = without_step_hooks(optimizer)
    stand_in.state = defaultdict[Any, dict[Any, Any]](dict)
    try:
        with torch.random.fork_rng():
            zeros = torch.zeros_like(parameter.detach())
            zeros.grad = torch.zeros_like(zeros)
            settings = {key: _copy(value) for key, value in group.items() if key != "params"}
            stand_in.param_groups = [{**settings, "params": [zeros]}]
            kind.step(stand_in)
    except Exception as error:  # code of the optimizer
        raise RestoreError(
            f"{name!r} is not there yet, and a step of {kind.__qualname__} that would make it "
            f"fails ({error!r}): take one optimizer step before restoring"
        ) from error
    return dict(stand_in.state[zeros])


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
