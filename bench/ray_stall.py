"""Compare the stall of ``RayCheckpoints.report`` with that of ``torch.save`` and an asynchronous
``ray.train.report``, in one training loop of Ray Train and in turn.

    python -m bench.ray_stall [--width 1792] [--saves 5] [--folder FOLDER]

A stall is what the save, the report and the optimizer's step take longer than without a save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn

from ckpt.integrations.ray import RayCheckpoints


def train(config: dict[str, Any]) -> str:
    """Return the table."""
    torch.set_num_threads(1)
    width = config["width"]
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(7)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    state = {"model": model, "optimizer": optimizer}
    values = torch.randn(32, width)

    def step() -> float:
        """Return the seconds of the optimizer's step."""
        model(values).square().mean().backward()
        began = time.perf_counter()
        optimizer.step()
        took = time.perf_counter() - began
        optimizer.zero_grad()
        return took

    def theirs(number: int) -> Callable[[], object]:
        folder = tempfile.mkdtemp(dir=config["folder"])
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(held, os.path.join(folder, "state.pt"))
        ray.train.report(
            {"step": number},
            ray.train.Checkpoint.from_directory(folder),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        )
        finish: Callable[[], object] = ray.train.get_all_reported_checkpoints  # after the upload
        return finish

    plain = [step() for _ in range(8)][3:]
    stalls: dict[str, list[float]] = {"torch.save, report(ASYNC)": [], "RayCheckpoints.report": []}
    with RayCheckpoints() as checkpoints:
        checkpoints.restore(state)  # reserves the memory for saves, as at the start of a job

        def ours(number: int) -> Callable[[], object]:
            pending = checkpoints.report({"step": number}, state, number)
            assert pending is not None
            return pending.result

        for number in range(config["saves"] + 1):  # the first of each kind does not count
            for found, save in zip(stalls.values(), (theirs, ours), strict=True):
                usual = statistics.median(plain)
                began = time.perf_counter()
                finish = save(number)
                saved = time.perf_counter() - began
                found.append(saved + max(0.0, step() - usual))
                finish()
                plain += [step() for _ in range(3)]
    size = 3 * sum(value.numel() * value.element_size() for value in model.parameters())
    head = f"state {size >> 20} MiB, optimizer step {_ms(plain)}, load {os.getloadavg()[0]:.1f}"
    return "\n".join([head, *(f"{name:26} stall {_ms(each[1:])}" for name, each in stalls.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--saves", type=int, default=5, help="of each kind")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        result = TorchTrainer(
            train,
            train_loop_config={"width": args.width, "saves": args.saves, "folder": str(folder)},
            run_config=ray.train.RunConfig(
                storage_path=str(folder / "storage"),
                name="stall",
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            ),
        ).fit()
        print(result.return_value)
    finally:
        shutil.rmtree(folder)


def _ms(seconds: list[float]) -> str:
    """Return the median and the range."""
    low, high = min(seconds), max(seconds)
    return f"{1e3 * statistics.median(seconds):.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"


if __name__ == "__main__":
    main()
