"""Saves overlap with a step for every value of every dtype, compared by bits.

The cases also cover each way to share or cut memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from tests.overlap.jobs import WIDTH, train, trained
from tests.overlap.window import Window, assert_restores, content
from tests.state.saving import bits

ODD = {
    torch.float32: [
        0x7FC00000,
        0x7F800001,
        0xFFC12345,
        0x7F800000,
        0xFF800000,
        0x80000000,
        1,
        0x80000001,
        0x007FFFFF,
    ],
    torch.bfloat16: [0x7FC0, 0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 1, 0x8001, 0x007F],
    torch.float16: [0x7E00, 0x7C01, 0xFE01, 0x7C00, 0xFC00, 0x8000, 1, 0x8001, 0x03FF],
    torch.float64: [
        0x7FF8 << 48,
        (0x7FF0 << 48) | 1,
        -(1 << 48),
        0x7FF0 << 48,
        -(1 << 63),
        1,
        (1 << 52) - 1,
    ],
}
"""NaN quiet, signalling and with a payload, the infinities, minus zero, denormals."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def odd(dtype: torch.dtype) -> torch.Tensor:
    width = 8 * dtype.itemsize
    words = [word - (1 << width) if word >= 1 << (width - 1) else word for word in ODD[dtype]]
    return torch.tensor(words, dtype=INTEGERS[dtype.itemsize]).view(dtype)


@pytest.fixture(params=[False, True], ids=["", "denormals flushed"])
def flush(request: pytest.FixtureRequest) -> Any:
    if request.param and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flush")
@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_odd_values_are_kept_to_the_bit(dtype: torch.dtype, root: str, window: Window) -> None:
    def build(fill: torch.Tensor) -> dict[str, Any]:
        late, eager = nn.Parameter(fill.clone()), fill.clone()
        optimizer = torch.optim.SGD([late], lr=0.1)
        optimizer.state[late] = {
            "momentum_buffer": fill.clone(),
            "float": float("nan"),
            "small": 5e-324,
        }
        return {
            "model": nn.ParameterDict({"late": late}),
            "optimizer": optimizer,
            "eager": eager,
            "nan": float("-inf"),
        }

    state = build(odd(dtype))
    words = bits(odd(dtype))
    state["model"]["late"].grad = torch.ones_like(state["model"]["late"])
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        state["eager"].zero_()
        window.must_wait(state["optimizer"].step)
        pending.result(60)
    target = build(torch.zeros(len(odd(dtype)), dtype=dtype))
    assert_restores(root, window.reference, target)
    late = target["model"]["late"]
    assert (
        bits(late)
        == bits(target["eager"])
        == bits(target["optimizer"].state[late]["momentum_buffer"])
        == words
    )


# -- memory that is shared or cut ------------------------------------------------------------------


class Flat(nn.Module):
    """Parameters that are views of one flat buffer, as in fused optimizers and
    flattened modules.
    """

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.flat = torch.arange(100.0) + fill
        self.one = nn.Parameter(self.flat[:40].view(4, 10))
        self.two = nn.Parameter(self.flat[40:].view(10, 6).t())
        self.three = nn.Parameter(self.flat[95:])  # the end of `two` again


class Strange(nn.Module):
    """Parameters with many kinds of strides."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        base = torch.arange(4096.0).reshape(16, 16, 16) + fill
        self.transposed = nn.Parameter(base.clone().transpose(0, 2))
        self.every_other = nn.Parameter(base.clone()[::2, 1::3, ::5])
        self.channels_last = nn.Parameter(
            (base.clone().reshape(2, 8, 16, 16)).contiguous(memory_format=torch.channels_last)
        )
        self.scalar = nn.Parameter(torch.tensor(fill))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.large_offset = nn.Parameter(base.clone().reshape(-1)[4000:4003])


def stepping(module: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    state = {"model": module, "optimizer": optimizer}
    step(state)
    return state


def step(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


@pytest.mark.parametrize("kind", [Flat, Strange])
def test_views_of_any_kind_wait_like_others(
    kind: type[nn.Module], root: str, window: Window
) -> None:
    state = stepping(kind(1.0))
    with CheckpointManager(root) as manager:
        for number in range(2):
            window.save(manager, state, number)
            window.must_wait(partial(step, state))
        manager.fence()
    assert_restores(root, window.reference, stepping(kind(50.0)))


def test_the_flat_buffer_beside_its_views_is_of_the_same_moment(root: str, window: Window) -> None:
    """The buffer is copied at once and its views are copied late. A step between them
    would show.
    """
    state = stepping(Flat(1.0))
    state["flat"] = state["model"].flat
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(partial(step, state))
    target = stepping(Flat(50.0)) | {"flat": torch.zeros(100)}
    assert_restores(root, window.reference, target)
    assert torch.equal(target["flat"][:40].view(4, 10), target["model"].one)


def test_a_tied_weight_stays_one(root: str, window: Window) -> None:
    state = trained()
    assert state["model"].three.weight is state["model"].one.weight
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(partial(train, state, 3))
    target = trained(seed=5)
    assert_restores(root, window.reference, target)
    assert target["model"].three.weight is target["model"].one.weight


def test_a_parameter_that_is_in_the_state_by_itself_too_is_of_the_same_moment(
    root: str, window: Window
) -> None:
    state = trained()
    state |= {
        "alone": state["model"].two.weight,
        "expanded": state["model"].two.bias.detach().expand(5, WIDTH),
    }
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(partial(train, state, 3))
    target = trained(seed=5)
    target |= {"alone": target["model"].two.weight, "expanded": torch.zeros(5, WIDTH)}
    assert_restores(root, window.reference, target)


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        partial(torch.autocast, "cpu"),
        partial(torch.device, "meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "meta"],
)
def test_the_mode_of_the_caller_does_not_matter(mode: Any, root: str, window: Window) -> None:
    """The first save makes the slots. Their properties must not depend on the caller's mode."""
    state = trained()
    with CheckpointManager(root) as manager:
        for number, here in enumerate([mode, mode, nullcontext]):
            with here():
                window.save(manager, state, number)
            window.must_wait(partial(train, state, number))
    assert_restores(root, window.reference, trained(seed=5), step=2)


@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_inference_tensors_are_copied_at_once(overlap: Any, root: str) -> None:
    """They have no version counter to compare."""

    def build(fill: float) -> dict[str, Any]:
        with torch.inference_mode():
            model = nn.Linear(4, 4)
            tensor = torch.full((5,), fill)
        return {
            "model": model,
            "tensor": tensor,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }

    state = build(1.0)
    reference = content(state)
    with CheckpointManager(root, overlap=overlap) as manager:
        pending = manager.save_async(state, 1)
        with torch.inference_mode():
            state["tensor"].zero_()
            state["model"].weight.zero_()
        pending.result(60)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = {"tensor": torch.zeros(5), "model": model, "optimizer": optimizer}
    assert_restores(root, reference, target)
