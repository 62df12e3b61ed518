"""One rank of two does something wrong.

No rank hangs, all ranks get an error that names the fault and the rank, and the next save works.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from tests.distributed.launch import WORKERS
from tests.kit.worlds import world

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures")


@pytest.fixture(scope="module")
def reported(folder: Path) -> str:
    return world(2, WORKERS / "failures.py", folder)


def test_what_one_rank_does_wrong_all_are_told(reported: str) -> None:
    assert "ALL WELL" in reported


def test_what_lives_on_one_rank_only_is_in_the_checkpoint_of_all(
    reported: str, folder: Path
) -> None:
    stages = {f"stage{rank}": nn.Linear(4 + rank, 3) for rank in range(2)}
    optimizer = torch.optim.Adam([p for stage in stages.values() for p in stage.parameters()])
    state = {**stages, "optimizer": optimizer, "step": 0}
    with CheckpointManager(folder / "stages") as manager:
        manager.restore(state)
    for rank, stage in enumerate(stages.values()):
        torch.manual_seed(rank)
        expected = nn.Linear(4 + rank, 3)
        torch.optim.Adam(expected.parameters())
        assert stage.weight.shape == expected.weight.shape
        assert torch.allclose(stage.weight, expected.weight, atol=0.0011)  # one step of Adam
        assert float(optimizer.state[stage.weight]["step"]) == 1


def test_what_lives_on_one_rank_only_comes_back_to_it(reported: str) -> None:
    assert reported.count("has its stage back") == 2
