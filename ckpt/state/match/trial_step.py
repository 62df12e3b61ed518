"""Make optimizer state by a trial step of a copy of the optimizer.

Only the optimizer's own code can make a value of a class that ckpt does not know, such as a
quantised moment.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.errors import RestoreError
from ckpt.torch_private import hookless_copy_of


def state_of_step(
    name: str, optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> Mapping[Any, Any]:
    """Return the state that ``optimizer`` makes for ``parameter`` in a first step with a gradient
    of zeros.

    The step is done by a copy of the optimizer without hooks, on a tensor of zeros in place of the
    parameter. The optimizer, the parameter, and the random number generators of torch and of
    Python's ``random`` do not change. If the step changes other objects, these changes stay.

    Args:
        name: The name of the value to make, for the error.
        optimizer: The optimizer.
        group: The parameter group of the parameter.
        parameter: The parameter.

    Raises:
        RestoreError: The step fails, or an attribute of the optimizer cannot be copied.
    """
    optimizer_class = type(optimizer)
    random_state = random.getstate()
    try:
        with torch.random.fork_rng():
            zeros = torch.zeros_like(parameter.detach())
            zeros.grad = torch.zeros_like(zeros)
            settings = {key: value for key, value in group.items() if key != "params"}
            optimizer_copy, settings = hookless_copy_of(optimizer, settings)
            optimizer_copy.param_groups = [{**settings, "params": [zeros]}]
            optimizer_class.step(optimizer_copy)
    except Exception as error:  # An optimizer's code may raise anything
        raise RestoreError(
            f"{name!r} is not there yet, and a step of {optimizer_class.__qualname__} that would "
            f"make it fails ({error!r}): take one optimizer step before restoring"
        ) from error
    finally:
        random.setstate(random_state)
    return dict(optimizer_copy.state[zeros])
