"""ROOT SAVE_AT STOP_AT KIND WORKERS: a rank of a DDP job that trains on 12 samples in a step, on
all ranks together. It prints the samples of each step.

It continues from ROOT, saves after the step SAVE_AT, trains one more step and restores, as after a
step that went wrong. It ends without a further save after the step STOP_AT, or after two epochs.

KIND is "sampler" or "stream" for an ElasticSampler or an ElasticStream, and has "stateful-" before
it for a StatefulDataLoader.
"""

import json
import sys
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.data import ElasticSampler, ElasticStream

EPOCHS = 2


class Job:
    def __init__(self, kind: str, workers: int) -> None:
        self.position, self.loader = dealt(kind, workers)
        self.model = DistributedDataParallel(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.position,
            "step": 0,
        }

    def train_step(self, samples: torch.Tensor) -> None:
        self.model(samples[:, None]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["step"] += 1
        shown = {"step": self.state["step"], "samples": samples.int().tolist()}
        print(json.dumps(shown), flush=True)


def dealt(kind: str, workers: int) -> tuple[ElasticSampler | ElasticStream, Any]:
    """Return the position, and a loader over it that gives one tensor in a batch."""
    more: dict[str, Any] = {"batch_size": 12 // dist.get_world_size(), "num_workers": workers}
    stateful = kind.startswith("stateful-")
    package = "torchdata.stateful_dataloader" if stateful else "torch.utils.data"
    loader = getattr(import_module(package), "StatefulDataLoader" if stateful else "DataLoader")
    if kind.endswith("sampler"):
        data = TensorDataset(torch.arange(103.0))
        sampler = ElasticSampler(data, seed=5)
        return sampler, loader(data, sampler=sampler, **more)
    dataset = import_module("datasets").Dataset
    numbers = dataset.from_dict({"number": list(range(103))}).to_iterable_dataset(num_shards=5)
    stream = ElasticStream(numbers.shuffle(seed=5, buffer_size=10))
    return stream, loader(stream, collate_fn=numbered, **more)


def numbered(rows: list[dict[str, int]]) -> list[torch.Tensor]:
    return [torch.tensor([float(row["number"]) for row in rows])]


def main(root: str, save_at: int, stop_at: int, kind: str, workers: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    job = Job(kind, workers)
    with CheckpointManager(root) as manager:
        manager.restore(job.state)
        goes_wrong = True
        while job.position.epoch < EPOCHS and job.state["step"] < stop_at:
            for (samples,) in job.position.batches(job.loader):
                job.train_step(samples)
                if job.state["step"] == save_at and goes_wrong:
                    manager.save(job.state)
                if job.state["step"] == save_at + 1 and goes_wrong:
                    goes_wrong = False
                    manager.restore(job.state)
                    break
                if job.state["step"] == stop_at:
                    break


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
    exit_rank()
