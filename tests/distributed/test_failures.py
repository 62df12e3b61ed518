"""One rank of two does something wrong. Nobody hangs, all are told the name of what is wrong and of whom, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import torchrun


@pytest.mark.distributed
def test_what_one_rank_does_wrong_all_are_told(tmp_path: Path) -> None:
    assert "ALL WELL" in torchrun(2, "failures.py", tmp_path)
