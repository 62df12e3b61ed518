"""A load that fails on one rank is an error on all ranks, and no rank waits for another one."""

from pathlib import Path

import pytest

from tests.kit.worlds import world

WORKER = Path(__file__).parents[1] / "workers" / "load_failures.py"

pytestmark = pytest.mark.distributed


def test_a_rank_that_fails_in_code_of_deepspeed_ends_the_load_of_all() -> None:
    said = world(2, WORKER, "early", "between", "late", "no latest", "good", timeout=120)
    assert said.splitlines() == [
        "early: ValueError RestoreError",
        "between: ValueError RestoreError",
        "late: ValueError RestoreError",
        "no latest: RestoreError RestoreError",
        "good: nothing nothing",
    ]
