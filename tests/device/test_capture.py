"""Graph captures, which CUDA has (and XPU, where it says so).

A save does not become a part of one, and does not break it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import StagingError
from ckpt.staging.device import side_stream
from tests.device.accelerator import SECONDS, content, device, keep_busy, trained

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def captures(place: torch.device) -> None:
    if place.type != "cuda":
        pytest.skip("a capture is tested on CUDA")


def capturable(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 256, device=device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    state = {"model": model, "optimizer": optimizer}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(state)
    torch.cuda.synchronize()
    return state


def step(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad(set_to_none=False)
    state["model"](torch.ones(8, 256, device=device())).sum().backward()
    state["optimizer"].step()


def captured(state: dict[str, Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(state)
    return graph


def assert_restores(root: str, number: int, expected: dict[str, torch.Tensor]) -> None:
    loaded = capturable(seed=9)
    with CheckpointManager(root) as manager:
        manager.restore(loaded, number)
    found = content(loaded)
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def test_a_save_in_a_capture_is_refused_by_name_and_the_capture_goes_on(root: str) -> None:
    state = capturable()
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state["model"].weight.data.add_(1)
            with pytest.raises(StagingError, match="while a graph is captured"):
                manager.save_async(state, 2)
        before = state["model"].weight.detach().clone()
        graph.replay()
        assert torch.equal(state["model"].weight, before + 1)
        manager.save(state, 3)


def test_a_capture_while_a_save_is_under_way_is_not_invalidated(root: str) -> None:
    """Background threads launch copies, pin memory and wait for events meanwhile."""
    state = trained(device())
    other = capturable()
    expected = content(state)
    side = side_stream(device())
    assert side is not None
    with CheckpointManager(root) as manager:
        keep_busy(SECONDS[0], side)
        pending = manager.save_async(state, 1)
        graph = captured(other)
        pending.result(60)
        graph.replay()
        torch.cuda.synchronize()
        loaded = trained(device(), seed=9)
        manager.restore(loaded, 1)
    assert [
        name for name, value in content(loaded).items() if not torch.equal(expected[name], value)
    ] == []


def test_the_capture_of_a_step_waits_for_a_save_of_its_state(root: str) -> None:
    state = capturable()
    expected = content(state)
    side = side_stream(device())
    assert side is not None
    with CheckpointManager(root) as manager:
        keep_busy(SECONDS[0], side)
        pending = manager.save_async(state, 1)
        graph = captured(state)
        graph.replay()
        pending.result(60)
    assert_restores(root, 1, expected)


def test_replays_behind_a_save_do_not_change_it(root: str) -> None:
    state = capturable()
    with CheckpointManager(root) as manager:
        manager.save(state, 1)
        graph = captured(state)
        side = side_stream(device())
        assert side is not None
        for number in (2, 3):
            torch.cuda.synchronize()
            expected = content(state)
            keep_busy(SECONDS[0], side)
            pending = manager.save_async(state, number)
            graph.replay()
            pending.result(60)
            assert_restores(root, number, expected)
