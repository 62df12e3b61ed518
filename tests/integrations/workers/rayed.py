"""Runs of Ray Train in one local cluster.

Nothing stops the first run. In the second one a worker is killed with SIGKILL while a save streams.

    rayed.py FOLDER
    rayed.py FOLDER skipped

With "skipped" there is one run, whose second worker has no free slot for some saves, and skips
them.

Each attempt of each worker leaves its losses in a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from ckpt import PerRank, RngState, Tier
from ckpt.errors import SaveSkipped
from ckpt.integrations.ray import RayCheckpoints, run_root
from tests.kit.deadly import die_in_the_save_of

STEPS, KILLED = 8, 6
SKIPPED = {1, 4, 8}


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(config["folder"])
    reported = ray.train.get_checkpoint()
    if config["kills"] and rank == 1 and not (folder / "killed").exists():
        (folder / "killed").touch()
        die_in_the_save_of(KILLED)
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 1))
    model = prepare_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer, "rng": PerRank(RngState())}
    losses: dict[str, float] = {}
    with RayCheckpoints(Tier(run_root(), keep_last=3)) as checkpoints:
        report = checkpoints.restore(state, checkpoint=config.get("checkpoint"))
        begin = report.step if report else 0
        for step in range(begin + 1, STEPS + 1):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[str(step)] = loss.item()
            stops = checkpoints.stop_requested(step)
            assert not stops
            if step % 2 == 0:
                pending = checkpoints.report({"step": step, "loss": loss.item()}, state, step)
                assert pending is not None
                if step != KILLED:
                    pending.result()
            else:
                checkpoints.report({"step": step})
    name = f"{context.get_experiment_name()}-{rank}-{begin}.json"
    result = {"losses": losses, "reported": reported and reported.path}
    (folder / name).write_text(json.dumps(result))


def skip(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    with RayCheckpoints(on_busy="skip", slots=1) as checkpoints:
        slots = checkpoints.manager._saver.slots
        for step in range(1, STEPS + 1):
            taken = None
            if rank == 1 and step in SKIPPED:
                taken = slots.acquire(1, wait=False)
                assert taken is not None
            pending = checkpoints.report({"step": step}, {"x": step}, step)
            assert pending is not None
            assert isinstance(pending.exception(), SaveSkipped) == (step in SKIPPED)
            if taken is not None:
                slots.release(taken)


def run(folder: Path, name: str, loop: Any = train, **config: Any) -> Any:
    trainer = TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "kills": False} | config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(folder / "storage"),
            name=name,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    return trainer.fit()


def references(results: dict[str, Any]) -> dict[str, Any]:
    """Return the steps that Ray knows of each run, with their references."""
    return {
        name: [
            [metrics["step"], json.loads((Path(checkpoint.path) / "ckpt.json").read_text())]
            for checkpoint, metrics in each.best_checkpoints
        ]
        for name, each in results.items()
    }


def main(folder: Path, *, skips: bool) -> None:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    if skips:
        result = references({"skipped": run(folder, "skipped", skip)})
    else:
        whole = run(folder, "whole")
        result = references({"whole": whole, "killed": run(folder, "killed", kills=True)})
        run(folder, "other", checkpoint=whole.best_checkpoints[0][0])
    (folder / "results.json").write_text(json.dumps(result))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), skips=sys.argv[2:] == ["skipped"])
