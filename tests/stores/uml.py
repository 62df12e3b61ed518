"""Measure the mounts of the kernel of a user-mode Linux: NFS 4.2 and NFS 3 of one folder, and SMB.

``tests/faults/nfs.sh`` runs it. It prints a line for each mount, with the name
of the mount and a `Measured` as JSON, and one for both mounts of NFS as two clients.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import torch

from tests.stores.measure import MARK, Place, measure


def main(hard: Path, soft: Path, smb: Path) -> None:
    torch.set_num_threads(1)
    mounts = {"NFS 4.2, hard": [hard], "NFS 3, soft": [soft], "NFS 4.2 and 3": [hard, soft]}
    if smb.is_mount():
        mounts["SMB 3.1.1, by the kernel"] = [smb]
    for number, (name, points) in enumerate(mounts.items()):
        clients = [f"{point}/run{number}" for point in points]
        fills = shutil.disk_usage(points[0]).free // 5 // 4096 * 4096 if len(points) == 1 else 0
        done = measure(Place(clients=clients, fills=fills))
        print(f"{MARK}{name}\t{msgspec.json.encode(done).decode()}", flush=True)
        shutil.rmtree(points[0] / f"run{number}")
    print("ALL WELL", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
