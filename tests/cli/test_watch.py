"""Tests of `ckpt watch`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.cli import step_command
from ckpt.storage.registry import open_backend
from tests.checkpoints import write_checkpoint
from tests.cli.conftest import ARRAYS, Cli

CHILD = "sh -c 'trap \"sleep 0.3; echo ended; exit\" TERM; echo began; sleep 1000 & wait'; true"
"""A shell whose child takes a moment to end."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for step in (1, 2):
        write_checkpoint(open_backend(str(tmp_path / "runs")), step=step, arrays=ARRAYS)
    return tmp_path / "runs"


def test_a_command_runs_once_for_each_step(cli: Cli, runs: Path, tmp_path: Path) -> None:
    log = tmp_path / "my log"
    command = f"echo {{step}} {{path}} $CKPT_STEP $CKPT_ROOT >> '{log}'"
    assert cli("watch", "--once", "--exec", command).code == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [line[0] for line in lines] == ["1", "2"]
    assert all(Path(line[1], "manifest.json").exists() for line in lines)
    assert lines[0][2:] == ["1", str(runs)]
    assert cli("watch", "--once", "--exec", command).out == ""
    assert len(log.read_text().splitlines()) == 2


def test_a_command_that_fails_is_tried_again_by_the_next_watcher(cli: Cli, runs: Path) -> None:
    ran = cli("watch", "--once", "--exec", "test {step} != 1")
    assert ran.code == 1
    assert "step 1: the command ended with exit code 1" in ran.err
    assert "the command failed for 1 step\n" in ran.err
    ran = cli("watch", "--once")
    assert ran.code == 0
    assert ran.out.startswith("step 1 ")
    assert "step 2" not in ran.out


@pytest.mark.parametrize("command", ["", "  "])
def test_an_empty_command_handles_no_step(cli: Cli, runs: Path, command: str) -> None:
    """A shell variable that is not set gives an empty one."""
    ran = cli("watch", "--once", "--exec", command)
    assert ran.code == 2
    assert "--exec is empty" in ran.err
    assert cli("watch", "--once").out.startswith("step 1 ")


def test_a_folder_that_does_not_exist_is_no_silent_wait(cli: Cli, tmp_path: Path) -> None:
    ran = cli("watch", "nowhere", "--once")
    assert ran.code == 7
    assert "this folder does not exist: check the path" in ran.err
    words = [sys.executable, "-m", "ckpt.cli.main", "watch", "later", "--poll", "0.2s"]
    with subprocess.Popen(
        words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as watching:
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert "later does not exist" in watching.stderr.readline()
        write_checkpoint(open_backend("later"), step=5, arrays=ARRAYS)
        assert watching.stdout.readline().startswith("step 5")
        watching.terminate()


def test_json_has_one_line_for_each_step(cli: Cli, runs: Path) -> None:
    lines = [json.loads(line) for line in cli("watch", "--once", "--json").out.splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["exit_code"] for line in lines] == [0, 0]


def test_a_path_is_one_word_of_the_command(cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "a b'; touch owned; echo {step}"
    write_checkpoint(open_backend(str(root)), step=7, arrays=ARRAYS)
    ran = cli("watch", str(root), "--once", "--exec", "test -f {path}/manifest.json")
    assert ran.code == 0, ran.err
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("--name", "a/b"), 2, "letters, digits"),
        (("--poll", "never"), 2, "--poll never"),
    ],
)
def test_bad_input_is_one_clear_error(
    cli: Cli, runs: Path, args: tuple[str, ...], code: int, text: str
) -> None:
    ran = cli("watch", "--once", *args)
    assert (ran.code, text in ran.err) == (code, True), ran.err
    assert not (runs / "watchers").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("command", ["echo began; exec sleep 1000", CHILD])
def test_a_signal_ends_the_command_and_the_pin(runs: Path, number: int, command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt.cli.main", "watch", str(runs), "--exec", command],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout
    assert process.stdout.readline() == b"began\n"
    assert len(list((runs / "pins").iterdir())) == 1
    os.kill(process.pid, number)
    assert process.wait() == (143 if number == signal.SIGTERM else 130)
    assert list(runs.glob("pins/*")) == []
    os.set_blocking(process.stdout.fileno(), False)
    with process.stdout as reported:
        assert reported.read() == (
            b"ended\n" if command == CHILD else b""
        )  # all processes have ended
    assert not (runs / "watchers").exists()


def test_a_command_that_ignores_a_signal_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_command, "_END_SECONDS", 0.0)
    command = ["sh", "-c", "trap '' TERM; echo began; sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout
        assert process.stdout.readline() == b"began\n"
        process.terminate()
        step_command._end_group(process)
        assert process.wait() == -signal.SIGKILL


def test_an_error_in_a_loop_ends_the_program(runs: Path) -> None:
    program = f"import ckpt\nfor step in ckpt.watch({str(runs)!r}): raise KeyError(step.step)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1] == "KeyError: 1"


def test_a_killed_watcher_handles_its_step_again(cli: Cli, runs: Path) -> None:
    command = "if test {step} = 2; then echo at 2; exec sleep 1000; fi"
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt.cli.main", "watch", str(runs), "--exec", command],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout
    assert any(b"at 2" in line for line in iter(process.stdout.readline, b""))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    ran = cli("watch", "--once")
    assert [line.split()[1] for line in ran.out.splitlines()] == ["2"]
