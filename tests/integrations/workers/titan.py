"""A rank of torchtitan's trainer.

The life "whole" is never stopped, and is saved by torchtitan's own manager. In the life "killed"
every rank is killed with SIGKILL while a save is on its way. The life "resumed" continues. Each
leaves its losses in a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager

import ckpt.storage.tiers
from ckpt.integrations.torchtitan import CkptManager
from tests.integrations.titan_job import config, losses, trainer

STEPS, KILLED = 7, 6


class Deadly:
    """A store in which a rank dies when it has written its file of step KILLED."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def upload(self, key: str, *args: Any, **kwargs: Any) -> Any:
        begun = self._inner.upload(key, *args, **kwargs)
        return LastUpload(begun) if f"{KILLED:09d}" in key else begun


class LastUpload(Deadly):
    def finish(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, life: str) -> None:
    if life == "killed":
        opened = ckpt.storage.tiers.open_backend
        ckpt.storage.tiers.open_backend = lambda url, options: Deadly(opened(url, options))
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
