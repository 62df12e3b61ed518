"""What ``ckpt_path="last"`` means if a trainer has several checkpoint callbacks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from ckpt.integrations.lightning import CkptCheckpoint
from tests.integrations.conftest import after

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


def last(nets: Any, *callbacks: Callback) -> str | None:
    """Return the path that a trainer with these callbacks resumes from."""
    found: str | None = nets.trainer(*callbacks)._checkpoint_connector._parse_ckpt_path(
        TrainerFn.FITTING, "last", model_provided=True, model_connected=False
    )
    return found


def callbacks(root: Path, *names: str) -> list[CkptCheckpoint]:
    """Return one callback for each folder. Lightning requires that their policies differ."""
    return [
        CkptCheckpoint(root / name, every_n_train_steps=number)
        for number, name in enumerate(names, 1)
    ]


def test_last_of_several_folders_has_the_highest_step(nets: Any, tmp_path: Path) -> None:
    """Of equal steps the first callback's is taken: the hashes of the paths differ in
    each process.
    """
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "whole", save_top_k=-1))
    for place, step in (("a", 8), ("b", 8), ("c", 8), ("d", 8), ("younger", 4)):
        nets.only_step(tmp_path / "whole", step, tmp_path / place)
    for names in (["a", "b", "c", "d"], ["d", "c", "b", "a"], ["b", "younger"], ["younger", "b"]):
        found = last(nets, *callbacks(tmp_path, "empty", *names))
        first = next(name for name in names if name != "younger")
        assert found == f"ckpt://{tmp_path / first}#newest"
    assert last(nets, *callbacks(tmp_path, "empty", "none")) is None


def test_two_callbacks_resume_from_the_one_that_is_further(nets: Any, tmp_path: Path) -> None:
    def pair() -> list[CkptCheckpoint]:
        best = CkptCheckpoint(tmp_path / "best", monitor="val_loss")
        return [best, CkptCheckpoint(tmp_path / "often", every_n_train_steps=3)]

    first, second = pair()
    whole = nets.fit(nets.Net(), first, None, second)
    for step in tmp_path.glob("best/step-000000008.*"):
        shutil.rmtree(step)
    first, second = pair()
    assert nets.fit(nets.Net(), first, "last", second) == after(whole, 6)


def test_last_beside_a_plain_callback_is_the_younger_one(nets: Any, tmp_path: Path) -> None:
    def both(ours: str) -> tuple[Callback, Callback]:
        return CkptCheckpoint(tmp_path / ours), ModelCheckpoint(tmp_path, save_last=True)

    plain = tmp_path / "last.ckpt"
    nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "older"))
    nets.fit(nets.Net(), both("empty")[1])
    assert last(nets, *both("empty")) == str(plain)
    assert last(nets, *both("older")) == str(plain)
    os.utime(plain, (1, 1))
    assert last(nets, *both("older")) == f"ckpt://{tmp_path / 'older'}#newest"
