"""``load_from_checkpoint`` with the path that ``best_model_path`` gives."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.errors import ConfigError
from ckpt.integrations.lightning import CkptCheckpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


@pytest.mark.parametrize("monitor", ["val_loss", None])
def test_load_from_checkpoint_takes_the_best_model_path(
    nets: Any, tmp_path: Path, monitor: str | None
) -> None:
    class Configured(nets.Net):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.save_hyperparameters()

    callback = CkptCheckpoint(tmp_path / "a folder", monitor=monitor, save_last=True)
    trained = Configured(8)
    nets.fit(trained, callback)
    path = callback.best_model_path
    assert path.endswith("#8")
    found = Configured.load_from_checkpoint(path, weights_only=True)
    assert found.hparams["width"] == 8
    assert found.state_dict().keys() == trained.state_dict().keys()
    assert all(map(torch.equal, found.state_dict().values(), trained.state_dict().values()))


@pytest.mark.parametrize("step", ["foo", "-1", "\N{SUPERSCRIPT TWO}", "last"])
def test_a_path_with_another_word_than_a_step_is_refused(
    nets: Any, tmp_path: Path, step: str
) -> None:
    """It does not mean the newest step, either."""
    callback = CkptCheckpoint(tmp_path)
    path = f"ckpt://{tmp_path}#{step}"
    with pytest.raises(ConfigError, match="names no step: end it with # and the number"):
        callback.find_step(path)
    with pytest.raises(ConfigError, match="names no step: end it with # and the number"):
        nets.Net.load_from_checkpoint(path)


def test_a_path_without_a_word_is_the_newest_step(tmp_path: Path) -> None:
    callback = CkptCheckpoint(tmp_path)
    for path in (f"ckpt://{tmp_path}", f"ckpt://{tmp_path}#", f"ckpt://{tmp_path}#newest"):
        assert callback.find_step(path) == "newest"
    assert callback.find_step(f"ckpt://{tmp_path}#12") == 12
    assert callback.find_step(f"ckpt://{tmp_path}#best") == "best"


def test_the_folder_of_an_older_attempt_is_refused(nets: Any, tmp_path: Path) -> None:
    """A restore takes the younger attempt at the step."""
    for root in ("older", "younger"):
        nets.fit(nets.Net(), CkptCheckpoint(tmp_path / root))
        nets.only_step(tmp_path / root, 8, tmp_path / "both")
    for root in ("younger", "older"):
        (step,) = (tmp_path / root).glob("step-*")
        path = str(tmp_path / "both" / step.name)
        with (
            nullcontext()
            if root == "younger"
            else pytest.raises(
                ConfigError, match=f"names {step.name} .* a restore of that step takes"
            )
        ):
            assert nets.fit(nets.Net(), CkptCheckpoint(tmp_path / "both"), path) == {}


def test_a_path_without_a_step_says_how_to_get_one(nets: Any, tmp_path: Path) -> None:
    callback = CkptCheckpoint(tmp_path, monitor="val_loss")
    with pytest.raises(ConfigError, match="ckpt export"):
        nets.Net.load_from_checkpoint(callback.best_model_path)
