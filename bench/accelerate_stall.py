"""Compare the stall of ``AcceleratorCheckpoints.save_state`` with that of
``accelerator.save_state``, in one training loop and in turn.

    python -m bench.accelerate_stall [--width 1792] [--saves 7] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from ckpt.integrations.accelerate import AcceleratorCheckpoints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--saves", type=int, default=7, help="of each kind")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    layers = (nn.Linear(args.width, args.width) for _ in range(7))
    model, optimizer = accelerator.prepare(net := nn.Sequential(*layers), _adamw(net))
    values = torch.randn(32, args.width)

    def step() -> float:
        began = time.perf_counter()
        accelerator.backward(model(values).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    plain, theirs, ours, durable = [step() for _ in range(8)][3:], [], [], []
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        with AcceleratorCheckpoints(accelerator, folder / "ckpt") as checkpoints:
            checkpoints.load_state()  # reserves the memory for saves, as at the start of a job
            for number in range(args.saves + 1):  # the first of each kind does not count
                began = time.perf_counter()
                accelerator.save_state(str(folder / "theirs"))
                theirs.append(time.perf_counter() - began)
                plain += [step() for _ in range(3)]

                pending = checkpoints.save_state(number)
                for _ in range(3):
                    step()
                pending.result()
                ours.append(pending.stall_seconds)
                durable.append(pending.durable_seconds or 0.0)
    finally:
        shutil.rmtree(folder)
    size = 3 * sum(value.numel() * value.element_size() for value in model.parameters())
    print(f"state {size >> 20} MiB, step {_ms(plain)}, load average {os.getloadavg()[0]:.1f}")
    print(f"accelerator.save_state             stall {_ms(theirs[1:])}")
    print(f"AcceleratorCheckpoints.save_state  stall {_ms(ours[1:])}, durable {_ms(durable[1:])}")


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-4)


def _ms(seconds: list[float]) -> str:
    """Return the median and the range."""
    low, high = min(seconds), max(seconds)
    return f"{1e3 * statistics.median(seconds):.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"


if __name__ == "__main__":
    main()
