"""Jobs whose configuration changes from one to the next leave and find what the documentation
promises, whatever happens in between.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.worlds import run_script

_SCRIPT = Path(__file__).with_name("run.py")


def run(*words: object, timeout: float) -> str:
    return run_script(_SCRIPT, *words, timeout=timeout)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_jobs_in_random_sequences_leave_what_is_promised(tmp_path: Path) -> None:
    assert "ALL WELL" in run(tmp_path, 1, 1, 6, timeout=280)


@pytest.mark.torture  # It takes minutes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", ["keep too few", "forget farther tiers"])
def test_the_sequences_notice_a_retention_that_keeps_too_little(
    tmp_path: Path, mutant: str
) -> None:
    assert "NOTICED" in run(tmp_path, 1, 20, 10, mutant, timeout=280)


@pytest.mark.torture
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(1000, 6000, 1000))
def test_jobs_in_hundreds_of_random_sequences_leave_what_is_promised(
    tmp_path: Path, first: int
) -> None:
    assert "ALL WELL" in run(tmp_path, first, 100, 12, timeout=7000)
