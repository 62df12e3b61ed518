"""Compare the stall of ``engine.save_checkpoint`` with DeepSpeed's own checkpoint engines and with
`CkptEngine`, in one training loop and in turn.

    DS_ACCELERATOR=cpu python -m bench.deepspeed_stall [--width 1792] [--saves 7] [--stage 1]

The stall is the call, and what the next optimizer step takes longer than others. DeepSpeed's
decoupled engine writes in another process, and the next step waits for the file. Here it writes
with Python's files, since its own writer needs libaio. It takes part under ZeRO 0 and 3: torch does
not send the partitions of ZeRO 1 and 2 in fp32 to another process.
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

import deepspeed
import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import distributed as dist
from torch import nn

from bench.rank_exit import exit_rank
from ckpt import Tier
from ckpt.integrations.deepspeed import CkptEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1792)
    parser.add_argument("--saves", type=int, default=7, help="of each kind")
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--folder", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = engine_of(args.width, args.stage)
    values = torch.randn(32, args.width)

    def step() -> float:
        began = time.perf_counter()
        engine.backward(engine(values).square().mean())
        engine.step()
        return time.perf_counter() - began

    def stall(folder: Path) -> float:
        began = time.perf_counter()
        engine.save_checkpoint(folder, tag="newest")
        called = time.perf_counter() - began
        return called + max(0.0, step() - statistics.median(plain))

    plain, durable = [step() for _ in range(8)][3:], []
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    root = folder / "CkptEngine"
    ours = CkptEngine(engine, root, Tier(str(root), keep_last=2))
    decoupled = engine.checkpoint_engine
    engines = {"DeepSpeed's own engine": TorchCheckpointEngine(), root.name: ours}
    if args.stage in (0, 3):
        engines["DeepSpeed's decoupled engine"] = decoupled
    stalls: dict[str, list[float]] = {name: [] for name in engines}
    try:
        for _ in range(args.saves + 1):  # the first of each kind does not count
            for name, engine.checkpoint_engine in engines.items():
                stalls[name].append(stall(folder / name))
                if engine.checkpoint_engine is ours:
                    assert ours.pending is not None
                    durable.append(ours.pending.result().durable_seconds or 0.0)
                    size = ours.pending.nbytes >> 20
                plain += [step() for _ in range(3)]
        decoupled.cleanup()
        engine.destroy()
    finally:
        shutil.rmtree(folder)
    print(f"ZeRO {args.stage}, state {size} MiB, step {_ms(plain)}")
    for name, found in stalls.items():
        print(f"{name:28}  stall {_ms(found[1:])}")
    print(f"CkptEngine durable after {_ms(durable[1:])}")
    print(f"load average {os.getloadavg()[0]:.1f}")
    exit_rank()


def engine_of(width: int, stage: int) -> Any:
    """An engine of one rank in fp32."""
    os.environ |= {"LOCAL_RANK": "0", "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.utils.set_log_level_from_string("error")
    deepspeed.init_distributed("gloo")
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(7)))
    writer = {"type": "PYTHON", "decoupled": True, "data_parallel": "REPLICA"}
    config = {
        "checkpoint": {"writer": writer},
        "train_micro_batch_size_per_gpu": 32,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]


def _ms(seconds: list[float]) -> str:
    """Return the median and the range."""
    low, high = min(seconds), max(seconds)
    return f"{1e3 * statistics.median(seconds):.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"


if __name__ == "__main__":
    main()
