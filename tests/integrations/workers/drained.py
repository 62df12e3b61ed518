"""A run of Ray Train on a cluster of two nodes, one of which is drained.

    drained.py FOLDER

The first worker drains its own node, as a cloud's autoscaler does, after step 3. Each attempt of
each worker leaves the steps that it has trained in a file.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from ckpt.integrations.ray import RayCheckpoints

STEPS, DRAIN_SECONDS = 10**6, 20
PREEMPTION = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


def drain(address: str) -> None:
    ends = int(1e3 * (time.time() + DRAIN_SECONDS))
    node = ray.get_runtime_context().get_node_id()
    accepted, reason = ray._raylet.GcsClient(address=address).drain_node(
        node, PREEMPTION, "a test", ends
    )
    assert accepted, reason


def train(config: dict[str, Any]) -> None:
    context = ray.train.get_context()
    rank, folder = context.get_world_rank(), Path(config["folder"])
    model = prepare_model(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    state = {"model": model, "optimizer": optimizer}
    with RayCheckpoints() as checkpoints:
        report = checkpoints.restore(state)
        begin, step = report.step if report else 0, 0
        reported = {"node": ray.get_runtime_context().get_node_id(), "begin": begin}
        for step in range(begin + 1, STEPS + 1):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            if begin == 0 and step == 3 and rank == 0:
                drain(config["address"])
            if stops := checkpoints.stop_requested(step):
                checkpoints.report({"step": step}, state, step)
                break
            if begin and step == begin + 2:
                break
        (folder / f"{rank}-{begin}.json").write_text(
            json.dumps({**reported, "step": step, "stops": stops})
        )


def main(folder: Path) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    ray.init(address=cluster.address)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "address": cluster.address},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_PACK"),
        run_config=RunConfig(storage_path=str(folder / "storage"), name="drained"),
    )
    result = trainer.fit()
    (folder / "result.json").write_text(json.dumps(result.metrics))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
