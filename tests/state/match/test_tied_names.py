from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.errors import EntryMissing


class Body(nn.Module):
    """A model as its files have it: one name of the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)


class Tied(Body):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


class Untied(Body):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6, bias=False)


def test_a_name_that_is_tied_to_one_that_is_there_is_not_missing(tmp_path: Path) -> None:
    """The files of GPT-2 have no ``lm_head.weight``."""
    saved, model = Body(), Tied()
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": saved}, step=1)
        report = manager.restore({"model": model})
    assert report is not None
    assert torch.equal(model.head.weight, saved.embed.weight)
    assert report.renamed == (("model/head.weight", "model/embed.weight"),)


def test_a_name_with_memory_of_its_own_is_missing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save({"model": Body()}, step=1)
        with pytest.raises(EntryMissing, match="head"):
            manager.restore({"model": Untied()})
