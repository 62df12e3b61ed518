"""A tier has a capacity that is larger than its disk of 4 MiB.

``test_capacity`` runs it in a mount namespace of its own.

full_disk.py FOLDER: the disk. It prints what is there at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ckpt import CheckpointManager, Tier
from ckpt.errors import OutOfSpace
from tests.kit.stores import whole


def main(root: Path) -> None:
    def state(step: int, numbers: int = 150_000) -> dict[str, torch.Tensor]:
        return {"x": torch.full((numbers,), step)}  # of 8 bytes each

    with CheckpointManager(Tier(str(root), capacity="1GB")) as manager:
        for step in range(1, 6):
            manager.save(state(step), step)
        error = manager.save_async(state(6, 600_000), 6).exception()
        assert isinstance(error, OutOfSpace), error
        assert str(root) in str(error)
        manager.save(state(7), 7)
    left = whole(root)
    assert left[-1] == 7, left
    assert [path for path in root.rglob(".*") if path.is_file()] == []
    print("left", *left)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
