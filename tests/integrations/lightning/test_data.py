"""Data that a loader's hook draws from the global random number generators, after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, random_split

from ckpt.integrations.lightning import CkptCheckpoint
from tests.integrations.conftest import after
from tests.kit.marks import torture

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]

Loader = Callable[[], Any]
BATCHES = 6


class Crash(Exception):
    """The training ends here, as after a crash."""


def drawn() -> Any:
    """Return a loader of data that are drawn from the global generator, as ``BoringModel`` does."""
    return DataLoader(torch.randn(BATCHES, 32), batch_size=1)  # type: ignore[arg-type]


def split() -> Any:
    data = torch.arange(32.0 * 2 * BATCHES).reshape(-1, 32) / 1000
    return DataLoader(random_split(data, [BATCHES, BATCHES])[0], batch_size=1, shuffle=True)  # type: ignore[arg-type]


def stateful() -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(torch.randn(BATCHES, 32), batch_size=1, shuffle=True)


def train(root: Path, loader: Loader, trigger: Any, crash: int = 0, **how: Any) -> dict[int, float]:
    """Train three epochs, from the newest step if there is one, and return the losses by step."""
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.3)
            self.losses: dict[int, float] = {}
            self.shift = torch.zeros(32)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(self.dropout(batch) + self.shift)

        def train_dataloader(self) -> Any:
            return loader()

        def on_train_start(self) -> None:
            if not self.trainer.limit_val_batches:
                self.shift = torch.rand(32)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            found = super().training_step(batch, batch_idx)
            assert isinstance(found, dict)
            self.losses[self.global_step + 1] = float(found["loss"].detach())
            return found

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == crash:
                raise Crash

    how = {"limit_val_batches": 2} | how
    seed_everything(3, verbose=False)
    model = Model()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[CkptCheckpoint(root, **trigger)], **how,
    )  # fmt: skip
    if crash:
        with pytest.raises(Crash):
            trainer.fit(model, ckpt_path="last")
    else:
        trainer.fit(model, ckpt_path="last")
    return model.losses


@pytest.mark.parametrize(
    ("loader", "crash", "how"),
    [
        (drawn, BATCHES + 3, {}),
        (split, BATCHES + 3, {}),
        (drawn, 2 * BATCHES + 3, {"limit_val_batches": 0}),
        (split, 2 * BATCHES + 3, {"reload_dataloaders_every_n_epochs": 1}),
        *torture(
            (split, BATCHES + 3, {"num_sanity_val_steps": 0}),
            (drawn, BATCHES + 3, {"reload_dataloaders_every_n_epochs": 1}),
        ),
    ],
)
def test_data_that_the_train_loader_draws_at_setup_are_those_of_the_first_run(
    tmp_path: Path, loader: Loader, crash: int, how: dict[str, Any]
) -> None:
    trigger = {"every_n_epochs": 1}
    whole = train(tmp_path / "whole", loader, trigger, **how)
    train(tmp_path / "parts", loader, trigger, crash, **how)
    resumed = train(tmp_path / "parts", loader, trigger, **how)
    assert resumed == after(whole, crash // BATCHES * BATCHES)


def test_data_that_a_stateful_loader_draws_at_setup_are_those_of_the_first_run(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    trigger = {"every_n_train_steps": 2}
    whole = train(tmp_path / "whole", stateful, trigger)
    train(tmp_path / "parts", stateful, trigger, BATCHES + 3)
    assert train(tmp_path / "parts", stateful, trigger) == after(whole, BATCHES + 2)
