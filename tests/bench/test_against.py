"""The comparison of this tree with another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.against import compared, figures, packages


def _result(cold: float, up: float, memory: int = 7) -> dict[str, Any]:
    spread = {"median": cold, "low": cold, "high": cold, "all": [cold]}
    return {
        "lines": [
            {
                "case": "1 GiB",
                "name": "ckpt.save_async",
                "numbers": {
                    "cold_seconds": spread,
                    "up_bytes_per_second": up,
                    "added_memory_bytes": memory,
                    "loads": 5,
                },
            },
            {"case": "1 GiB", "name": "floor.read", "numbers": {"cold_seconds": spread}},
        ]
    }


def test_a_ratio_above_one_means_slower_or_larger_whatever_the_unit() -> None:
    before, now = figures(_result(cold=2.0, up=10.0)), figures(_result(3.0, up=5.0, memory=21))
    rows = list(compared("restore", [before, before], [now, before]))
    assert {row.figure[2]: row.ratios for row in rows} == {
        "cold_seconds": (1.5, 1.0),
        "up_bytes_per_second": (2.0, 1.0),
        "added_memory_bytes": (3.0, 1.0),
    }


def test_a_figure_that_one_tree_lacks_is_not_compared() -> None:
    before, now = figures(_result(cold=2.0, up=10.0)), {("1 GiB", "ckpt.save_async", "x"): 1.0}
    assert not list(compared("restore", [before], [now]))


def test_a_run_takes_the_packages_of_its_tree(tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("ckpt", "backends/ckpt_backends"):
        (other / name).mkdir(parents=True)
        (other / name / "__init__.py").touch()
    found = subprocess.run(
        [sys.executable, "-c", "import ckpt, ckpt_backends as b; print(ckpt.__file__, b.__file__)"],
        cwd=(folder := packages(other, tmp_path / "packages")),
        env={"PYTHONPATH": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert found == [str(folder / name / "__init__.py") for name in ("ckpt", "ckpt_backends")]


def test_a_tree_without_the_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        packages(tmp_path / "nothing", tmp_path / "packages")
