"""A training whose memory cgroup allows little more than its own memory is never killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.memory_cgroup import memory_cgroup
from tests.kit.worlds import ENVIRONMENT

SCRIPT = Path(__file__).with_name("in_a_cgroup.py")


def run(folder: Path, sight: str) -> subprocess.CompletedProcess[str]:
    """Run the training in a cgroup of its own, and check that the kernel kills it if, and only if,
    ckpt is blind.
    """
    with memory_cgroup() as cgroup:
        if cgroup is None:
            pytest.skip("this process may not create memory cgroups")
        job = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder), str(cgroup.folder), sight],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert (cgroup.kill_count > 0) is (sight == "blind"), job
    return job


@pytest.mark.torture
def test_a_cgroup_of_one_and_four_tenths_of_the_training_kills_nothing(tmp_path: Path) -> None:
    """The optimizer's step comes at once, so that each save wants memory for the whole image."""
    job = run(tmp_path, "")
    assert job.returncode == 0, job.stdout + job.stderr
    own, state, images = map(int, re.findall(r"(\d+) MiB", job.stdout))
    assert state > 0.4 * own  # more than the cgroup has left
    assert 128 <= images < 0.4 * own


@pytest.mark.torture
def test_a_budget_that_does_not_see_the_cgroup_is_killed(tmp_path: Path) -> None:
    assert run(tmp_path, "blind").returncode == -signal.SIGKILL
