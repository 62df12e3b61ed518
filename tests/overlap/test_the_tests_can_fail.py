"""The other tests of this folder would fail if the engine did not wait, did not compare, or copied
at another time than it says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.errors import TensorChanged
from ckpt.staging.fence import Fence
from tests.overlap.jobs import train, trained
from tests.overlap.window import Window, assert_restores


def unseen(state: dict, number: int) -> None:
    """Take a step that moves no version counter, as a replayed CUDA graph does."""
    tensors = list(state["model"].parameters())
    tensors += [held for p in tensors for held in state["optimizer"].state[p].values()]
    with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        train(state, number)


def test_without_the_hook_a_step_overtakes_the_copy_and_the_save_fails_by_name(
    root: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fence, "guard", lambda self, optimizers: None)
    state = trained()
    with CheckpointManager(root) as manager:
        pending = window.save(manager, state)
        window.overtake(lambda: train(state, 7), patience=10)
        assert window.overtaken
        assert window.changed
        with pytest.raises(TensorChanged, match="'model/"):
            pending.result(60)
        assert manager.steps() == []


@pytest.mark.parametrize("check", ["sampled", "full"])
def test_without_the_hook_and_the_counters_the_check_fails_the_save_by_name(
    check: Any, root: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fence, "guard", lambda self, optimizers: None)
    state = trained()
    with CheckpointManager(root, check=check) as manager:
        pending = window.save(manager, state)
        window.overtake(lambda: unseen(state, 7), patience=10)
        assert window.overtaken
        with pytest.raises(TensorChanged, match="'model/"):
            pending.result(60)
        assert manager.steps() == []


def test_without_hook_counters_and_check_the_checkpoint_is_torn_and_the_comparison_says_so(
    root: str, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fence, "guard", lambda self, optimizers: None)
    state = trained()
    with CheckpointManager(root, check="off") as manager:
        pending = window.save(manager, state)
        window.overtake(lambda: unseen(state, 7), patience=10)
        assert window.overtaken
        pending.result(60)
    with pytest.raises(AssertionError, match=r"state/model/one\.weight"):
        assert_restores(root, window.reference, trained(seed=5))


def test_with_the_hook_a_step_that_no_counter_sees_waits_too(root: str, window: Window) -> None:
    state = trained()
    with CheckpointManager(root) as manager:
        window.save(manager, state)
        window.must_wait(lambda: unseen(state, 7))
    assert_restores(root, window.reference, trained(seed=5))
