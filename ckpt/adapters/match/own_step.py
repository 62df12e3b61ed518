"""The state that an optimizer's own step makes for a parameter.

A value of a class that ckpt does not know, such as a quantised moment, can only be made by the code
that owns the class.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt.adapters.torch_private import stand_in_of
from ckpt.errors import RestoreError


def state_of_step(
    name: str, optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> Mapping[Any, Any]:
    """Return the state of ``parameter`` after a first step with a gradient of zeros.

    A stand-in of the optimizer, with copies of its attributes, steps a stand-in of the parameter,
    without the hooks of the optimizer. Neither these two nor the random numbers of torch and of
    Python's ``random`` change. What the step does to objects outside of the optimizer stays.

    Raises:
        RestoreError: The step fails, or an attribute cannot be copied; ``name`` is what the step
            should have made.
    """
    kind = type(optimizer)
    numbers = random.getstate()
    try:
        with torch.random.fork_rng():
            zeros = torch.zeros_like(parameter.detach())
            zeros.grad = torch.zeros_like(zeros)
            settings = {key: value for key, value in group.items() if key != "params"}
            stand_in, settings = stand_in_of(optimizer, settings)
            stand_in.param_groups = [{**settings, "params": [zeros]}]
            kind.step(stand_in)
    except Exception as error:  # An optimizer's code may raise anything
        raise RestoreError(
            f"{name!r} is not there yet, and a step of {kind.__qualname__} that would make it "
            f"fails ({error!r}): take one optimizer step before restoring"
        ) from error
    finally:
        random.setstate(numbers)
    return dict(stand_in.state[zeros])
