"""The examples without torch.distributed: killed with SIGKILL, resumed, and compared.

The comparison is loss by loss with an uninterrupted run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.kit import mpi
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONPATH": os.pathsep.join(SOURCES),
}
STEPS, EVERY = 120, 10
MPI_SEGMENTS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory")
"""Open MPI 5, and 4, leave their segments there if they are killed. The default is /dev/shm."""

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

Command = tuple[Sequence[str], dict[str, str]]


def needs(*packages: str, program: str = "python3") -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    missing += [] if shutil.which(program) else [program]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def commands(script: str, root: Path) -> list[Command]:
    """Return the processes of one run."""
    words = [sys.executable, str(ROOT / "examples" / script), "--root", str(root)]
    words += ["--steps", str(STEPS), "--save-every", str(EVERY)]
    if script == "train_mpi.py":
        return [([*mpi.TWO_RANKS, *words], dict.fromkeys(MPI_SEGMENTS, str(root.parent)))]
    return [(words, {})]


def workers(root: Path) -> list[Command]:
    """Return the two workers of a MultiWorkerMirroredStrategy."""
    ((words, _),) = commands("train_tensorflow.py", root)
    address = f"127.0.0.1:{free_port()}"
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(2)]}
    return [
        (
            [*words, "--address", address],
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})},
        )
        for i in range(2)
    ]


def run(
    started: Sequence[Command], log: Path, *, kill_after: Path | None = None
) -> tuple[dict[int, str], str]:
    """Return step -> loss as printed, and all that was printed.

    ``kill_after`` is the root whose second checkpoint ends the run by SIGKILL.
    """
    with ExitStack() as stack:
        output = stack.enter_context(log.open("wb"))
        jobs: list[subprocess.Popen[Any]] = [
            stack.enter_context(
                processes.ended(
                    subprocess.Popen(
                        words, env={**ENVIRONMENT, **extra}, stdout=output, stderr=output
                    )
                )
            )
            for words, extra in started
        ]
        if kill_after is not None:
            while len(list(kill_after.glob("step-*/manifest.json"))) < 2:
                assert all(job.poll() is None for job in jobs), log.read_text()[-4000:]
                time.sleep(0.001)
            for job in jobs:
                processes.kill_all(job)
        else:
            codes = [job.wait(timeout=280) for job in jobs]
            assert codes == [0] * len(jobs), log.read_text()[-4000:]
    said = log.read_text()
    return {
        int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)\n", said, re.M)
    }, said


def check(folder: Path, one: Sequence[Command], two: Sequence[Command], again: Any) -> None:
    expected, _ = run(one, folder / "reference.log")
    assert sorted(expected) == list(range(1, STEPS + 1))
    before, _ = run(two, folder / "killed.log", kill_after=folder / "killed")
    after, said = run(again, folder / "resumed.log")
    (resumed,) = re.findall(r"^resumed from step (\d+)$", said, re.M)
    assert 2 * EVERY <= int(resumed) < STEPS
    assert sorted(after) == list(range(int(resumed) + 1, STEPS + 1))
    for part in (before, after):
        assert part == {step: expected[step] for step in part}


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("train_mpi.py", marks=needs("mpi4py", program=mpi.TWO_RANKS[0])),
        pytest.param("train_jax.py", marks=needs("jax")),
        pytest.param("train_tensorflow.py", marks=needs("tensorflow")),
    ],
)
def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path, script: str) -> None:
    killed = commands(script, tmp_path / "killed")
    check(tmp_path, commands(script, tmp_path / "reference"), killed, killed)


@needs("tensorflow")
def test_killed_workers_of_a_strategy_resume_with_equal_losses(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    check(tmp_path, workers(tmp_path / "reference"), workers(killed), workers(killed))


@needs("horovod", program="horovodrun")
def test_ranks_of_horovod_continue_where_they_were(tmp_path: Path) -> None:
    worker = ROOT / "tests" / "integrations" / "workers" / "horovod_ranks.py"
    words = [
        "horovodrun",
        "--gloo",
        "-np",
        "2",
        sys.executable,
        str(worker),
        str(tmp_path / "root"),
    ]
    said = [run([(words, {})], tmp_path / f"{number}.log")[1] for number in range(2)]
    for number, total in enumerate((2.0 * (1 + 2 + 3), 2.0 * (1 + 2 + 3 + 4 + 5 + 6))):
        for rank in range(2):
            assert f"rank {rank} of 2: {[total] * 4}" in said[number]
