"""A training by Lightning, with the saves of ckpt or its own.

It draws no random numbers: Lightning's own checkpoints hold no state of generators, so that each
resume would end with other weights, also without any crash.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt import CheckpointManager
from ckpt.integrations.lightning import callback
from tests.chaos.record import Record

EPOCHS: Final = 3


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (rows,) = batch
        return (self.net(rows) - rows.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Teller(Callback):
    def __init__(self, record: Record, *, tells_saves: bool) -> None:
        self._record, self._tells_saves = record, tells_saves

        self.first: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._tells_saves and trainer.current_epoch:  # The save of the epoch before has ended
            self._record.saved(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._tells_saves:
            self._record.saved(trainer.global_step)


def main(way: str, out: str) -> None:
    """Train, or go on with the training."""
    record = Record(out)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    model, rows = Model(), TensorDataset(torch.randn(80, 32))
    if way == "ckpt":
        # The callback takes no observers.
        manager = partial(CheckpointManager, observers=[record.observe])
        callback.CheckpointManager = manager  # type: ignore[attr-defined, misc, assignment]
        saver: Callback = callback.CkptCheckpoint(out, every_n_epochs=1)
    else:
        saver = ModelCheckpoint(out, every_n_epochs=1, save_top_k=-1, save_last=True)
    teller = Teller(record, tells_saves=way != "ckpt")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[teller, saver],
    )  # fmt: skip
    trainer.fit(model, DataLoader(rows, batch_size=16), ckpt_path="last")
    # A training that is at its end does not start.
    record.resumed(trainer.global_step if teller.first is None else teller.first)
    record.ended(model.state_dict())
