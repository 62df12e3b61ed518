"""A job in a child process that saves the weights of a small bf16 model, one step at each order."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
import xxhash

from ckpt import CheckpointManager, Tier
from tests.processes import fork

SIZE = 1 << 15


def weights_of(branch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(branch)
    values = {f"layer{index}.weight": (SIZE // 128, 128) for index in range(3)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in values.items()
    }


def update(weights: Mapping[str, torch.Tensor], step: int, branch: int) -> None:
    """Change the lowest bit of 2 % of the weights, as training with a small learning rate does."""
    generator = torch.Generator().manual_seed(1000 * branch + step)
    for value in weights.values():
        words = value.view(torch.int16)
        words ^= (torch.rand(value.shape, generator=generator) < 0.02).to(torch.int16)


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    state = xxhash.xxh3_128()
    for name in sorted(weights):
        state.update(name.encode())
        state.update(weights[name].contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


class Trainer:
    """A job that restores what is there, or ``step``, and then saves a step at each ``save``.

    A save returns the number and the digest of the step. Another ``branch`` has other numbers.
    """

    def __init__(
        self, roots: list[str], branch: int, step: int | None = None, **settings: Any
    ) -> None:
        self._pipe, other = Pipe()
        self._pid = fork(lambda: _train(other, roots, branch, step, settings))
        other.close()

    def save(self) -> tuple[int, str]:
        self._pipe.send("save")
        assert self._pipe.poll(60), "the job does not answer"
        answer: tuple[int, str] = self._pipe.recv()
        return answer

    def go_back(self, step: int) -> None:
        self._pipe.send(step)
        assert self._pipe.poll(60), "the job does not answer"
        self._pipe.recv()

    def kill(self) -> None:
        if not self._pipe.closed:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _train(
    orders: Connection, roots: list[str], branch: int, step: int | None, settings: dict[str, Any]
) -> None:
    state: dict[str, Any] = {"model": weights_of(branch), "step": 0}
    orders.poll(None)  # The job begins with its first order
    with CheckpointManager([Tier(root, keep_last=4) for root in roots], **settings) as manager:
        manager.restore(state, step=step)
        while True:
            if (order := orders.recv()) == "save":
                state["step"] += 1
                update(state["model"], state["step"], branch)
                manager.save(state)
                orders.send((state["step"], digest(state["model"])))
            else:
                manager.restore(state, step=order)
                branch += 100
                orders.send(None)
