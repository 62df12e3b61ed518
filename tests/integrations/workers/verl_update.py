"""Updates by the manager of verl over its worker groups on Ray: two actors and two rollouts.

The argument is the root. Prints JSON: for each update, whether each rollout has the weights.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

MODULE = "ckpt.integrations.verl"
CPUS = 64  # Ray only counts them: a worker of verl asks for ten


def weights_of(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for name in ("embed.weight", "head.weight"):
        yield name, torch.randn(64, 64, generator=generator).bfloat16()


class Actor(Worker):  # type: ignore[misc, unused-ignore]
    """A trainer, whose weights depend on the step alone."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        import_external_libs(MODULE)
        self.engine = CheckpointEngineRegistry.new("ckpt", is_master=self.rank == 0, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str) -> dict[str, Any]:
        await self.engine.send_weights(weights_of(global_steps), global_steps=global_steps)
        return {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.engine, method)(*arguments, **options)


class Server:
    """What stands for an inference server: it keeps the weights that it is given."""

    async def update_weights(self, weights: Any, **_: Any) -> None:
        self.weights = {name: tensor.clone() async for name, tensor in weights}


class Rollout(CheckpointEngineWorker):  # type: ignore[misc, unused-ignore]
    def __init__(self, config: Any) -> None:
        super().__init__(rollout_config=config, model_config=None, server_adapter=Server())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return self.server_adapter.weights  # type: ignore[no-any-return, unused-ignore]


class Replica:
    """A group of rollouts that has no requests to hold back."""

    def __init__(self, workers: Any) -> None:
        self.workers = workers

    async def nothing(self, **_: Any) -> None:
        pass

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = nothing


def group(name: str, kind: type, argument: Any) -> Any:
    pool = RayResourcePool([2], use_gpu=False, name_prefix=name)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(kind), argument), device_name="cpu")


def main(root: str) -> None:
    ray.init(num_cpus=CPUS, include_dashboard=False)
    options = {"root": root, "timeout_seconds": 60.0}
    config = CheckpointEngineConfig(
        backend="ckpt", engine_kwargs={"ckpt": options}, custom_backend_module=MODULE
    )
    actors = group("actors", Actor, options)
    settings = SimpleNamespace(name="vllm", mode="async", checkpoint_engine=config)
    rollouts = group("rollouts", Rollout, settings)
    manager = CheckpointEngineManager(config, actors, [Replica(rollouts.workers)])
    facts: list[list[bool]] = []
    for step in (1, 2, 3):
        manager.update_weights(global_steps=step)
        expected = dict(weights_of(step))
        facts.append(
            [
                all(torch.equal(weights[name], value) for name, value in expected.items())
                for weights in rollouts.weights()
            ]
        )
    print("FACTS", json.dumps(facts))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
