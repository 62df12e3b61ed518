"""The examples run as a user runs them: in processes of their own, killed with SIGKILL, and
resumed.

The trainings of the demos are forks, see ``forked_demo.py``.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import processes
from tests.kit.waiting import until
from tests.kit.worlds import run_script

ROOT = Path(__file__).resolve().parents[2]
# the two source roots first, as in pytest's own pythonpath: the tests are for this checkout,
# installed or not
SOURCES = [str(ROOT), str(ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
DEMO = Path(__file__).with_name("forked_demo.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(SOURCES)}

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@contextmanager
def start(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with processes.ended(
        subprocess.Popen(command, env=ENVIRONMENT, stdout=pipe, stderr=both, text=True)
    ) as process:
        yield process


def run(script: str, *arguments: str) -> str:
    done = processes.run(
        [sys.executable, ROOT / "examples" / script, *arguments], env=ENVIRONMENT, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_quickstart_goes_on_where_it_was(tmp_path: Path) -> None:
    first = run_script(ROOT / "examples" / "quickstart.py", tmp_path)
    assert "resumed" not in first
    assert first.splitlines()[-1].startswith("step 500")
    again = run_script(ROOT / "examples" / "quickstart.py", tmp_path)
    assert again == "resumed from step 500\n"


@pytest.mark.torture
@pytest.mark.parametrize("script", ["train_digits.py", "train_accelerate.py"])
def test_digits_killed_within_an_epoch_end_with_the_same_weights(
    tmp_path: Path, script: str
) -> None:
    options = ["--epochs", "1", "--save-every", "4", "--root"]
    reference = run(script, *options, str(tmp_path / "reference"))

    root = tmp_path / "killed"
    with start(script, *options, str(root)) as process:
        while len(list(root.glob("step-*/manifest.json"))) < 2 and process.poll() is None:
            time.sleep(0.0005)
        processes.kill_all(process)
    resumed = run(script, *options, str(root))

    assert "resumed from step" in resumed
    assert "epoch 0" in resumed
    assert resumed.splitlines()[-1].startswith("accuracy")
    assert resumed.splitlines()[-1] == reference.splitlines()[-1]


@pytest.mark.torture
def test_lightning_killed_between_epochs_ends_with_the_same_weights(tmp_path: Path) -> None:
    reference = run("train_lightning.py", "--epochs", "4", "--root", str(tmp_path / "reference"))

    root = tmp_path / "killed"
    with start("train_lightning.py", "--epochs", "4", "--root", str(root)) as process:
        while not list(root.glob("step-*/manifest.json")) and process.poll() is None:
            time.sleep(0.0005)
        processes.kill_all(process)
    resumed = run("train_lightning.py", "--epochs", "4", "--root", str(root))

    assert "step   45" not in resumed
    assert resumed.splitlines()[-1].startswith("step 180  weights")
    assert resumed.splitlines()[-1] == reference.splitlines()[-1]


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.torture), "fsdp2"])
def test_gpt_killed_while_a_save_streams_loses_nothing(tmp_path: Path, mode: str) -> None:
    command = ["--json", "--folder", str(tmp_path / "demo"), "--modes", mode]
    command += ["--steps", "8", "--save-every", "2", "--width", "64"]
    output = run_script(DEMO, ROOT / "examples" / "demo.py", *command)
    (outcome,) = json.loads(output[output.index("\n[") :])
    assert outcome["saves"] == 4
    assert 4 <= outcome["resumed_step"] < 8
    assert outcome["compared"] == outcome["equal_losses"] == 8 - outcome["resumed_step"]
    if outcome["killed_uncommitted"]:
        assert outcome["resumed_step"] <= outcome["killed_step"]


@pytest.mark.torture
def test_gpt_told_to_stop_saves_that_step_and_goes_on_from_it(tmp_path: Path) -> None:
    options = [
        "--root",
        str(tmp_path / "run"),
        "--steps",
        "1000",
        "--save-every",
        "1000",
        "--print-every",
        "1",
    ]
    options += ["--layers", "1", "--width", "64"]
    with start("train_gpt.py", *options) as process:
        assert process.stdout is not None
        reported = next(line for line in process.stdout if line.startswith("step     5"))
        process.send_signal(signal.SIGTERM)
        reported += process.stdout.read()
    assert process.returncode == -signal.SIGTERM, reported
    (manifest,) = (tmp_path / "run").glob("step-*/manifest.json")
    step = int(manifest.parent.name[5:14])
    assert f"step {step:5d}  saving" in reported
    with start("train_gpt.py", *options) as process:
        assert process.stdout is not None
        resumed = process.stdout.readline()
    assert resumed.startswith(f"resumed from step {step} ")


@pytest.mark.torture
def test_one_training_is_resumed_from_memory_from_disk_and_from_s3(tmp_path: Path) -> None:
    """The memory of another job, which begins meanwhile, is not touched."""
    options = [
        "--json",
        "--folder",
        str(tmp_path / "demo"),
        "--steps",
        "96",
        "--save-every",
        "3",
        "--width",
        "64",
    ]
    other = Path(f"/dev/shm/ckpt-memory-{os.getuid()}-test-{os.getpid()}")
    begun = tmp_path / "demo" / "life-0.jsonl"
    try:
        with ThreadPoolExecutor(1) as pool:
            demo = pool.submit(run_script, DEMO, ROOT / "examples" / "demo_tiers.py", *options)
            assert until(lambda: begun.exists() or demo.done(), 140)
            other.mkdir(mode=0o700)
            output = demo.result()
        assert other.exists()
    finally:
        shutil.rmtree(other, ignore_errors=True)
    lives = json.loads(output[output.index("\n[") :])
    assert [life["resumed_from"] for life in lives] == ["", "memory", "disk", "S3"]
    assert all(life["compared"] == life["equal_losses"] > 0 for life in lives)
