"""Start workers as torchrun does, on this machine only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.kit.worlds import ENVIRONMENT
from tests.processes import run

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).resolve().parent / "workers"
TORCHRUN = {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""What torchrun is given beside the environment of the tests."""


def torchrun(
    ranks: int, worker: str | Path, *args: object, timeout: float = 150, options: Sequence[str] = ()
) -> str:
    """Return what the ranks printed. Fail with all of the output if a rank fails."""
    done = run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            *options,
            str(WORKERS / worker),
        ]
        + [str(arg) for arg in args],
        env=os.environ | TORCHRUN,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout
