"""Defects that a review has found. Each test is the scenario of one of them."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.errors import (
    AccessDenied,
    CkptError,
    NoCheckpoint,
    RestoreError,
    TensorChanged,
    UnsupportedValue,
)
from ckpt.storage.testing import Raise, Rule
from tests.kit.stores import faulty, whole
from tests.kit.worlds import run_code


def test_another_try_after_one_tier_failed_leaves_the_committed_one_whole(tmp_path, monkeypatch):
    near, far = tmp_path / "near", tmp_path / "far"
    faulty(
        monkeypatch,
        far,
        [Rule(verb="upload", key="safetensors", nth=1, fault=Raise(AccessDenied("k", "no")))],
    )
    with CheckpointManager([near, far]) as manager:
        with pytest.raises(AccessDenied):
            manager.save({"x": torch.ones(4)}, step=5)
        manager.save({"x": torch.ones(4)}, step=5)
    assert whole(near) == whole(far) == [5]


def test_a_change_that_ends_after_the_copy_is_seen_at_the_fence(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    with CheckpointManager(tmp_path) as manager:
        pending = manager.save_async({"m": model, "o": optimizer}, step=1)
        assert pending._snapshot is not None
        pending._snapshot.wait_ended()
        with torch.no_grad():
            model.weight.add_(1)
        optimizer.step()
        with pytest.raises(TensorChanged, match=r"m/weight"):
            pending.result(30)


def test_a_restore_waits_for_the_copies_under_way(tmp_path):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"m": model, "o": optimizer}
    with CheckpointManager(tmp_path) as manager:
        with torch.no_grad():
            model.weight.fill_(0)
        manager.save(state, step=0)
        with torch.no_grad():
            model.weight.fill_(1)
        manager.save_async(state, step=1)
        manager.restore(state, step=0)
        assert bool((model.weight == 0).all())
    with CheckpointManager(tmp_path) as manager:
        manager.restore(state, step=1)
    assert bool((model.weight == 1).all())


def test_an_optimizer_that_hides_its_state_is_refused_by_name(tmp_path):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner
            self.slow = torch.ones(3)
            self.state, self.param_groups = defaultdict(dict), inner.param_groups

    model = nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UnsupportedValue, match=r"'o'.*Lookahead"):
            manager.save({"m": model, "o": Lookahead(torch.optim.SGD(model.parameters()))}, step=1)
        stray: Any = torch.optim.SGD(model.parameters())
        stray.state["global"] = {"t": torch.ones(1)}
        with pytest.raises(UnsupportedValue, match="belongs to no parameter"):
            manager.save({"m": model, "o": stray}, step=1)


def test_a_tied_target_refuses_what_was_saved_apart(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save({"a": torch.zeros(3), "b": torch.ones(3)}, step=1)
        one = torch.full((3,), 7.0)
        with pytest.raises(RestoreError, match="share their memory"):
            manager.restore({"a": one, "b": one})
        assert bool((one == 7).all())


def test_a_store_that_forbids_is_not_taken_for_damage(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": torch.zeros(3)}, step=1)
        manager.save({"x": torch.ones(3)}, step=2)
    rules = [
        Rule(verb="read_into", key="safetensors", nth=n, fault=Raise(AccessDenied("k", "no")))
        for n in range(1, 9)
    ]
    faulty(monkeypatch, tmp_path, rules)
    with CheckpointManager(tmp_path) as manager, pytest.raises(CkptError) as reported:
        manager.restore({"x": torch.zeros(3)})
    assert not isinstance(reported.value, NoCheckpoint)


def test_tensors_that_were_only_passing_are_let_go(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        seen = []
        for step in range(3):
            tensor = torch.ones(1000)
            seen.append(weakref.ref(tensor))
            manager.save({"x": tensor}, step=step)
            del tensor
        gc.collect()
        assert [ref() for ref in seen] == [None] * 3


def test_a_script_that_ends_without_close_still_finishes_its_save(tmp_path):
    script = (
        "import torch; from ckpt import CheckpointManager\n"
        f"manager = CheckpointManager({str(tmp_path)!r})\n"
        "manager.save_async({'x': torch.ones(1 << 22)}, step=3)\n"
    )
    run_code(script)
    assert whole(tmp_path) == [3]


def test_an_observer_that_exits_hangs_nobody(tmp_path):
    def leave(event):
        raise SystemExit

    with CheckpointManager(tmp_path, observers=[leave]) as manager:
        manager.save_async({"x": torch.ones(3)}, step=1).result(30)


def test_a_sparse_tensor_after_a_dense_one_of_its_name_is_refused(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": torch.eye(3)}, step=1)
        with pytest.raises(UnsupportedValue, match="'x'"):
            manager.save({"x": torch.eye(3).to_sparse()}, step=2)


def test_automatic_steps_go_on_after_a_save_that_failed(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save({"x": torch.ones(1)})
        with pytest.raises(UnsupportedValue):
            manager.save({"x": object()})
        assert manager.save({"x": torch.ones(1)}).step == 2
