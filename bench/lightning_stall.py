"""Compare the stall of a save of ``CkptCheckpoint`` with those of Lightning's own callback.

python -m bench.lightning_stall [--width 1024] [--saves 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn

from ckpt import CheckpointManager, events
from ckpt.integrations.lightning import CkptCheckpoint

EVERY_STEPS = 5


class Net(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Timed(ModelCheckpoint):
    """Lightning's callback, with the seconds of each save."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, every_n_train_steps=EVERY_STEPS, save_top_k=1)
        self.seconds: list[float] = []

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        began = time.perf_counter()
        super()._save_checkpoint(trainer, filepath)
        self.seconds.append(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--saves", type=int, default=5, help="of each kind")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    stalls: dict[str, list[float]] = {"ModelCheckpoint": [], "AsyncCheckpointIO": [], "ckpt": []}

    def note(event: object) -> None:
        if isinstance(event, events.SaveStaged):
            stalls["ckpt"].append(event.stall_seconds)

    observed = partial(CheckpointManager, observers=[note])
    try:
        for turn in range(args.saves):  # each kind saves twice in a turn; the first does not count
            for name in stalls:
                root = folder / f"{name}-{turn}"
                callback: ModelCheckpoint = (
                    CkptCheckpoint(root, every_n_train_steps=EVERY_STEPS)
                    if name == "ckpt"
                    else Timed(root)
                )
                with patch("ckpt.integrations.lightning.callback.CheckpointManager", observed):
                    _fit(args.width, callback, [AsyncCheckpointIO()] if "IO" in name else [])
                if isinstance(callback, Timed):
                    stalls[name] += callback.seconds
                assert len(stalls[name]) == 2 * (turn + 1), (name, stalls[name])
                shutil.rmtree(root)
    finally:
        shutil.rmtree(folder)
    size = 3 * sum(4 * value.numel() for value in Net(args.width).parameters())
    print(f"state {size >> 20} MiB, load average {os.getloadavg()[0]:.1f}")
    for name, seconds in stalls.items():
        counted = [1e3 * each for each in seconds[1::2]]
        middle = statistics.median(counted)
        print(f"{name:18} stall {middle:.1f} ms ({min(counted):.1f} to {max(counted):.1f})")


def _fit(width: int, callback: ModelCheckpoint, plugins: list[Any]) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2 * EVERY_STEPS + 2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        plugins=plugins,
    )
    trainer.fit(Net(width), torch.randn(2 * EVERY_STEPS + 2, 32, width))


if __name__ == "__main__":
    main()
