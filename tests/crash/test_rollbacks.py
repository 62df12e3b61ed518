"""A job of four ranks is killed while it goes back. All ranks of the next job agree on the branch,
and no step mixes two of them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.crash.runs import nursery


@pytest.mark.slow
def test_a_job_that_is_killed_while_it_goes_back_leaves_one_branch(tmp_path: Path) -> None:
    assert "deaths" in nursery(tmp_path / "runs", 3, 113, script="rollbacks.py")


@pytest.mark.torture
@pytest.mark.timeout(3700)
def test_a_job_may_be_killed_at_each_call_to_a_store_while_it_goes_back(tmp_path: Path) -> None:
    printed = nursery(tmp_path / "runs", 1, 1, script="rollbacks.py", timeout=3600)
    assert int(re.findall(r"(\d+) deaths", printed)[-1]) > 100
