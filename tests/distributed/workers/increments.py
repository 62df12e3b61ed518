"""Two ranks save an adapter on frozen FSDP2 and DDP layers. Each step is what was saved.
A second run has the first as its base.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier
from ckpt.catalog.index import committed, read_manifest
from ckpt.model.keys import BaseRef
from ckpt.model.manifest import bases_of
from ckpt.storage.registry import open_backend

WIDTH = 64


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    if kind == "fsdp2":
        fully_shard(model)
        return model
    return nn.parallel.DistributedDataParallel(model)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): getattr(value, "full_tensor", lambda v=value: v)().clone()
        for name, value in model.state_dict().items()
    }


def main(folder: Path, kind: str, base: str | None = None) -> None:
    root = folder / (f"{kind}-b" if base else kind)
    model = model_of(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    weights: dict[int, dict[str, torch.Tensor]] = {}
    with CheckpointManager(Tier(str(root), keep_last=2, base=base)) as manager:
        for step in range(1, 5):
            model(torch.full((2, WIDTH), float(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save_async({"model": model, "optimizer": optimizer}, step).result()
            weights[step] = full(model)
    dist.barrier()
    if dist.get_rank() == 0:
        store = open_backend(str(root))
        refs = {ref.step: ref for ref in committed(store)}
        assert sorted(refs) == ([3, 4] if base else [1, 3, 4]), refs
        for step in (3, 4):
            manifest = read_manifest(store, refs[step])
            if base:
                (base_ref,) = [ref for ref in committed(open_backend(base)) if ref.step == 1]
                assert bases_of(manifest.increments) == {BaseRef(f"../{kind}", base_ref)}
            else:
                assert manifest.bases == {refs[1]}, manifest.bases
            assert len(manifest.increments) == 2
        for step in refs:
            loaded = ckpt.load(root, "model", step=step)
            for name, value in weights[step].items():
                assert torch.equal(loaded[name], value), (step, name)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for case in ("fsdp2", "ddp"):
        main(Path(sys.argv[1]), case)
        dist.barrier()
        main(Path(sys.argv[1]), case, base=str(Path(sys.argv[1]) / case))
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    exit_rank()
