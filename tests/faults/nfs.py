"""What ckpt does on a real NFS mount, hard and soft, that fills up and whose server stops and
starts.

nfs.sh runs it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from ckpt import CheckpointManager
from ckpt.errors import CkptError
from ckpt.storage.registry import open_backend
from tests.kit.stores import whole

MIB = 1 << 20


def state(step: int, mib: int) -> dict[str, object]:
    return {"x": torch.arange(mib * MIB // 8, dtype=torch.int64) + step, "step": step}


def restored(root: Path, mib: int) -> int:
    target = state(-1, mib)
    with CheckpointManager(root) as manager:
        report = manager.restore(target)
    assert report is not None
    assert torch.equal(target["x"], state(report.step, mib)["x"])  # type: ignore[arg-type]
    return report.step


def plain(root: Path) -> int:
    """Save and prune, and restore through another mount."""
    from ckpt import Tier

    with CheckpointManager(Tier(str(root), keep_last=2)) as manager:
        for step in range(5):
            manager.save(state(step, 2), step, timeout=120)
    assert whole(root) == [3, 4]
    assert restored(root, 2) == 4
    return 5


def full(root: Path) -> int:
    """The server runs out of space, early or late. That save is lost. After room was made, the next
    one is not.
    """
    with CheckpointManager(root) as manager:
        manager.save(state(0, 20), 0, timeout=120)
        manager.save(state(1, 20), 1, timeout=120)
        errors = [manager.save_async(state(step, 20), step).exception(120) for step in (2, 3, 4, 5)]
        lost = [error for error in errors if error is not None]
        assert lost, "it was not full"
        print("full:", sorted({f"{type(error).__name__}: {str(error)[-40:]}" for error in lost}))
    assert restored(root, 20) == whole(root)[-1]
    return 6


def deleted_while_open(root: Path) -> int:
    """NFS keeps a file that is deleted while open under another name, which is not an object."""
    backend = open_backend(str(root))
    backend.put("folder/key", [b"x" * 100])
    with (root / "folder" / "key").open("rb") as held:
        backend.delete("folder/key")
        assert list(backend.list("")) == []
        held.read()
    return 1


def away(root: Path, seconds: float) -> tuple[int, str]:
    """Stop the server, begin a save, and start the server again."""
    with CheckpointManager(root) as manager:
        manager.save(state(0, 8), 0, timeout=120)
        subprocess.run(["rpc.nfsd", "0"], check=True)
        back = threading.Timer(
            seconds, lambda: subprocess.run(["rpc.nfsd", "-G", "10", "-L", "10", "4"], check=True)
        )
        back.start()
        began = time.monotonic()
        pending = manager.save_async(state(1, 8), 1)
        error = pending.exception(300)
        reported = (
            f"{type(error).__name__ if error else 'committed'} after "
            f"{time.monotonic() - began:.1f} s"
        )
        assert error is None or isinstance(error, CkptError)
        back.join()
        manager.save(state(2, 8), 2, timeout=300)
    assert whole(root) == ([0, 2] if error else [0, 1, 2])
    assert restored(root, 8) == 2
    return 3, reported


def main(hard: Path, soft: Path) -> None:
    torch.set_num_threads(1)
    saves = 0
    for mount in (hard, soft):
        saves += plain(mount / f"plain-{mount.name}")
        saves += deleted_while_open(mount / f"open-{mount.name}")
        print("plain and deleted while open:", mount, flush=True)
    for mount in (hard, soft):
        count, reported = away(mount / f"away-{mount.name}", 12.0)
        saves += count
        print("server away for 12 s:", mount, reported, flush=True)
    saves += full(hard / "full")
    print("ALL WELL", saves, "saves", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
