"""Write a run of DeepSpeed with ZeRO stage STAGE into OUT/run, under ``torchrun``. With
``universal``, the engine computes in bfloat16, and rank 0 also converts the run to OUT/universal.
Rank 0 writes the whole weights to OUT/fp32.
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
from deepspeed.utils import safe_get_full_optimizer_state

from tests.exchange.folders.net import TRUTH, Net, batch


def main(out: str, stage: str, universal: str = "") -> None:
    torch.manual_seed(0)
    net = Net()
    config = {
        "train_batch_size": dist.get_world_size() if dist.is_initialized() else 2,
        "zero_optimization": {"stage": int(stage)},
        "bf16": {"enabled": bool(universal)},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=net, config=config)
    for step in range(2):
        engine.backward(engine(batch(step).to(net.first.weight.dtype)).square().sum())
        engine.step()
    run = os.path.join(out, "run")
    engine.save_checkpoint(run, tag="global_step2")
    moments = {name: _moments(value) for name, value in net.named_parameters()}
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(
            [sys.executable, f"{run}/zero_to_fp32.py", run, os.path.join(out, "fp32")], check=True
        )
        if universal:
            _convert(f"{run}/global_step2", os.path.join(out, "universal"))
        _write_truth(out, moments if universal else None)
    dist.barrier()
    dist.destroy_process_group()


def _moments(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a parameter. All ranks call this function."""
    values = {
        key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")
    }
    return {"step": torch.tensor(2.0), **values}


def _convert(source: str, target: str) -> None:
    script = Path(deepspeed.__file__).parent / "checkpoint" / "ds_to_universal.py"
    words = ["--input_folder", source, "--output_folder", target, "--inject_missing_state"]
    subprocess.run([sys.executable, str(script), *words], check=True)


def _write_truth(out: str, moments: dict[str, dict[str, Any]] | None) -> None:
    """Write what the folders hold: the weights that ``zero_to_fp32.py`` has written, and the
    optimizer's state if the folder to import has it.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in Path(out, "fp32").glob("*.bin"):
        weights |= torch.load(file, weights_only=True)
    truth: dict[str, Any] = {
        "model": weights,
        "optimizer": moments,
        "groups": [list(moments)] if moments else [],
        "lr": [0.01] if moments else [],
        "at": "deepspeed/global_steps" if moments else "",
        "step": 2,
        "schedule": None,
    }
    torch.save(truth, os.path.join(out, TRUTH))


if __name__ == "__main__":
    main(*sys.argv[1:])
