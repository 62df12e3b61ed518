"""The accelerator of this run, and work that keeps its streams busy for a while.

``CKPT_TEST_DEVICE_MODULE`` names a Python module that is imported first and registers an
accelerator.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from ckpt.staging.device import drain, use_stream

if _module := os.environ.get("CKPT_TEST_DEVICE_MODULE"):
    importlib.import_module(_module)

SECONDS = (0.4, 1.6, 6.4)
"""For how long a stream is kept busy: far longer than a call takes that waits for nothing.

A simulated accelerator on a busy machine has no pace of its own, so what is to be seen may need a
longer try.
"""

_TRIED = 16
_LARGEST = {"cuda": 8192, "xpu": 8192}


def device(index: int = 0) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None
    return torch.device(found.type, index)


def why_not() -> str:
    """Return why there is nothing to test with, or an empty string."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        return "there is no accelerator here (torch.accelerator.is_available() is False)"
    return ""


class Delay:
    """Products of matrices that are large enough for one of them to take some milliseconds.

    A queue of launches is short.
    """

    def __init__(self, place: torch.device) -> None:
        size = 256
        while True:
            self._matrix = torch.ones(size, size, device=place)
            self._out = torch.empty_like(self._matrix)
            self._seconds(1)
            self._each = self._seconds(_TRIED) / _TRIED
            if self._each > 0.004 or size >= _LARGEST.get(place.type, 1024):
                return
            size *= 2

    def _seconds(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(self._matrix, self._matrix, out=self._out)
        torch.accelerator.current_stream(self._matrix.device).synchronize()
        return time.perf_counter() - began

    def queue(self, seconds: float) -> None:
        """Keep the current stream busy for about this long."""
        for _ in range(max(1, round(seconds / self._each))):
            torch.mm(self._matrix, self._matrix, out=self._out)


@cache
def delay(place: torch.device) -> Delay:
    return Delay(place)


def keep_busy(seconds: float, stream: torch.Stream | None = None) -> torch.Event:
    """Queue work on ``stream``, or on the current one, and return an event behind it."""
    chosen = stream or torch.accelerator.current_stream()
    made = delay(torch.device(chosen.device.type, chosen.device_index))
    with use_stream(chosen):
        made.queue(seconds)
    return chosen.record_event()


def trained(
    place: torch.device,
    *,
    seed: int = 0,
    width: int = 256,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> dict[str, Any]:
    """Return a state that has stepped: the optimizer owns all of it but the learning rate."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).to(place)
    # a simulated accelerator has no foreach kernels
    optimizer = kind(model.parameters(), lr=0.5, momentum=0.9, foreach=False)
    state = {"model": model, "optimizer": optimizer}
    backward(state)
    optimizer.step()
    drain([place])
    return state


def backward(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)


def content(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of it holds once all queued work has ended."""
    found = {
        name: parameter.detach().cpu() for name, parameter in state["model"].named_parameters()
    }
    for name, parameter in state["model"].named_parameters():
        for key, value in state["optimizer"].state[parameter].items():
            found[f"{name}.{key}"] = value.detach().cpu().clone()
    return found
