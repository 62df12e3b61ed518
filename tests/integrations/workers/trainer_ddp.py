"""Two ranks: rank 1 dies of SIGKILL in the first life, and the second resumes.

torchrun --max-restarts=1 trainer_ddp.py FOLDER
"""

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist

from tests.integrations.trainers import At, losses, same, trainer, weights

folder = Path(sys.argv[1])
options = {"max_steps": 8, "per_device_train_batch_size": 2, "eval_strategy": "steps"}
options |= {"eval_steps": 3, "save_total_limit": 2}


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    trainer(folder / "cut", callbacks=[At(8, die)], **options).train()
else:
    resumed = trainer(folder / "cut", **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step in (3, 6), resumed._initial_global_step
    whole = trainer(folder / "whole", **options)
    whole.train()
    assert losses(resumed) == losses(whole)
    assert same(weights(resumed), weights(whole))
    if dist.get_rank() == 0:
        print("resumed from", resumed._initial_global_step, "and equal")
