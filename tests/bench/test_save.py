"""The benchmark runs, compares what it measures, and writes what it says. Nothing here is about speed."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.contenders import ALL
from bench.measure import Spread, Step, TrainedSave
from bench.report import seconds

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    sources = [str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    done = bench("save", "--quick", "--dir", str(folder / "disk"), "--out", str(folder / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2/2" in done.stdout
    assert not list((folder / "disk").iterdir()), "the run cleans up behind itself"
    return folder / "out"


@pytest.fixture(scope="module")
def outcome(results: Path) -> Any:
    return json.loads((results / "save.json").read_text())


@pytest.mark.slow
def test_every_contender_has_the_three_numbers_and_gave_back_what_it_was_given(outcome: Any) -> None:
    assert [one["name"] for one in outcome["contenders"]] == list(ALL)
    for one in outcome["contenders"]:
        assert one["saves_compared_equal"] == 5  # the first, and two in training, two idle
        for number in ("stall_seconds", "drag_seconds", "durable_seconds"):
            assert len(one[number]["all"]) == 2
        assert one["durable_seconds"]["low"] > 0
        assert one["disk_bytes"] >= outcome["conditions"]["state_bytes"]
        assert one["peak_memory_bytes"] > outcome["conditions"]["state_bytes"]
    assert outcome["floors"]["write_seconds"]["median"] > 0
    assert outcome["floors"]["copy_seconds"]["median"] > 0


@pytest.mark.slow
def test_the_reports_are_made(results: Path) -> None:
    table = (results / "save.md").read_text()
    assert all(row.label in table for row in ALL.values())
    with open(results / "save.csv") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [*ALL, "floor.copy", "floor.write"]
    assert (results / "save.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_that_does_not_fit_into_memory_says_so_before_it_starts(tmp_path: Path) -> None:
    done = bench("save", "--size-mib", str(1 << 24), "--dir", str(tmp_path))
    assert done.returncode == 1
    assert "MiB are free" in done.stderr


def test_the_wait_at_the_fence_is_stall_and_not_drag() -> None:
    save = TrainedSave(0.5, 9.0, [1.0, 1.0, 1.2], [Step(1.25, 0.25), Step(1.5, 0.0)])
    assert save.stall_seconds == 0.75
    assert save.drag_seconds == 0.75


def test_a_spread_keeps_the_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, (3.0, 1.0, 2.0))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.000456, "0.46 ms"), (0.0456, "45.6 ms"), (-0.456, "-456 ms"), (4.561, "4.56 s"), (45.61, "45.6 s")],
)
def test_times_have_three_digits(value: float, text: str) -> None:
    assert seconds(value) == text
