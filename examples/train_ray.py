"""Teach a small ConvNet to read scikit-learn's digits with Ray Train on two workers. If a worker is
killed, Ray starts the workers again, and the training continues.

    python examples/train_ray.py --storage ~/ray_results --name digits
"""

import argparse
import os
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from train_digits import convnet, digits

from ckpt import PerRank, RngState
from ckpt.integrations.ray import RayCheckpoints


def train(config: dict[str, Any]) -> None:
    """Be a worker: continue from the newest checkpoint of the run, and train."""
    torch.use_deterministic_algorithms(True)
    rank, workers = get_context().get_world_rank(), get_context().get_world_size()
    train_set, test_images, test_labels = digits()
    torch.manual_seed(1 + rank)  # dropout differs between the workers
    model = prepare_model(convnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rng = PerRank(RngState(), on_resize="same_rank")
    state = {"model": model, "optimizer": optimizer, "rng": rng}
    with RayCheckpoints() as checkpoints:
        report = checkpoints.restore(state)
        if report is not None:
            print(f"rank {rank} resumed from step {report.step}", flush=True)
        for step in range(report.step + 1 if report else 1, config["steps"] + 1):
            order = torch.Generator().manual_seed(step)
            batch = torch.randperm(len(train_set), generator=order)[rank : 64 * workers : workers]
            images, labels = train_set[batch]
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            print(f"rank {rank} step {step} loss {loss.item():.6f}", flush=True)
            last = checkpoints.stop_requested(step)  # a node is going away
            if last or step % config["save_every"] == 0:
                checkpoints.report({"step": step, "loss": loss.item()}, state, step)
            if last:
                break
    if rank == 0:
        with torch.no_grad():  # without DDP, which would wait for the other worker
            found = getattr(model, "module", model).eval()(test_images).argmax(1)
        print(f"accuracy {(found == test_labels).float().mean().item():.4f}", flush=True)


def main() -> None:
    """Start the workers, and print what Ray knows at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--storage", default=os.path.expanduser("~/ray_results"))
    parser.add_argument("--name", default="digits")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, help="steps")
    args = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "save_every": args.save_every},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=args.storage,
            name=args.name,
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    print("reported", trainer.fit().metrics)


if __name__ == "__main__":
    main()
