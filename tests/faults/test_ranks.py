"""Ranks die and stall at random, again and again.

No rank hangs beyond the stated bounds, no checkpoint is torn, and each time the job resumes with
the right values.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import Count
from tests.kit.worlds import ENVIRONMENT, ROOT
from tests.processes import run

TIMES = 50
SCRIPT = ROOT / "tests" / "distributed" / "tormentor.py"


@pytest.mark.torture
@pytest.mark.distributed
@pytest.mark.timeout(2400)
def test_four_ranks_that_are_killed_and_stopped_at_random_moments_resume_each_time(
    tmp_path: Path, tally: Count
) -> None:
    done = run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path / "job"), str(TIMES), "1"],
        env=os.environ | ENVIRONMENT,
        timeout=2300,
    )
    assert "ALL WELL" in done.stdout, done.stdout[-6000:]
    tally("ranks", TIMES)
