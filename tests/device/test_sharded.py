"""FSDP2 over the accelerator's own collectives, with as many ranks as there are devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = [pytest.mark.device, pytest.mark.distributed]
ROOT = Path(__file__).resolve().parents[2]


def test_fsdp2_is_saved_beside_a_step_and_restored(place: torch.device, tmp_path: Path) -> None:
    backend = dist.get_default_backend_for_device(place)
    if not dist.is_backend_available(backend):
        pytest.skip(f"there is no backend {backend}")
    try:
        torch.ones(1, device=place).untyped_storage().resize_(0)
    except NotImplementedError:
        pytest.skip("FSDP2 resizes storages, which this accelerator cannot")
    ranks = torch.accelerator.device_count()
    sources = [str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(ROOT / "tests/device/fsdp2_rank.py"),
            str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("restored") == ranks
