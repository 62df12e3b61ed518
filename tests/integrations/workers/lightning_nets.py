"""A small training for the tests of Lightning, and its worker on several ranks.

lightning_nets.py ROOT kill STEP      trains and is killed right after the save of STEP began
lightning_nets.py ROOT MODE           under torchrun: trains, then resumes in the same process;
                                      MODE is ddp, ddp-steps (counts steps, not epochs) or fsdp2
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.lightning import CkptCheckpoint

BATCHES = 4  # the number in an epoch


class Loader:
    """Batches in an order of its own for each epoch, with a position that can be saved."""

    def __init__(self) -> None:
        self.values = values(1)
        self.at, self.order, self.loaded = 0, torch.arange(len(self.values)), False

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        if not self.loaded:
            self.at, self.order = 0, torch.randperm(len(self.values))
        self.loaded = False
        while self.at < BATCHES:
            self.at += 1
            yield self.values[self.order[4 * self.at - 4 : 4 * self.at]]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]
        self.loaded = self.at < BATCHES


class Net(LightningModule):
    """A network that learns the sum of eight numbers, with dropout and BatchNorm.

    It keeps its losses by step.
    """

    def __init__(self, width: int = 16, *, sharded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)  # all ranks begin with the same weights
        self.net = nn.Sequential(
            nn.Linear(8, width),
            nn.Identity() if sharded else nn.BatchNorm1d(width),
            nn.Dropout(0.3),
            nn.Tanh(),
            nn.Linear(width, 1),
        )
        self.sharded = sharded
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        if self.sharded:
            assert self.device_mesh is not None
            for layer in (self.net[0], self.net[4], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def error(self, batch: Any) -> Tensor:
        numbers = batch if isinstance(batch, Tensor) else batch[0]
        return (self.net(numbers).squeeze(1) - numbers.sum(1)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.error(batch)
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.error(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def values(seed: int) -> Tensor:
    return torch.randn(4 * BATCHES, 8, generator=torch.Generator().manual_seed(seed))


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(values(1)), 4, shuffle=True)


def validation() -> DataLoader[Any]:
    return DataLoader(TensorDataset(values(2)), 4)


def trainer(*callbacks: Callback, epochs: int = 2, **how: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    default = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    return Trainer(callbacks=list(callbacks), max_epochs=epochs, **{**quiet, **default, **how})


def fit(net: Net, callback: Callback, path: str | None = None, *more: Callback) -> dict[int, float]:
    """Train with a loader that resumes within an epoch, and return the losses by step."""
    seed_everything(3, workers=True, verbose=False)
    trainer(callback, *more).fit(net, Loader(), validation(), ckpt_path=path)
    return net.losses


def only_step(root: Path, step: int, to: Path) -> Path:
    """Copy one step of ``root`` to the folder ``to``."""
    (found,) = root.glob(f"step-{step:09d}.*")
    shutil.copytree(found, to / found.name)
    return to


class Killer(Callback):
    """A callback that kills the process when the first file of a step exists, before
    its manifest.
    """

    def __init__(self, root: Path, step: int) -> None:
        self.root, self.step = root, step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            while not any(self.root.glob(f"step-{self.step:09d}.*")):
                pass
            os.kill(os.getpid(), signal.SIGKILL)


class Copies(TorchDispatchMode):
    """A mode that records the operations that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_to_copy", "clone", "copy_", "cat", "stack"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Dumps(Callback):
    """A callback that counts what copies tensors while Lightning's checkpoint is made for ckpt."""

    def __init__(self) -> None:
        self.copies: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == BATCHES // 2:
            with Copies() as mode:
                trainer.strategy.dump(trainer)  # type: ignore[attr-defined]
            self.copies = mode.found


def on_ranks(root: Path, mode: str) -> None:
    def strategy() -> Strategy:
        return ModelParallelStrategy(2, 1) if mode == "fsdp2" else DDPStrategy()

    def train(place: Path, path: str | None = None) -> tuple[dict[int, float], Dumps]:
        seed_everything(3, workers=True, verbose=False)
        net, dumps = Net(sharded=mode == "fsdp2"), Dumps()
        how: dict[str, Any] = {"devices": 2, "strategy": strategy()}
        trigger: dict[str, Any] = {}
        if mode == "ddp-steps":
            how |= {"epochs": -1, "max_steps": BATCHES}
            trigger = {"every_n_train_steps": BATCHES // 2}
        callback = CkptCheckpoint(place, save_top_k=-1, **trigger)
        running = trainer(callback, dumps, **how)
        running.fit(net, shuffled(), validation(), ckpt_path=path)
        print(f"val_loss {running.callback_metrics['val_loss']:.4f}", flush=True)
        return net.losses, dumps

    losses, dumps = train(root / "whole")
    assert dumps.copies == [], dumps.copies
    half = BATCHES // 2
    if torch.distributed.get_rank() == 0:
        only_step(root / "whole", half, root / "resumed")
    torch.distributed.barrier()
    resumed, _ = train(root / "resumed", "last")
    assert resumed == {step: loss for step, loss in losses.items() if step > half}, mode
    print("equal losses on rank", torch.distributed.get_rank(), len(resumed), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "kill":
        root, last = Path(sys.argv[1]), int(sys.argv[3])
        saving = CkptCheckpoint(root, save_top_k=-1, every_n_train_steps=1)
        fit(Net(1 << 17), saving, None, Killer(root, last))
    else:
        on_ranks(Path(sys.argv[1]), sys.argv[2])
