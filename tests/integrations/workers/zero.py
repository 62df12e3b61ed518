"""Saves and restores DeepSpeed engines: ``zero.py FOLDER save:2:bf16 load:2:bf16:1:fp32 ...`` (stage and dtype to save; those that were saved, then those to restore into).

What is compared comes from DeepSpeed's own tools (``safe_get_full_...``), never from ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, set_log_level_from_string
from torch import distributed as dist
from zero_nets import batch, build, loss_of

from ckpt import CheckpointManager
from ckpt.integrations.deepspeed import zero_state

STEPS, MORE = 3, 2
KEYS = ("exp_avg", "exp_avg_sq")


def engine_of(stage: int, dtype: str, seed: int, **zero: object) -> object:
    net, optimizer = build(seed)
    config = {
        "train_batch_size": 12,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **zero},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10}},
        dtype: {"enabled": True},
    }  # fmt: skip
    config.pop("fp32", None)
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(engine, first: int, steps: int) -> list[float]:
    """The losses of all ranks together."""
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(first, first + steps):
        words = batch(step, rank, world)
        loss = loss_of(engine(words), words)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
    return losses


def full(engine) -> dict[str, torch.Tensor]:
    """All that a checkpoint must bring back, whole, on every rank."""
    found: dict[str, torch.Tensor] = {}
    stage3 = hasattr(engine.optimizer, "fp16_groups")
    for key in ("model", *KEYS):
        found |= whole_of_3(engine, key) if stage3 else whole_of_1_and_2(engine, key)
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage3):
                found[f"model/{name}"] = parameter.detach().clone()
    return found | {f"model/{name}": value.clone() for name, value in engine.module.named_buffers()}


def whole_of_3(engine, key: str) -> dict[str, torch.Tensor]:
    free = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    if key == "model":
        return {f"{key}/{name}": safe_get_full_fp32_param(p).clone() for name, p in free.items()}
    return {f"{key}/{name}": safe_get_full_optimizer_state(p, key).clone() for name, p in free.items()}


def whole_of_1_and_2(engine, key: str) -> dict[str, torch.Tensor]:
    """All ranks' partitions one behind the other, cut in DeepSpeed's order: its own tool knows no state of the second group after one step."""
    optimizer, found = engine.optimizer, {}
    names = {id(p): name for name, p in engine.module.named_parameters()}
    partitions = (
        getattr(optimizer, "single_partition_of_fp32_groups", None) or optimizer.fp32_groups_flat_partition
    )
    groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    for group, flat in zip(groups, partitions, strict=True):
        own = flat.detach() if key == "model" else optimizer.optimizer.state[flat][key]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        rest = torch.cat(parts)
        for parameter in group:
            found[f"{key}/{names[id(parameter)]}"] = rest[: parameter.numel()].view(parameter.shape).clone()
            rest = rest[parameter.numel() :]
    return found


def low_precision(engine) -> dict[str, torch.Tensor]:
    """The weights that the forward pass sees."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().clone()
    return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.float(), two[name].float()), (name, tensor, two[name])


def file_of(folder: Path, stage: str, dtype: str) -> Path:
    return folder / f"zero{stage}-{dtype}"


def save(folder: Path, stage: str, dtype: str) -> None:
    engine = engine_of(int(stage), dtype, seed=1)
    at = file_of(folder, stage, dtype)
    with CheckpointManager(at) as manager:
        state = {**zero_state(engine), "step": 0}
        assert manager.restore(state) is None
        train(engine, 0, STEPS)
        state["step"] = STEPS
        kept, seen = full(engine), low_precision(engine)
        pending = manager.save_async(state)
        losses = train(engine, STEPS, MORE)  # while it is copied and written
        pending.result(60)
    ranks = [torch.zeros_like(kept["model/seen"]) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, kept["model/seen"])
    assert dist.get_world_size() == 1 or not torch.equal(*ranks[:2]), "the buffer is to differ"
    kept["model/seen"] = ranks[0]  # that of the first rank counts
    if dist.get_rank() == 0:
        told = {"kept": kept, "seen": seen, "losses": losses, "world": dist.get_world_size()}
        torch.save(told, at.with_suffix(".pt"))
    dist.barrier()
    engine.destroy()


def load(folder: Path, saved_stage: str, saved_dtype: str, stage: str, dtype: str) -> None:
    at = file_of(folder, saved_stage, saved_dtype)
    told = torch.load(at.with_suffix(".pt"))
    engine = engine_of(int(stage), dtype, seed=2)
    state = {**zero_state(engine), "step": 0}
    with CheckpointManager(at) as manager:
        assert manager.restore(state, read_through=False) is not None
    assert state["step"] == STEPS
    same(told["kept"], full(engine))
    same(told["seen"] if dtype == saved_dtype else rounded(told["kept"], dtype), low_precision(engine))
    assert engine.global_steps == STEPS
    assert engine.lr_scheduler.last_batch_iteration == STEPS - 1, engine.lr_scheduler.state_dict()
    losses = train(engine, STEPS, MORE)
    exactly = (told["world"], saved_stage, saved_dtype) == (dist.get_world_size(), stage, dtype)
    if exactly:
        assert losses == told["losses"], (losses, told["losses"])
    elif dtype == saved_dtype:
        near = 1e-6 if dtype == "fp32" else 2e-2
        assert all(abs(a - b) < near for a, b in zip(losses, told["losses"], strict=True)), (losses, told["losses"])  # fmt: skip
    if dist.get_rank() == 0:
        print("loaded", saved_stage, saved_dtype, told["world"], "->", stage, dtype, dist.get_world_size(),
              "loss apart", max(abs(a - b) for a, b in zip(losses, told["losses"], strict=True)))  # fmt: skip
    engine.destroy()


def rounded(kept: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    to = torch.bfloat16 if dtype == "bf16" else torch.float32
    return {
        name.removeprefix("model/"): tensor.to(to).float()
        for name, tensor in kept.items()
        if name.startswith("model/") and name != "model/seen"
    }


def main() -> None:
    set_log_level_from_string("error")
    deepspeed.init_distributed("gloo")
    folder, *orders = sys.argv[1:]
    for order in orders:
        verb, *words = order.split(":")
        {"save": save, "load": load}[verb](Path(folder), *words)
    dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
