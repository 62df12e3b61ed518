"""Nodes with namespaces of their own are removed, one after the other.

Their processes, agents and memory end with them. The next job goes on from the newest step that had
its copies on other nodes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.faults.conftest import Count, tally
from tests.kit.machines import ALONE, skip_unless_there_may_be_machines
from tests.kit.worlds import ENVIRONMENT
from tests.processes import run

__all__ = ["tally"]

pytestmark = pytest.mark.distributed


def removals(root: Path, nodes: int, each: int, times: int, seed: int, timeout: float) -> None:
    skip_unless_there_may_be_machines()
    script = Path(__file__).with_name("removed_nodes.py")
    words = [*ALONE, sys.executable, script, root, nodes, each, times, seed]
    done = run(words, env=os.environ | ENVIRONMENT, timeout=timeout)
    assert done.returncode == 0, done.stdout[-8000:]
    assert "ALL WELL" in done.stdout


@pytest.mark.torture  # tests/distributed/test_replicas.py removes the memory of nodes
def test_a_job_goes_on_in_memory_when_nodes_are_removed(tmp_path: Path, tally: Count) -> None:
    removals(tmp_path / "run", 3, 1, 2, 1, timeout=200)
    tally("nodes-removed", 2)


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("each", "seed"), [(1, 2), (2, 3)])
def test_a_job_goes_on_in_memory_whichever_of_four_nodes_is_removed(
    tmp_path: Path, tally: Count, each: int, seed: int
) -> None:
    removals(tmp_path / "run", 4, each, 30, seed, timeout=1700)
    tally("nodes-removed", 30)
