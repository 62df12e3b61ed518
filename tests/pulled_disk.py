"""A disk that is unmounted while a job saves to it.

``test_disk`` runs it in a mount namespace of its own.

pulled_disk.py FOLDER: a file system of its own. It prints what was committed.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from ckpt import CheckpointManager
from ckpt.errors import RootLost
from tests.kit.stores import whole


def main(folder: Path) -> None:
    real, disk = folder / "real", folder / "disk"
    real.mkdir()
    disk.mkdir()

    def plug() -> None:
        subprocess.run(["mount", "--bind", real, disk], check=True)

    def pull() -> None:
        subprocess.run(["umount", "-l", disk], check=True)

    def lost(manager: CheckpointManager, step: int) -> None:
        error = manager.save_async({"x": torch.full((9000,), step)}, step).exception(60)
        assert isinstance(error, RootLost), repr(error)
        assert str(disk) in str(error)
        assert "unmounted" in str(error)
        assert not list(disk.rglob("*")), list(disk.rglob("*"))

    for root, first in ((disk, True), (disk / "run", True), (disk / "run2", False)):
        plug()
        root.mkdir(exist_ok=True)
        with CheckpointManager(root) as manager:
            if first:
                manager.save({"x": torch.full((9000,), 1)}, 1)
            pull()
            lost(manager, 2)
            lost(manager, 3)
            plug()
            manager.save({"x": torch.full((9000,), 4)}, 4)
        print(root.relative_to(folder), *whole(root))
        pull()
    plug()
    manager = CheckpointManager(disk)
    manager.save({"x": torch.full((9000,), 5)}, 5)
    pull()
    manager.save_async({"x": torch.full((9000,), 6)}, 6)
    with suppress(RootLost):
        manager.close()
        print("the last save was told as done")
    assert not list(disk.rglob("*"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
