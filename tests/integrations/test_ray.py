"""Ray Train with the saves of ckpt, on a real local cluster."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.train", reason="Ray Train is not installed")

import ray.train
from pyarrow import fs

from ckpt.errors import ConfigError, OutOfSpace, RestoreError, SaveSkipped, TierBehind
from ckpt.integrations import ray as door
from ckpt.integrations.ray import RayCheckpoints, run_root
from ckpt.pending import SaveRecord
from tests import processes

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).parent / "workers"
BOUND = 560  # Ray starts a dozen processes for each run

pytestmark = pytest.mark.timeout(BOUND + 40)


def run(script: Path, *arguments: object, timeout: float) -> str:
    """Run a driver of Ray with a cluster of its own, and return its output."""
    done = processes.run(
        [sys.executable, script, *arguments],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        },
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


# -- real runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the runs of ``rayed.py`` have left their files."""
    made = tmp_path_factory.mktemp("ray")
    run(WORKERS / "rayed.py", made, timeout=BOUND)
    return made


def losses(folder: Path, name: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder / f"{name}.json").read_text())["losses"]
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_a_worker_that_is_killed_in_mid_save_costs_no_bit(folder: Path) -> None:
    for rank in range(2):
        whole = losses(folder, f"whole-{rank}-0")
        assert len(whole) == 8
        resumed = losses(folder, f"killed-{rank}-4")
        assert resumed == {step: loss for step, loss in whole.items() if int(step) > 4}
        assert not (folder / f"killed-{rank}-0.json").exists()
        assert json.loads((folder / f"killed-{rank}-4.json").read_text())["reported"]
    root = folder / "storage" / "killed" / "ckpt"
    (before,), (after,) = (root.glob(f"step-{step:09d}.*") for step in (4, 6))
    # the killed attempt had not committed the step, so it was removed
    assert before.suffix != after.suffix


@pytest.mark.slow
@pytest.mark.distributed
def test_ray_knows_durable_steps_with_their_own_metrics(folder: Path) -> None:
    for name, kept in json.loads((folder / "results.json").read_text()).items():
        root = str(folder / "storage" / name / "ckpt")
        assert kept == [[step, {"root": root, "step": step}] for step in (6, 8)]


@pytest.mark.slow
@pytest.mark.distributed
def test_ray_goes_on_after_steps_that_the_second_worker_has_skipped(tmp_path: Path) -> None:
    run(WORKERS / "rayed.py", tmp_path, "skipped", timeout=BOUND)
    root = str(tmp_path / "storage" / "skipped" / "ckpt")
    kept = [[step, {"root": root, "step": step}] for step in (6, 7)]  # Step 8 was skipped
    assert json.loads((tmp_path / "results.json").read_text()) == {"skipped": kept}


@pytest.mark.slow
@pytest.mark.distributed
def test_another_run_begins_with_a_reported_checkpoint(folder: Path) -> None:
    whole = losses(folder, "whole-0-0")
    assert losses(folder, "other-0-6") == {"7": whole["7"], "8": whole["8"]}


@pytest.mark.slow
@pytest.mark.distributed
def test_an_announced_preemption_costs_no_step(tmp_path: Path) -> None:
    run(WORKERS / "drained.py", tmp_path, timeout=BOUND)
    stopped, resumed = [], []
    for rank in range(2):
        first = json.loads((tmp_path / f"{rank}-0.json").read_text())
        assert first["stops"]
        second = json.loads((tmp_path / f"{rank}-{first['step']}.json").read_text())
        assert second["node"] != first["node"]
        assert second["step"] == first["step"] + 2
        stopped.append(first["step"])
        resumed.append(second["begin"])
    assert stopped == resumed
    assert len({*stopped}) == 1


@pytest.mark.slow
@pytest.mark.distributed
def test_the_lines_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "integrations" / "ray.md").read_text()
    (lines,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(lines.replace("/tmp/ray_results", str(tmp_path)))
    assert "'step': 100" in run(script, timeout=BOUND)
    reference = tmp_path.glob("digits/checkpoint_*/ckpt.json")
    assert max(json.loads(each.read_text())["step"] for each in reference) == 100


# -- references ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "error", "said"),
    [
        (None, ConfigError, "has no ckpt.json: it is a checkpoint that RayCheckpoints has not"),
        ("{", RestoreError, "ckpt.json is damaged"),
        ('{"root": "runs"}', RestoreError, "ckpt.json is damaged"),
        ('["runs", 7]', RestoreError, "ckpt.json is damaged"),
    ],
)
def test_a_checkpoint_that_is_no_reference_is_refused(
    tmp_path: Path, written: str | None, error: type[Exception], said: str
) -> None:
    if written is not None:
        (tmp_path / "ckpt.json").write_text(written)
    with pytest.raises(error, match=said):
        door._read_reference(ray.train.Checkpoint(str(tmp_path), fs.LocalFileSystem()))


@pytest.mark.parametrize(
    ("store", "root"),
    [
        (fs.LocalFileSystem(), "/runs/digits/ckpt"),
        (fs.S3FileSystem(region="eu-central-1", anonymous=True), "s3://bucket/digits/ckpt"),
        (fs._MockFileSystem(), None),
    ],
    ids=["local", "s3", "other"],
)
def test_the_root_is_in_the_run(
    store: Any, root: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "bucket/digits" if store.type_name == "s3" else "/runs/digits"
    storage = SimpleNamespace(storage_filesystem=store, experiment_fs_path=place)
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    if root is not None:
        assert run_root() == root
        return
    with pytest.raises(ConfigError, match=r"of the kind 'mock'.*RayCheckpoints\(tiers\)"):
        run_root()


def test_saves_that_may_fail_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Ray ends a run whose reported checkpoint fails"):
        RayCheckpoints(tmp_path, on_error="warn")
    assert not list(tmp_path.iterdir())


def test_a_reported_root_is_followed_only_if_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RayCheckpoints(tmp_path / "other") as other:
        other.manager.save({"step": 7}, 7)
    reference = {"root": other.root, "step": 7}
    (tmp_path / "ckpt.json").write_text(json.dumps(reference))
    reported = ray.train.Checkpoint(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: reported)
    with RayCheckpoints(tmp_path / "run") as checkpoints:
        state = {"step": 0}
        with pytest.raises(ConfigError, match=f"(?s){other.root}.*{checkpoints.root}"):
            checkpoints.restore(state)
        assert state == {"step": 0}
        checkpoints.restore(state, reported)
        assert state == {"step": 7}


def test_a_reference_is_read_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "ckpt.json").write_text('{"root": "runs", ' + " " * (64 << 10) + '"step": 7}')
    with pytest.raises(RestoreError, match="is damaged"):
        door._read_reference(ray.train.Checkpoint(str(tmp_path), fs.LocalFileSystem()))


def test_a_step_that_a_farther_tier_has_given_up_is_reported(tmp_path: Path) -> None:
    """A nearer tier has the step. Other errors end the run."""
    run = SimpleNamespace(path=str(tmp_path), filesystem=fs.LocalFileSystem())
    pending = SaveRecord(7, 0, None, began=0.0)
    pending.finish(TierBehind(7), is_reported=True)
    found = door._refer_when_durable(pending, "s3://bucket/run", run, "checkpoint_1")
    assert door._read_reference(found) == ("s3://bucket/run", 7)
    pending.finish(OutOfSpace("rank-00000.safetensors"))
    with pytest.raises(OutOfSpace):
        door._refer_when_durable(pending, "s3://bucket/run", run, "checkpoint_2")


def test_ray_gets_no_checkpoint_of_a_step_that_another_worker_has_skipped(tmp_path: Path) -> None:
    run = SimpleNamespace(path=str(tmp_path), filesystem=fs.LocalFileSystem())
    pending = SaveRecord(7, 0, None, began=0.0)
    pending.finish(SaveSkipped(7, "rank 1: no slot was free"))
    found = door._refer_when_durable(pending, "s3://bucket/run", run, "checkpoint_1")
    assert isinstance(found, ray.train.Checkpoint)
    assert not found
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(found)) is None
    assert not list(tmp_path.iterdir())
