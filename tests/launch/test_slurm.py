"""``deploy/slurm/train.sbatch`` under a real Slurm is stopped, requeued, cancelled, and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch import slurm, training
from tests.launch.training import ROOT, losses, wait_until
from tests.servers import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(
        bool(slurm.missing()),
        reason=f"Slurm is not installed: {', '.join(slurm.missing())} (apt install slurm-wlm)",
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    with slurm.started(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def submit(cluster: slurm.Cluster, folder: Path) -> str:
    options = ["--parsable", f"--output={folder}/output", "--time=10"]
    script = ROOT / "deploy" / "slurm" / "train.sbatch"
    env = training.ENVIRONMENT | {"MASTER_PORT": str(free_port())}
    return cluster.call("sbatch", *options, script, *training.command(folder), **env)


def wait_for_steps(folder: Path, steps: int = 3) -> None:
    """Wait until the job has trained more steps."""
    begun = len(losses(folder))
    wait_until(lambda: len(losses(folder)) >= begun + steps, folder / "output")


def state(cluster: slurm.Cluster, job: str) -> str:
    return cluster.facts(job)["JobState"]


def test_a_job_near_its_time_limit_requeues_itself_and_resumes_with_equal_losses(
    cluster: slurm.Cluster, tmp_path: Path, expected: list[tuple[int, str]]
) -> None:
    job = submit(cluster, tmp_path)
    wait_for_steps(tmp_path)
    # Slurm sends the same signal to the same processes when the time limit is near.
    cluster.call("scancel", "--signal=USR1", job)
    wait_until(lambda: state(cluster, job) == "COMPLETED", tmp_path / "output")

    output = (tmp_path / "output").read_text()
    assert "status 138, requeueing" in output
    assert output.count("resumed from step") == 1
    assert cluster.facts(job)["Restarts"] == "1"
    assert losses(tmp_path) == expected  # each step once: the stop has lost none


def test_a_job_that_slurm_requeues_or_cancels_saves_first_and_resumes_with_equal_losses(
    cluster: slurm.Cluster, tmp_path: Path, expected: list[tuple[int, str]]
) -> None:
    job = submit(cluster, tmp_path)
    wait_for_steps(tmp_path)
    cluster.call("scontrol", "requeue", job)
    wait_for_steps(tmp_path)
    assert cluster.facts(job)["Restarts"] == "1"
    cluster.call("scancel", job)
    wait_until(lambda: state(cluster, job) == "CANCELLED", tmp_path / "output")
    assert 3 <= len(losses(tmp_path)) < training.STEPS

    again = submit(cluster, tmp_path)
    wait_until(lambda: state(cluster, again) == "COMPLETED", tmp_path / "output")
    assert cluster.facts(job)["Restarts"] == "1"  # a cancelled job does not requeue itself
    assert losses(tmp_path) == expected
