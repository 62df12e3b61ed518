"""Any rank may be stopped or killed, and storage may be slow.

The others train on and get a verdict within a bound, and each step that was durable on all ranks
becomes a checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointManager
from tests.distributed.survivors import merged_again, reported, run_world

pytestmark = pytest.mark.distributed


def test_those_who_live_commit_follow_and_train_on(tmp_path: Path) -> None:
    outputs = run_world(3, "survive.py", tmp_path, 4, 7, store_here=True)
    check(reported(outputs, 1, 2) + outputs[0], tmp_path)


def test_a_rank_that_dies_before_the_comparison_delays_neither_commits_nor_the_end(
    tmp_path: Path,
) -> None:
    outputs = run_world(2, "alarm.py", tmp_path / "run", store_here=True)
    reported(outputs, 0)
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [1, 2]


@pytest.mark.torture
def test_storage_takes_30_s_and_the_process_group_has_5(tmp_path: Path) -> None:
    outputs = run_world(3, "survive.py", tmp_path, 5, 30, "dcp", store_here=True, timeout=250)
    said = reported(outputs, 1, 2) + outputs[0]
    check(said, tmp_path)
    assert "DCP died" in said


def check(said: str, tmp_path: Path) -> None:
    steps = [int(number) for number in re.findall(r"(\d+) steps of training meanwhile", said)]
    assert len(steps) == 3
    assert min(steps) > 100
    assert said.count("told of rank 2: step 2: waited 3 s for the part of rank(s) 2") == 3
    assert said.count("committed 3") == said.count("committed 4") == 3
    assert said.count("committed without a leader") == 2
    assert said.count("told of rank 0") == 2
    before, after = merged_again(tmp_path / "run", 5, tmp_path)
    assert before == after
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [3, 4, 5]


def test_a_job_whose_store_dies_with_its_leader_is_told_at_once_and_the_next_restore_commits(
    tmp_path: Path,
) -> None:
    outputs = run_world(2, "no_store.py", tmp_path / "run", store_here=False)
    reported(outputs, 1)
    with CheckpointManager(tmp_path / "run") as manager:
        state = {"x": torch.zeros(1000)}
        report = manager.restore(state, strict=False)
        assert report is not None
        assert report.step == 2
        assert [step for step, _ in report.finished] == [2]
        assert torch.equal(state["x"], torch.arange(1000.0))
