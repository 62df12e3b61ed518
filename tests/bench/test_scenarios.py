"""Every scenario runs through the command line, compares what it measures, and writes what it says.

No test here is about speed.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench import report, scenarios
from bench.__main__ import main
from bench.measure import Spread
from bench.result import Result
from bench.scenarios import ranks
from tests.kit.marks import torture
from tests.kit.worlds import world

ROOT = Path(__file__).resolve().parents[2]
TWO = ("torch.save", "ckpt.save_async")


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    sources = [str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs scenarios when a test first asks for their results."""

    @cache
    def run(scenario: str) -> Path:
        folder = tmp_path_factory.mktemp("bench")
        words = [scenario, "--quick", "--contenders", *TWO, "--dir", "disk", "--out", "out"]
        if scenario == "ranks":  # the memory of nodes is measured under torchrun
            with chdir(folder), pytest.MonkeyPatch.context() as patch:
                patch.setattr(ranks, "torchrun", forked)
                assert main(words) == 0
        else:
            done = bench(*words, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr
        assert not list((folder / "disk").iterdir()), "the run cleans up behind itself"
        return folder / "out"

    return run


def forked(count: int, module: str, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return what the ranks of a job say. They are forks, which need not import torch."""
    path, answers = Path(plan["folder"], "plan.json"), Path(plan["folder"], "answers")
    path.write_text(json.dumps(plan | {"answers": str(answers)}))
    world(count, ROOT / f"{module.replace('.', '/')}.py", path)
    yield from map(json.loads, answers.read_text().splitlines())


def spread(result: Result, case: str, name: str, key: str) -> Spread:
    line = result.find(case, name)
    assert line is not None, (result.scenario, case, name, result.failures)
    value = line.numbers[key]
    assert isinstance(value, Spread)
    return value


CASES: dict[str, list[tuple[str, tuple[str, ...], str, int]]] = {
    "raw": [("16 MiB", TWO, "safe_seconds", 2), ("16 MiB", TWO, "durable_over_write", 2)],
    "small": [
        ("300 tensors", TWO, "call_seconds", 2),
        ("model + optimizer, 100 parameters", TWO, "safe_seconds", 2),
    ],
    "train": [
        ("8 MiB", TWO, "stall_seconds", 2),
        ("8 MiB", TWO, "durable_seconds", 2),
        ("8 MiB", TWO, "idle_durable_seconds", 2),
    ],
    "restore": [("8 MiB", TWO, "cold_seconds", 2), ("8 MiB", TWO, "warm_bytes_per_second", 2)],
    "ranks": [("2 ranks", TWO[1:], "stall_seconds", 2), ("2 ranks", TWO[1:], "durable_seconds", 2)],
    "replicas": [("2 ranks, local disk", ("read", "broadcast"), "restore_seconds", 2)],
    "growth": [("4 MiB", TWO, "durable_seconds", 2), ("8 MiB", TWO, "durable_seconds", 2)],
    "soak": [("4 MiB", TWO[1:], "memory_bytes", 12), ("4 MiB", TWO[1:], "descriptors", 12)],
    "objects": [("rclone, 20 MiB", ("ckpt", "obstore", "s3fs.signed"), "up_bytes_per_second", 2)],
    "far": [("1 MiB", ("far.none", "far.healthy", "far.1 MB/s", "far.down"), "near_seconds", 2)],
    "codec": [
        ("weights, bf16", ("ckpt.zstd.1", "zstd1"), "encode_bytes_per_second", 2),
        ("second moments, fp32", ("ckpt.zstd.1",), "decode_cpu_seconds", 2),
    ],
    "scale": [],
    "every": [
        ("4 MiB", TWO[1:], "clean_step_seconds", 4),
        ("4 MiB", TWO[1:], "saving_step_seconds", 4),
    ],
}


def check(folder: Path, scenario: str) -> None:
    result = report.read(str(folder))[scenario]
    for case, names, key, count in CASES[scenario]:
        for name in names:
            values = spread(result, case, name, key)
            assert len(values.all) == count
            assert values.low > 0
    assert result.failures == []
    assert (folder / f"{scenario}.png").read_bytes().startswith(b"\x89PNG")
    table = (folder / f"{scenario}.md").read_text()
    assert all(line.label in table for line in result.lines)
    with open(folder / f"{scenario}.csv") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [line.name for line in result.lines]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("scenario", ["train", *torture("ranks", "restore")])
def test_a_scenario_measures_what_was_asked_for_and_reports_it(
    results: Callable[[str], Path], scenario: str
) -> None:
    check(results(scenario), scenario)


@pytest.mark.slow
@pytest.mark.distributed
def test_every_save_in_training_was_compared(results: Callable[[str], Path]) -> None:
    result = report.read(str(results("train")))["train"]
    for name in TWO:
        line = result.find("8 MiB", name)
        assert line is not None
        # the first, two in training, the last idle
        assert line.numbers["saves_compared_equal"] == 4


def test_each_scenario_is_run_by_these_tests() -> None:
    assert CASES.keys() == scenarios.ALL.keys() - scenarios.ALONE


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", CASES)
def test_all_scenarios_run_one_after_the_other(
    results: Callable[[str], Path], scenario: str
) -> None:
    check(results("all"), scenario)


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_all_that_a_far_tier_in_trouble_got_was_restored_from_there(
    results: Callable[[str], Path],
) -> None:
    result = report.read(str(results("all")))["far"]
    numbers = {line.name: line.numbers for line in result.lines}
    assert {numbers[name]["restored"] for name in ("far.healthy", "far.1 MB/s", "far.down")} == {3}
    assert numbers["far.down"]["waiting"] == 2


@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_the_page_has_the_main_table_and_names_the_disk_that_was_measured(
    results: Callable[[str], Path],
) -> None:
    folder = results("all")
    page = (folder / "README.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| **ckpt save_async** |")]
    assert len(rows) == 1
    assert "GB/s" in rows[0]
    df = subprocess.run(
        ["df", "--output=source", str(folder)], capture_output=True, text=True, check=True
    )
    assert df.stdout.split()[-1] in page
    assert all(f"[{name}]({name}.md)" in page for name in CASES)


@pytest.mark.slow
def test_what_does_not_fit_into_memory_is_left_out_and_said(tmp_path: Path) -> None:
    size = ["--size-mib", str(1 << 24)]
    places = ["--dir", str(tmp_path / "disk"), "--out", str(tmp_path)]
    assert main(["raw", *size, "--contenders", *TWO, *places]) == 0
    assert "MiB are free for it" in (tmp_path / "raw.md").read_text()
    assert not (tmp_path / "raw.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", *torture("memory")])
def test_a_save_every_step_goes_where_it_is_told_and_leaves_what_lay_there(
    tmp_path: Path, kind: str
) -> None:
    kept = tmp_path / "root" / "step-000000001.mine"
    kept.mkdir(parents=True)
    name = f"test-{os.getpid()}"
    root = f"shm://{name}" if kind == "memory" else str(tmp_path / "root")
    words = ["--quick", "--contenders", "ckpt.save_async", "--root", root]
    places = ["--dir", str(tmp_path / "disk"), "--out", str(tmp_path / "out")]
    assert main(["every", *words, *places]) == 0
    assert root in (tmp_path / "out" / "every.md").read_text()
    assert list((tmp_path / "root").iterdir()) == [kept]
    assert not list(Path("/dev/shm").glob(f"*{name}*"))
