"""Two ranks whose newest step is damaged resume from the previous one.

torchrun trainer_damaged.py FOLDER
"""

import sys
from pathlib import Path

import torch.distributed as dist

from tests.integrations.trainers import flip, losses, same, trainer, weights

folder = Path(sys.argv[1])
options = {"per_device_train_batch_size": 2}
trainer(folder / "cut", max_steps=6, lr_scheduler_type="constant", **options).train()
resumed = trainer(folder / "cut", max_steps=8, lr_scheduler_type="constant", **options)
if dist.get_rank() == 0:
    flip(folder / "cut", 6)
dist.barrier()
resumed.train(resume_from_checkpoint=True)
assert resumed._initial_global_step == 3, resumed._initial_global_step
whole = trainer(folder / "whole", max_steps=8, lr_scheduler_type="constant", **options)
whole.train()
assert losses(resumed) == losses(whole), (losses(resumed), losses(whole))
assert same(weights(resumed), weights(whole))
if dist.get_rank() == 0:
    print("resumed from", resumed._initial_global_step, "and equal")
