"""mpirun starts the ranks: ``deploy/mpi/rank.sh`` gives them the variables of torch.distributed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.kit import mpi
from tests.launch import training
from tests.launch.training import ROOT, losses, wait_until
from tests.processes import ended
from tests.servers import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(mpi.PROGRAM is None, reason=mpi.MISSING),
]


def start(folder: Path) -> subprocess.Popen[bytes]:
    words = [*mpi.TWO_RANKS, str(ROOT / "deploy" / "mpi" / "rank.sh"), *training.command(folder)]
    env = {**os.environ, **training.ENVIRONMENT}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(words, env=env, stdout=output, stderr=output)


def test_a_job_that_mpirun_stops_saves_first_and_resumes_with_equal_losses(
    tmp_path: Path, expected: list[tuple[int, str]]
) -> None:
    with ended(start(tmp_path)) as job:
        wait_until(lambda: len(losses(tmp_path)) >= 3, tmp_path / "output")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=100) != 0
    assert 3 <= len(losses(tmp_path)) < training.STEPS
    with ended(start(tmp_path)) as job:
        assert job.wait(timeout=100) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text().count("resumed from step") == 1
    assert losses(tmp_path) == expected  # each step once: the stop has lost none
