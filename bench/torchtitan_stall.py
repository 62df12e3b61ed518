"""Compare the stall of ``CkptManager`` with that of torchtitan's own asynchronous saves, in one
training loop and in turn.

    python -m bench.torchtitan_stall [--width 1792] [--saves 7] [--folder FOLDER]

A stall is what the save, ``maybe_wait_for_staging`` and the optimizer's step take longer than
without a save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from bench.rank_exit import exit_rank
from ckpt.integrations.torchtitan import CkptManager


class Nothing:
    """In the place of the loader and the trainer."""

    def state_dict(self) -> dict[str, int]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--saves", type=int, default=7, help="of each kind")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(7)))
    optimizers: Any = default_adamw().build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)

    def manager(config: Any) -> Any:
        return config.build(
            dataloader=Nothing(),
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=schedule.build(optimizers=optimizers, training_steps=100),
            states={"train_state": Nothing()},
            sd_adapter=None,
            base_folder=str(folder),
        )

    values = torch.randn(32, args.width)

    def step(before: Any = None) -> float:
        """Return the seconds of one optimizer step, and of the wait before it."""
        model(values).square().mean().backward()
        began = time.perf_counter()
        if before is not None:
            before.maybe_wait_for_staging()
        optimizers.step()
        took = time.perf_counter() - began
        optimizers.zero_grad()
        return took

    kinds = {
        "torchtitan async": CheckpointManager.Config(
            enable=True, interval=1, folder="theirs", async_mode="async", keep_latest_k=2
        ),
        "CkptManager": CkptManager.Config(enable=True, interval=1, folder="ours", keep_latest_k=2),
    }
    stalls: dict[str, list[float]] = {name: [] for name in kinds}
    try:
        managers = {name: manager(config) for name, config in kinds.items()}
        managers["CkptManager"].load()  # reserves the memory for saves, as at the start of a job
        plain = [step() for _ in range(8)][3:]
        for number in range(1, args.saves + 2):  # the first of each kind does not count
            for name, each in managers.items():
                usual = statistics.median(plain)
                began = time.perf_counter()
                each.save(number)
                saved = time.perf_counter() - began
                stalls[name].append(saved + max(0.0, step(each) - usual))
                each.maybe_wait_for_saving()
                plain += [step() for _ in range(3)]
        for each in managers.values():
            each.close()
    finally:
        shutil.rmtree(folder)
    size = 3 * sum(value.numel() * value.element_size() for value in model.parameters())
    print(f"state {size >> 20} MiB, optimizer step {_ms(plain)}, load {os.getloadavg()[0]:.1f}")
    for name, found in stalls.items():
        print(f"{name:18} stall {_ms(found[1:])}")


def _ms(seconds: list[float]) -> str:
    """Return the median and the range."""
    low, high = min(seconds), max(seconds)
    return f"{1e3 * statistics.median(seconds):.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"


if __name__ == "__main__":
    main()
    exit_rank()
