"""A rank of torchtitan's trainer.

The life "whole" is never stopped, and is saved by torchtitan's own manager. In the life "killed"
every rank is killed with SIGKILL while a save streams. The life "resumed" continues. Each leaves
its losses in a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager

from ckpt.integrations.torchtitan import CkptManager
from tests.integrations.titan_job import config, losses, trainer
from tests.kit.deadly import die_in_the_save_of

STEPS, KILLED = 7, 6


def main(folder: Path, life: str) -> None:
    if life == "killed":
        die_in_the_save_of(KILLED)
    kind = CheckpointManager if life == "whole" else CkptManager
    checkpoint = kind.Config(
        enable=True, interval=2, folder=f"{kind.__name__}", last_save_model_only=False
    )
    made = trainer(config(folder, checkpoint, steps=STEPS))
    found = losses(made)
    made.close()
    (folder / f"{life}-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
