"""A job that has a step in memory only, and waits until it is killed. It runs as a script.

one_step.py FOLDER: the tier on a disk is FOLDER/disk. FOLDER/saved appears when the step is in
memory.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from ckpt import CheckpointManager, Tier


def tiers(folder: Path) -> list[Tier]:
    return [Tier("memory"), Tier(str(folder / "disk"), every=100)]


def main(folder: Path) -> None:
    with CheckpointManager(tiers(folder), agent="required") as manager:
        manager.save({"x": torch.arange(5)}, 1)
        (folder / "saved").touch()
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
