"""The stall of ``dcp.async_save`` with DCP's own writer and with ``CkptWriter``, side by side.

    python -m bench.dcp_writer FOLDER [MIB [ROUNDS]]

The state has model and AdamW moments in float32. In each round, all contenders save in turn, each
after the save before it has ended. The first round is not counted.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

from ckpt import Tier
from ckpt.integrations.dcp import CkptWriter

_LAYERS = 16


def state_of(mib: int) -> dict[str, Any]:
    """So many MiB in all: 16 layers, and two moments of each."""
    numbers = (mib << 18) // (3 * _LAYERS)
    return {
        kind: {f"layer.{index}": torch.randn(numbers) for index in range(_LAYERS)}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }


def contenders(folder: Path) -> dict[str, Callable[[dict[str, Any], int], Any]]:
    """Name -> a call that begins a save of a step."""
    writer = CkptWriter(Tier(str(folder / "ckpt"), keep_last=1))
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def own(state: dict[str, Any], step: int) -> Any:
        path = folder / f"dcp-{step}"
        return async_save(state, storage_writer=FileSystemWriter(path))

    def kept(state: dict[str, Any], step: int) -> Any:
        path = folder / f"kept-{step}"
        return async_save(state, storage_writer=FileSystemWriter(path), async_stager=stager)

    def ours(state: dict[str, Any], step: int) -> Any:
        return async_save(state, checkpoint_id=f"step-{step}", storage_writer=writer)

    return {"FileSystemWriter": own, "the same, a DefaultStager kept": kept, "CkptWriter": ours}


def main(folder: Path, mib: int = 512, rounds: int = 7) -> None:
    """Print the medians and the range of the stall, and the median until it is durable."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    state = state_of(mib)
    calls = contenders(folder)
    stalls: dict[str, list[float]] = {name: [] for name in calls}
    ends: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            future = call(state, step)
            stalls[name].append(time.perf_counter() - began)
            future.result()
            ends[name].append(time.perf_counter() - began)
            for old in (*folder.glob("dcp-*"), *folder.glob("kept-*")):
                shutil.rmtree(old)
    for name in calls:
        stall, end = stalls[name][1:], ends[name][1:]
        print(
            f"| {name} | {statistics.median(stall) * 1e3:.0f} ms "
            f"({min(stall) * 1e3:.0f} to {max(stall) * 1e3:.0f}) | {statistics.median(end):.2f} s |"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
