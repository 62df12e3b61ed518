"""Make each call that ``events`` adds, and die at the n-th: ``deaths.py FOLDER N``."""

from __future__ import annotations

import os
import sys

from ckpt_backends.folder.direct_io import rename_if_absent
from tests.chaos.events import KILLED, RENAME, arm

EXPECTED = ["os.write", "os.pwrite", "os.ftruncate", "os.fsync", "os.link", RENAME]


def main(folder: str, turn: int) -> None:
    """Die at the event of this number; with 0, compare what was counted."""
    counted: list[str] = []

    def count(kind: str, path: str, can_be_cut: bool) -> bool:
        counted.append(kind)
        if len(counted) == turn and not can_be_cut:
            os._exit(KILLED)
        return len(counted) == turn

    arm(count, lambda path: path.startswith(f"{folder}/"))
    descriptor = os.open(f"{folder}/a", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"0123")
    os.pwrite(descriptor, b"4567", 4)
    os.ftruncate(descriptor, 8)
    os.fsync(descriptor)
    os.close(descriptor)
    os.link(f"{folder}/a", f"{folder}/b")
    rename_if_absent(f"{folder}/b", f"{folder}/c")
    outside = os.open(f"{folder}.outside", os.O_WRONLY | os.O_CREAT)
    os.write(outside, b"0123")
    assert counted == EXPECTED, counted


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
