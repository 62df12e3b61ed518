"""The events that are added to those of ckpt-chaos are counted, and its results are read right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos import page
from tests.chaos.events import KILLED
from tests.chaos.page import Kill, Row
from tests.kit.worlds import ROOT


def child(folder: Path, turn: int) -> int:
    """Let a process die at the n-th event, and return its status."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    words = [sys.executable, "-m", "tests.chaos.deaths", str(folder), str(turn)]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(words, cwd=ROOT, env=env, check=False).returncode


def test_calls_on_descriptors_and_of_the_c_library_are_counted(tmp_path: Path) -> None:
    (folder := tmp_path / "out").mkdir()
    assert child(folder, 0) == 0
    assert (folder / "c").read_bytes() == b"01234567"


@pytest.mark.parametrize(("turn", "content"), [(1, b"01"), (2, b"012345"), (6, b"01234567")])
def test_a_process_dies_at_its_event_and_half_of_a_write_is_there(
    tmp_path: Path, turn: int, content: bytes
) -> None:
    (folder := tmp_path / "out").mkdir()
    assert child(folder, turn) == KILLED
    assert (folder / "a").read_bytes() == content
    assert not (folder / "c").exists()


def outcome(**words: Any) -> dict[str, Any]:
    return {"raised": None, "resumed_from_step": 100, "weights_diff": 0.0, **words}


def test_a_resume_from_an_older_step_than_told_is_no_right_one(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.write_text("begin\n0\n100\nbegin\n200\n")
    assert page.told_before(path) == 100
    assert page.verdict(outcome(), 100) == page.RIGHT
    assert page.verdict(outcome(), 0) == page.RIGHT
    assert page.verdict(outcome(resumed_from_step=None), 100) == page.OLDER
    assert page.verdict(outcome(weights_diff=1.0), 200) == page.OTHER
    assert page.verdict(outcome(raised="ExitCode1", weights_diff=None), 0) == page.RAISED


def row(name: str, *verdicts: str) -> Row:
    kills = [Kill("os.pwrite", "#1", verdict, 0, 0, "") for verdict in verdicts]
    return Row(name, "2026-01-01", {"torch": "2.13.0"}, {"os.pwrite": 3, "open": 4}, kills, 1)


def test_the_page_counts_the_kills_and_losses_of_ckpt_end_it_with_an_error() -> None:
    rows = [row("quickstart", page.RIGHT, page.OLDER), row("dcp", page.RIGHT, page.RAISED)]
    text = page.table(rows)
    lines, words = text.splitlines(), text.replace("\n", " ")
    assert "| the loop of the quickstart | ckpt | 7 | 2 | 1 | 1 | 0 | 0 |" in lines
    assert any(line.endswith("| 7 | 2 | 1 | 0 | 0 | 1 |") for line in lines)
    assert "The trainings with ckpt died 2 times: 2 at `os.pwrite`." in words
    assert "2 more runs ended" in words
    assert page.losses(rows) == [rows[0].kills[1]]


def dead(folder: Path, states: str, **words: Any) -> Kill:
    folder.mkdir()
    (folder / "seen").write_text(states)
    (folder / "events.log.rank0").write_text("1\topen\tx\t1\n2\tos.rename\tx\t0\n")
    point = {"outcome": outcome(**words), "point": [2, "before"], "resume_tail": ""}
    return page._death_of_folder(point, folder)


def test_a_folder_has_the_state_after_the_kill_and_the_next_run_makes_the_new_one(
    tmp_path: Path,
) -> None:
    kills = [
        dead(tmp_path / "a", "nothing\nolder\n"),
        dead(tmp_path / "b", "nothing\nhalf\n"),
        dead(tmp_path / "c", "nothing\nnew\n", weights_diff=1.0),
        dead(tmp_path / "d", "nothing\nnothing\n", raised="ExitCode1", weights_diff=None),
    ]
    assert {kill.event for kill in kills} == {"os.rename"}
    own, other = row("hf-export"), row("hf-own")
    rows = [msgspec.structs.replace(made, kills=kills) for made in (own, other)]
    lines = page.table_of_folders(rows).splitlines()
    assert "| `ckpt export` with `--format hf` | nothing | 7 | 4 | 1 | 1 | 1 | 1 | 2 |" in lines
    assert page.losses(rows) == kills[1:]


def test_the_table_of_the_docs_is_of_the_pinned_version() -> None:
    (pin,) = [line for line in page.PINS.read_text().split() if line.startswith("ckpt-chaos==")]
    assert pin.replace("==", " ") in page.reported().replace("\n", " ")
    for _, _, _, words in page.JOBS.values():
        assert f"| {words} |" in page.reported()
