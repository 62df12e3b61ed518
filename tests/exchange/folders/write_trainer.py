"""Write the folder ``checkpoint-4`` of the ``Trainer`` of transformers into OUT."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.exchange.folders.net import Net, write_truth


class WithLoss(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x).square().sum()}


class Rows(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index))}


def main(out: str) -> None:
    torch.manual_seed(0)
    net = WithLoss()
    args = TrainingArguments(
        out, max_steps=4, save_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        weight_decay=0.1, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=net, args=args, train_dataset=Rows())
    trainer.train()
    write_truth(
        out, net, trainer.optimizer.optimizer, at="trainer/global_step", step=4,
        schedule=trainer.lr_scheduler.state_dict(),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
