"""Measure a hard mount of NFS 4.2 and a soft one of NFS 3 of one folder.

``tests/faults/nfs.sh`` runs it in a user-mode Linux. It prints a line for each mount, with the name
of the mount and a `Measured` as JSON, and one for both as two clients.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import torch

from tests.stores.measure import MARK, Place, measure


def main(hard: Path, soft: Path) -> None:
    torch.set_num_threads(1)
    mounts = {"NFS 4.2, hard": [hard], "NFS 3, soft": [soft], "NFS 4.2 and 3": [hard, soft]}
    for number, (name, points) in enumerate(mounts.items()):
        clients = [f"{point}/run{number}" for point in points]
        fills = shutil.disk_usage(points[0]).free // 5 // 4096 * 4096 if len(points) == 1 else 0
        done = measure(Place(clients=clients, fills=fills))
        print(f"{MARK}{name}\t{msgspec.json.encode(done).decode()}", flush=True)
        shutil.rmtree(points[0] / f"run{number}")
    print("ALL WELL", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
