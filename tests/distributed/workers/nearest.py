"""FOLDER: two ranks save to a near and a far tier.

Then near is damaged in a different place for each and emptied, and far is removed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, RestoreReport
from ckpt.model.keys import OWNER
from ckpt.storage.api import StorageBackend
from ckpt.storage.registry import open_backend
from ckpt.storage.testing import FaultyBackend, flip_byte
from tests.distributed.workers.nets import assert_same, build, full, step
from tests.kit.stores import wrap_stores


def fresh() -> dict[str, Any]:
    model, optimizer = build("fsdp", 1)
    step(model, optimizer, 99)
    return {"model": model, "optimizer": optimizer, "step": 0}


def gathered(mine: Any) -> Sequence[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def main() -> None:
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    near, far = folder / "near", folder / "far"
    opened: list[FaultyBackend] = []

    def watching(url: str, store: StorageBackend) -> StorageBackend:
        if url != str(far):
            return store
        opened.append(FaultyBackend(store))
        return opened[-1]

    wrap_stores(pytest.MonkeyPatch(), watching)
    torch.manual_seed(0)
    model, optimizer = build("fsdp", 0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    with CheckpointManager([near, far], chunk_size=1 << 12) as manager:
        for number in (1, 2):
            step(model, optimizer, number)
            state["step"] = number
            manager.save(state)
    expected = full(model, optimizer)

    def restored(read_through: bool = True) -> tuple[RestoreReport, list[str]]:
        target = fresh()
        with CheckpointManager([near, far]) as manager:
            report = manager.restore(target, read_through=read_through)
        assert report is not None
        assert (report.step, target["step"], report.skipped) == (2, 2, ()), report
        assert_same(full(target["model"], target["optimizer"]), expected)
        dist.barrier()
        return report, [
            call.key
            for call in opened[-1].calls
            if call.verb in ("read_into", "head")
            and "manifest" not in call.key
            and call.key != OWNER  # Each restore looks whether a living job owns the roots
        ]

    # each rank's own file is damaged on near, in different places
    (data,) = near.glob(f"step-000000002.*/rank-{rank:05d}.safetensors")
    flip_byte(open_backend(str(near)), str(data.relative_to(near)), 4096 + 5 if rank else -5)
    dist.barrier()
    report, asked = restored()
    (repair,) = report.repaired
    assert repair.key == str(data.relative_to(near)), report
    assert report.tier == str(near)
    assert asked == [repair.key] * 2, asked  # once for the state, and once to rewrite the file
    assert repair.mended

    # nothing is near: the two ranks fetch each file once between them, and near is whole again
    dist.barrier()
    if rank == 0:
        shutil.rmtree(near)
    dist.barrier()
    report, asked = restored()
    assert (report.tier, report.repaired) == (str(far), ()), report
    fetched = [key for mine in gathered(asked) for key in mine if key.endswith(".safetensors")]
    sizes = sum(path.stat().st_size for path in far.glob("step-000000002.*/*.safetensors"))
    assert len(fetched) == len(set(fetched)) == 2, fetched
    assert sum(gathered(report.cached_bytes)) == sizes

    # the second restart needs nothing of far, which is not there any more
    if rank == 0:
        for path in far.glob("step-000000002.*/*"):
            path.unlink()
    dist.barrier()
    report, asked = restored()
    assert (report.tier, report.repaired, report.cached_bytes) == (str(near), (), 0)
    assert asked == [], asked
    dist.barrier()
    if rank == 0:
        print("ALL WELL", flush=True)
    exit_rank()


main()
