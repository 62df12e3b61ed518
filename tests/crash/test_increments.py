"""A job whose files refer to older steps is killed at any call to the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.runs import nursery
from tests.kit.marks import torture


@pytest.mark.parametrize(("begin", "stride"), [(1, 79), *torture(*((n, 5) for n in range(1, 6)))])
def test_each_listed_step_is_what_was_saved(tmp_path: Path, begin: int, stride: int) -> None:
    assert "deaths" in nursery(tmp_path, begin, stride, script="increments.py")


@pytest.mark.parametrize(("begin", "stride"), [(9, 101), *torture(*((n, 5) for n in range(1, 6)))])
def test_each_listed_step_is_what_was_saved_over_an_adopted_base(
    tmp_path: Path, begin: int, stride: int
) -> None:
    assert "deaths" in nursery(tmp_path, begin, stride, script="adopted_base.py")


@pytest.mark.parametrize(("begin", "stride"), [(5, 97), *torture(*((n, 5) for n in range(1, 6)))])
def test_each_listed_step_is_what_was_saved_with_a_base_in_another_root(
    tmp_path: Path, begin: int, stride: int
) -> None:
    assert "deaths" in nursery(tmp_path, begin, stride, script="other_root.py")
