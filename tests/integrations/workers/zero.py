"""Save and restore DeepSpeed engines: ``zero.py FOLDER save:2-bf16 load:2-bf16:1-fp32 ...``.

An order to save names the engine. An order to load names the engine that has saved, and then the
one that restores. An order to convert names the engine of DeepSpeed's own checkpoint, and then the
one that goes on from it. An order for the counters names the engine. An engine is its stage, dtype
and perhaps a variant (``2-bf16-robin``); ``plain-fp32`` is what the test itself has saved, without
DeepSpeed.

The compared values are read through DeepSpeed itself, never through ckpt.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    set_log_level_from_string,
)
from torch import distributed as dist

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.integrations.deepspeed import zero_state
from tests.integrations.workers.zero_nets import batch, build, loss_of

STEPS, MORE = 3, 2
NEAR = {"fp32": 2e-7, "bf16": 2e-3, "cast": 2e-2}
"""How far losses may be apart where sums are taken in another order: other ranks, memory is
aligned otherwise, or one of them in bf16.
"""

KEYS = ("exp_avg", "exp_avg_sq")


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "robin": {"zero_optimization": {"round_robin_gradients": True}},
    "sums": {
        "data_types": {"grad_accum_dtype": "fp32"}
    },  # DeepSpeed uses another optimizer under ZeRO 1 and bf16
    "groups": {"zero_optimization": {"sub_group_size": 40}},
    "offload": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    },
}


def engine_of(kind: str, seed: int):
    stage, dtype, *rest = kind.split("-")
    variant = VARIANTS["".join(rest)]
    net, optimizer = build(seed)
    # ZeRO 3 would replace F.linear, for engines of other stages in this process too
    zero = {
        "stage": int(stage),
        "stage3_param_persistence_threshold": 20,
        "memory_efficient_linear": False,
    }
    scheduler = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 10}
    config: dict[str, Any] = {
        "train_batch_size": 12,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": scheduler},
        **variant,
        "zero_optimization": {**zero, **variant.get("zero_optimization", {})},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def train(engine, first: int, steps: int) -> list[float]:
    """Train, and return the losses of all ranks together."""
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
    """Return all that a checkpoint must restore, as whole tensors on every rank."""
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
    return {
        f"{key}/{name}": safe_get_full_optimizer_state(p, key).clone() for name, p in free.items()
    }


def whole_of_1_and_2(engine, key: str) -> dict[str, torch.Tensor]:
    """Join all ranks' partitions, and cut them in DeepSpeed's order.

    Its own tool knows no state of the second group after one step.
    """
    optimizer, found = engine.optimizer, {}
    names = {id(p): name for name, p in engine.module.named_parameters()}
    partitions = (
        getattr(optimizer, "single_partition_of_fp32_groups", None)
        or optimizer.fp32_groups_flat_partition
    )
    groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    for group, flat in zip(groups, partitions, strict=True):
        own = flat.detach() if key == "model" else optimizer.optimizer.state[flat][key]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        rest = torch.cat(parts)
        for parameter in group:
            found[f"{key}/{names[id(parameter)]}"] = (
                rest[: parameter.numel()].view(parameter.shape).clone()
            )
            rest = rest[parameter.numel() :]
    return found


def low_precision(engine) -> dict[str, torch.Tensor]:
    """Return the weights that the forward pass sees."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().float().clone()
    return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys(), one.keys() ^ two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.to(two[name].dtype), two[name]), (name, tensor, two[name])


def save(folder: Path, kind: str) -> None:
    engine, at = engine_of(kind, seed=1), folder / kind
    with CheckpointManager(at) as manager:
        state = {**zero_state(engine), "step": 0}
        assert manager.restore(state) is None
        train(engine, 0, STEPS)
        state["step"] = STEPS
        kept, seen = full(engine), low_precision(engine)
        pending = manager.save_async(state)
        losses = train(engine, STEPS, MORE)  # train while it is copied and written
        pending.result(60)
    ranks = [torch.zeros_like(kept["model/seen"]) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, kept["model/seen"])
    assert dist.get_world_size() == 1 or not torch.equal(*ranks[:2]), "the buffer is to differ"
    kept["model/seen"] = ranks[0]  # the first rank's value counts
    if dist.get_rank() == 0:
        reported = {"kept": kept, "seen": seen, "losses": losses, "world": dist.get_world_size()}
        torch.save(reported, f"{at}.pt")
    dist.barrier()
    engine.destroy()


def load(folder: Path, saved: str, kind: str) -> None:
    reported = torch.load(folder / f"{saved}.pt")
    engine, world = engine_of(kind, seed=2), dist.get_world_size()
    dtype, cast = kind.split("-")[1], kind.split("-")[1] != saved.split("-")[1]
    state = {**zero_state(engine), "step": 0}
    with CheckpointManager(folder / saved) as manager:
        assert manager.restore(state, read_through=False, cast=cast) is not None
    assert state["step"] == STEPS
    same(reported["kept"], full(engine))
    same(rounded(reported["kept"], dtype) if cast else reported["seen"], low_precision(engine))
    if not saved.startswith("plain"):
        assert engine.global_steps == STEPS
        assert engine.lr_scheduler.last_batch_iteration == STEPS - 1, (
            engine.lr_scheduler.state_dict()
        )
    losses = train(engine, STEPS, MORE)
    apart = max(abs(one - two) for one, two in zip(losses, reported["losses"], strict=False))
    as_it_was = (reported["world"], saved) == (world, kind)
    assert apart <= (0.0 if as_it_was else NEAR["cast" if cast else dtype]), (
        losses,
        reported["losses"],
    )
    if dist.get_rank() == 0:
        print(
            f"loaded {saved} of {reported['world']} into {kind} of {world}: losses differ by "
            f"{apart:.1e}"
        )
    engine.destroy()


def convert(folder: Path, saved: str, kind: str) -> None:
    """Go on in an engine of ``kind`` from what DeepSpeed's own engine has saved, and its own script
    has converted.
    """
    engine, at = engine_of(saved, seed=1), folder / f"universal-{saved}-{kind}"
    train(engine, 0, STEPS)
    engine.save_checkpoint(f"{at}-run", tag="global_step3")
    kept = full(engine)
    losses = train(engine, STEPS, MORE)
    engine.destroy()
    if dist.get_rank() == 0:
        script = Path(deepspeed.__file__).parent / "checkpoint" / "ds_to_universal.py"
        words = ["--input_folder", f"{at}-run/global_step3", "--output_folder", f"{at}-files"]
        subprocess.run([sys.executable, str(script), *words, "--inject_missing_state"], check=True)
        command = Path(sys.executable).with_name("ckpt")
        subprocess.run([command, "adopt", f"{at}-files", at, "--step", str(STEPS)], check=True)
    dist.barrier()
    other = engine_of(kind, seed=2)
    with CheckpointManager(at) as manager:
        assert manager.restore(zero_state(other), only=["model", "optimizer"]) is not None
    restored = full(other)
    del kept["model/seen"], restored["model/seen"]  # the ranks differ in it
    same(kept, restored)
    assert other.global_steps == STEPS
    assert other.lr_scheduler.last_batch_iteration == STEPS - 1
    others = train(other, STEPS, MORE)
    assert max(abs(one - two) for one, two in zip(losses, others, strict=True)) <= NEAR["fp32"]
    other.destroy()


def counters(_: Path, kind: str) -> None:
    """Set the counters of an engine, and nothing else that a checkpoint may name."""
    engine = engine_of(kind, seed=1)
    optimizer, module = zero_state(engine)["optimizer"], engine.module
    extra = optimizer.extra()
    extra["counters"] |= {"global_steps": 7, "module": "another"}
    optimizer.load_extra(extra)
    assert (engine.global_steps, engine.module) == (7, module)
    engine.destroy()


def rounded(kept: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Return the weights that the forward pass of an engine of ``dtype`` sees."""
    to = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = {
        name.removeprefix("model/"): value
        for name, value in kept.items()
        if name.startswith("model/")
    }
    return {name: value.to(to).float() for name, value in weights.items() if name != "seen"}


def main(verbs: Mapping[str, Callable[..., None]]) -> None:
    """Follow the orders of the command line: the name of a function, and its arguments after
    colons.
    """
    set_log_level_from_string("error")
    deepspeed.init_distributed("gloo")
    folder, *orders = sys.argv[1:]
    for order in orders:
        verb, *words = order.split(":")
        verbs[verb](Path(folder), *words)
        dist.barrier()
    if dist.get_rank() == 0:
        print("ALL WELL")
    exit_rank()


if __name__ == "__main__":
    main({"save": save, "load": load, "convert": convert, "counters": counters})
