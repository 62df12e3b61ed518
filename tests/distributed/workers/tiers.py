"""FOLDER: two ranks save every step to memory, every second to a near folder, and from there to a
far one that is slow at different times on each rank.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier
from ckpt.errors import TierBehind
from ckpt.storage.api import StorageBackend
from tests.distributed.workers.nets import build, step
from tests.kit.stores import Wrapped, wrap_stores

STEPS = 10


class Slow(Wrapped):
    """A far store that is slow."""

    def __init__(self, inner: StorageBackend, chance: random.Random) -> None:
        super().__init__(inner)
        self._chance = chance

    def upload(self, key: str, size: int) -> Any:
        time.sleep(self._chance.random() * 0.8)
        return self.inner.upload(key, size)


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    chance = random.Random(rank)
    wrap_stores(
        pytest.MonkeyPatch(),
        lambda url, store: Slow(store, chance) if url.endswith("far") else store,
    )
    torch.manual_seed(0)
    model, optimizer = build("fsdp", 0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    tiers = [
        Tier("memory"),
        Tier(str(folder / "near"), every=2, keep_last=2),
        Tier(str(folder / "far"), every=2),
    ]
    with CheckpointManager(tiers, commit_timeout_seconds=20, backlog=2) as manager:
        saves = []
        for number in range(1, STEPS + 1):
            step(model, optimizer, number)
            state["step"] = number
            began = time.perf_counter()
            saves.append(manager.save_async(state))
            assert time.perf_counter() - began < 2, "held up by the far tier"
        outcomes = [
            None if (error := save.exception(60)) is None else type(error) for save in saves
        ]
        assert set(outcomes) <= {None, TierBehind}, outcomes
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, outcomes)
        assert gathered[0] == gathered[1], gathered
        assert outcomes[-1] is None
        dist.barrier()
        kept = [
            save.step
            for save, outcome in zip(saves, outcomes, strict=True)
            if outcome is None and save.step % 2 == 0
        ]
        steps = manager.steps()
        assert set(kept) | {STEPS - 1} <= set(steps), (kept, steps)  # step 9 is in memory only
        report = manager.restore(state, STEPS - 1)
        assert report is not None
        assert report.tier.startswith("shm://"), report
        dist.barrier()
        if rank == 0:
            print("far has", kept, flush=True)
            shutil.rmtree(folder / "near")
        dist.barrier()
    dist.barrier()
    if rank == 0:
        print("ALL WELL", flush=True)
    exit_rank()


main()
