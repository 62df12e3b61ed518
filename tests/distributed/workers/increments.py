"""Two ranks save an adapter on frozen FSDP2 and DDP layers. Each step is what was saved.
A second run has the first as its base, and a third one an adopted file. In that, a rank finds whole
tensors alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from bench.rank_exit import exit_rank
from ckpt import CheckpointManager, Tier
from ckpt.catalog.step_listing import committed, read_manifest
from ckpt.exchange.foreign.adoption import adopt_checkpoint
from ckpt.exchange.foreign.imports import ForeignCheckpoint
from ckpt.model.keys import BaseRef
from ckpt.model.manifest import bases_of
from ckpt.storage.registry import open_backend

WIDTH = 64


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        fully_shard(model)
    return model


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): getattr(value, "full_tensor", lambda v=value: v)().clone()
        for name, value in model.state_dict().items()
    }


def main(folder: Path, kind: str, base: str | None = None) -> None:
    root = folder / (f"{kind}-over-{Path(base).name}" if base else kind)
    has_outer_base = base is not None
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
        assert sorted(refs) == ([3, 4] if has_outer_base else [1, 3, 4]), refs
        for step in (3, 4):
            manifest = read_manifest(store, refs[step])
            if base is not None and has_outer_base:
                (base_ref,) = [ref for ref in committed(open_backend(base)) if ref.step == 1]
                outer_base = BaseRef(f"../{Path(base).name}", base_ref)
                assert bases_of(manifest.increments) == {outer_base}
            else:
                assert manifest.bases == {refs[1]}, manifest.bases
            assert len(manifest.increments) == 2
        for step in refs:
            loaded = ckpt.load(root, "model", step=step)
            for name, value in weights[step].items():
                assert torch.equal(loaded[name], value), (step, name)


def adopt_model(folder: Path) -> None:
    """Adopt a safetensors file of the model as step 1."""
    path = folder / "model.safetensors"
    save_file(model_of("plain").state_dict(), path)
    adopt_checkpoint(ForeignCheckpoint(path=str(path)), Tier(str(folder / "adopted")), 1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        adopt_model(Path(sys.argv[1]))
    dist.barrier()
    for case in ("fsdp2", "ddp"):
        main(Path(sys.argv[1]), case)
        dist.barrier()
        for base in (case, "adopted"):
            main(Path(sys.argv[1]), case, base=str(Path(sys.argv[1]) / base))
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    exit_rank()
