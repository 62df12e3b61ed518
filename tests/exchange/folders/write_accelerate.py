"""Write a folder of ``accelerator.save_state`` into OUT."""

from __future__ import annotations

import os
import sys

import torch
from accelerate import Accelerator

from tests.exchange.folders.net import build, train, write_truth


def main(out: str) -> None:
    accelerator = Accelerator(cpu=True)
    net, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    train(net, optimizer)
    scheduler.step()
    accelerator.step = 2
    accelerator.save_state(os.path.join(out, "state"))
    write_truth(
        out, net, optimizer.optimizer, at="accelerate/step", step=2,
        schedule=scheduler.state_dict(),
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
