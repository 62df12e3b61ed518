"""A compiled step waits for the copy, whether it was traced before or after the hook was added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.staging.fence import Fence
from tests.kit.marks import torture
from tests.overlap.jobs import Build, forward_backward, job
from tests.overlap.window import Window, assert_restores

BACKEND = "aot_eager"  # it needs no C++ compiler, and traces the same
SGD: Build = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW: Build = partial(torch.optim.AdamW, lr=0.01, foreach=True)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(way: str, state: dict[str, Any]) -> Callable[[int], None]:
    """Return a training step whose last part is compiled alone, in a function, or with forward and
    backward.
    """
    optimizer = state["optimizer"]

    def function() -> None:
        optimizer.step()

    def whole(number: int) -> None:
        forward_backward(state, number)
        optimizer.step()

    run = torch.compile(
        {"bare": optimizer.step, "function": function, "whole": whole}[way], backend=BACKEND
    )

    def step(number: int) -> None:
        optimizer.zero_grad()
        if way == "whole":
            return run(number)
        forward_backward(state, number)
        return run()

    return step


@pytest.mark.parametrize(
    ("traced", "way", "build"),
    [
        ("before there is a hook", "bare", SGD),
        *torture(
            ("before there is a hook", "function", ADAMW),
            ("before there is a hook", "whole", ADAMW),
            ("after", "function", ADAMW),
            ("after", "whole", ADAMW),
        ),
    ],
    ids=[
        "bare SGD, hooked later",
        "function, hooked later",
        "whole step, hooked later",
        "AdamW",
        "whole step",
    ],
)
def test_a_compiled_step_waits(
    traced: str, way: str, build: Build, root: str, window: Window
) -> None:
    state = job(build)
    step = compiled(way, state)
    with CheckpointManager(root) as manager:
        if traced != "after":
            step(0), step(1)
        manager.save(state, 0)
        step(2), step(3)  # the step is compiled by now
        for number in (4, 5):
            window.save(manager, state, number)
            window.must_wait(partial(step, number))
    assert_restores(root, window.reference, job(build, seed=5))


def test_the_hook_is_called_and_not_traced(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[bool] = []
    monkeypatch.setattr(Fence, "wait", lambda self: traced.append(torch.compiler.is_compiling()))
    state = job(SGD)
    step = compiled("function", state)
    step(0)
    with CheckpointManager(root) as manager:
        for number in range(3):
            manager.save(state, number)
            step(number)
    assert traced == [False] * 3
