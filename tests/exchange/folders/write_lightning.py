"""Write a checkpoint of Lightning into OUT."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning
import torch

from tests.exchange.folders.net import Net, batch, write_truth


class Module(lightning.LightningModule):
    def __init__(self, lr: float = 0.01, note: str = "a") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(x).square().sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }


def main(out: str) -> None:
    torch.manual_seed(0)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    rows: Any = torch.utils.data.DataLoader(
        [batch(n) for n in range(2)],  # type: ignore[arg-type]
        batch_size=None,
    )
    trainer.fit(module, rows)
    trainer.save_checkpoint(os.path.join(out, "last.ckpt"))
    write_truth(
        out, module, trainer.optimizers[0], at="global_step", step=4,
        schedule=trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
