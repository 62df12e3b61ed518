"""ROOT SAVE_AT STOP_AT: a rank of a DDP job that trains on 12 samples in a step, on all ranks
together. It prints the samples of each step.

It continues from ROOT, saves after the step SAVE_AT, trains one more step and restores, as after a
step that went wrong. It ends without a further save after the step STOP_AT, or after two epochs.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from bench.rank_exit import exit_rank
from ckpt import CheckpointManager
from ckpt.integrations.data import ElasticSampler

EPOCHS = 2


class Job:
    def __init__(self) -> None:
        data = TensorDataset(torch.arange(103.0))
        self.sampler = ElasticSampler(data, seed=5)
        size = 12 // dist.get_world_size()
        self.loader = DataLoader(data, batch_size=size, sampler=self.sampler, num_workers=1)
        self.model = DistributedDataParallel(nn.Linear(1, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "data": self.sampler,
            "step": 0,
        }

    def train_step(self, samples: torch.Tensor) -> None:
        self.model(samples[:, None]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state["step"] += 1
        shown = {"step": self.state["step"], "samples": samples.int().tolist()}
        print(json.dumps(shown), flush=True)


def main(root: str, save_at: int, stop_at: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    job = Job()
    with CheckpointManager(root) as manager:
        manager.restore(job.state)
        goes_wrong = True
        while job.sampler.epoch < EPOCHS and job.state["step"] < stop_at:
            for (samples,) in job.sampler.batches(job.loader):
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
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    exit_rank()
