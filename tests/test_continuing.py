"""The step from which a job continues: only a restore of the state that is saved sets it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed
from ckpt.save.tier_writer import TierWriter
from ckpt.storage.registry import open_backend
from tests.coordination.world import World
from tests.kit.states import state
from tests.kit.stores import whole


def left_by_a_job(tiers, *steps):
    with CheckpointManager(tiers) as manager:
        for step in steps:
            manager.save(state(step), step)


def test_a_look_at_a_part_of_an_older_step_does_not_move_it(near):
    left_by_a_job(near, 5, 10)
    with CheckpointManager(near) as manager:
        trained = state(0)
        manager.restore(trained)
        best = {"x": torch.zeros_like(trained["x"])}
        manager.restore(best, step=5, only="x")
        assert best["x"].unique().tolist() == [5]
        assert manager.save(trained).step == 11


def test_a_look_before_the_restore_does_not_count_either(near):
    left_by_a_job(near, 5, 10)
    with CheckpointManager(near) as manager:
        manager.restore(state(0), step=5, only="x")
        assert manager.save(state(11), 11).step == 11
        manager.restore(state(0), step=5, only="x")
        assert manager.save(state(12)).step == 12


def test_the_newest_step_that_is_restored_in_parts_sets_it(near):
    left_by_a_job(near, 5, 10)
    with CheckpointManager(near) as manager:
        trained = state(0)
        for part in trained:
            manager.restore(trained, only=part)
        assert manager.save(trained).step == 11


@pytest.mark.parametrize("has_saved", [False, True])
def test_a_look_at_a_whole_step_with_other_tensors_does_not_count(near, has_saved):
    left_by_a_job(near, 5, 10)
    with CheckpointManager(near) as manager:
        trained, other = {"model": nn.Linear(3, 3)}, {"model": nn.Linear(3, 3)}
        for step in (15, 20):
            manager.save(trained, step)
    with CheckpointManager(near) as manager:
        manager.restore(trained)
        newest = 20
        if has_saved:
            newest = manager.save(trained).step
        manager.restore(other, step=15)
        assert manager.save(trained).step == newest + 1
        manager.restore(other, step=15)
        assert manager.save(other).step == 16, "the state of the other restore is saved now"


def test_a_restore_of_what_is_saved_sets_it_in_mid_job_too(near):
    with CheckpointManager(near) as manager:
        trained = {"model": nn.Linear(3, 3)}
        for step in (1, 3, 5):
            manager.save(trained, step)
        manager.restore(trained, step=1)
        assert manager.save(trained).step == 2


def test_all_ranks_continue_from_the_same_step(near):
    def job(coordinator):
        trained, other = ({"model": nn.Linear(1, 1, bias=False)} for _ in range(2))
        nn.init.ones_(trained["model"].weight)  # The ranks hold the same
        with CheckpointManager(near, coordinator=coordinator) as manager:
            for step in (1, 3, 5):
                manager.save(trained, step)
            # One rank has lost its tensors, and so cannot tell whose these are.
            manager.restore(other if coordinator.rank else trained, step=1)
            return manager.save(trained).step

    assert World(2, patience=30).run(job) == {0: 2, 1: 2}


@pytest.mark.parametrize("part", [None, "x"])
def test_a_restore_in_mid_job_fails_no_step_that_waits_for_a_farther_tier(
    near, far, monkeypatch, part
):
    """The farther tier is claimed only when the first step gets there."""
    left_by_a_job([near, far], *range(1, 9))
    go, commit = threading.Event(), TierWriter.commit

    def late(self, job, *, on_bytes):
        assert self.url != str(far) or go.wait(30)
        return commit(self, job, on_bytes=on_bytes)

    monkeypatch.setattr(TierWriter, "commit", late)
    with CheckpointManager([near, far]) as manager:
        manager.restore(state(0), step=3)
        pending = manager.save_async(state(4), 4)
        pending.result(30, tier=str(near))
        manager.restore(state(0), step=8, only=part)
        go.set()
        pending.result(30)
    assert len(committed(open_backend(str(far)))) == 9


def test_a_look_at_an_older_step_costs_no_step_that_the_far_tier_lacks(near, far):
    left_by_a_job(near, 4, 10)
    tiers = [Tier(str(near), keep_last=1), Tier(str(far), every=2)]
    with CheckpointManager(tiers) as manager:
        manager.restore(state(0))
        manager.restore({"x": state(0)["x"]}, step=4, only="x")
        for step in (11, 13):
            manager.save(state(step), step)
    assert whole(far) == [4, 10]
