"""The walks that look for modules, optimizers and tensors in a state."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.state.walk.state_objects import walk_objects, walk_tensors

MODULE, TENSOR = nn.Linear(1, 1), torch.ones(1)


def test_values_of_all_kinds_are_found_beside_plain_ones() -> None:
    state = {"a": [1, {"t": TENSOR}, (TENSOR,), {"m": MODULE, "n": 2}], "b": [[0.5, TENSOR]]}
    assert [tensor is TENSOR for _, tensor in walk_tensors(state)] == [True] * 3
    assert [value is MODULE for _, value in walk_objects(state)] == [True]


@pytest.mark.parametrize("walk", [walk_objects, walk_tensors])
@pytest.mark.parametrize(
    "history",
    [
        [number * 0.1 for number in range(60_000)],
        [{"step": n, "loss": n * 0.1, "lr": 1e-3, "epoch": n / 7} for n in range(20_000)],
    ],
    ids=["floats", "log history"],
)
def test_a_walk_over_a_long_history_takes_less_time_than_json(
    walk: Callable[[Any], Iterator[object]], history: list[object]
) -> None:
    def seconds(work: Callable[[], object]) -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    state = {"history": history, "tensor": TENSOR}
    ours = min(seconds(lambda: list(walk(state))) for _ in range(3))
    assert ours < min(seconds(lambda: json.dumps(history)) for _ in range(3))
