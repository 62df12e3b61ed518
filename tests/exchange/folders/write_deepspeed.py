"""Write a run of DeepSpeed with ZeRO stage STAGE into OUT/run, under ``torchrun``. With
``universal``, rank 0 also converts it to OUT/universal.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.exchange.folders.net import Net, batch


def main(out: str, stage: str, universal: str = "") -> None:
    torch.manual_seed(0)
    net = Net()
    config = {
        "train_batch_size": dist.get_world_size() if dist.is_initialized() else 2,
        "zero_optimization": {"stage": int(stage)},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    for step in range(2):
        engine.backward(engine(batch(step)).square().sum())
        engine.step()
    run = os.path.join(out, "run")
    engine.save_checkpoint(run, tag="global_step2")
    dist.barrier()
    if dist.get_rank() == 0:
        words = ["--input_folder", f"{run}/global_step2", "--output_folder", f"{out}/universal"]
        script = Path(deepspeed.__file__).parent / "checkpoint" / "ds_to_universal.py"
        if universal:
            subprocess.run([sys.executable, str(script), *words], check=True)
        subprocess.run(
            [sys.executable, f"{run}/zero_to_fp32.py", run, os.path.join(out, "fp32")], check=True
        )
        from tests.exchange.folders.net import TRUTH

        loaded: dict[str, torch.Tensor] = {}
        for file in Path(out, "fp32").glob("*.bin"):
            loaded |= torch.load(file, weights_only=True)
        truth: dict[str, Any] = {
            "model": loaded,
            "optimizer": None,
            "groups": [],
            "lr": [],
            "at": "",
            "step": 0,
        }
        torch.save({**truth, "schedule": None}, os.path.join(out, TRUTH))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
