"""A root whose folder has the setgid bit is shared with its group."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager
from ckpt.cli.main import main
from tests.users import act_as, fresh_user, only_root

MEMBER = fresh_user()
"""A user, whose group has the same number."""
SHARED = {("folder", MEMBER, 0o2770), ("file", MEMBER, 0o660)}


@pytest.fixture
def root() -> Iterator[Path]:
    """The folder of a group, in a place that every user may enter."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        folder = Path(place, "run")
        folder.mkdir()
        os.chown(folder, -1, MEMBER)
        folder.chmod(0o2770)
        yield folder


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def state(step: int) -> dict[str, Any]:
    return {"x": torch.arange(1000) + step}


def save(root: Path, *steps: int) -> None:
    with CheckpointManager(root) as manager:
        for step in steps:
            manager.save(state(step), step)


def rights(root: Path) -> set[tuple[str, int, int]]:
    statuses = [path.lstat() for path in root.rglob("*")]
    return {
        (
            "folder" if stat.S_ISDIR(status.st_mode) else "file",
            status.st_gid,
            stat.S_IMODE(status.st_mode),
        )
        for status in statuses
    }


@only_root
def test_all_that_a_job_creates_is_of_the_group(root: Path) -> None:
    save(root, 1, 2)
    assert rights(root) == SHARED


def test_a_run_is_for_its_user_alone_otherwise(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    assert {mode for _, _, mode in rights(tmp_path / "run")} == {0o700, 0o600}


@only_root
def test_another_user_of_the_group_loads_pins_and_removes(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["ckpt", *words])
        return int(main())

    save(root, 1, 2, 3)
    run(["ls", str(root)])  # the member could not import what is missing
    for words in (["pin", "3"], ["rm", "1"], ["verify"]):
        command, *steps = words
        assert act_as(MEMBER, partial(run, [command, str(root), *steps])) == 0, words
    with CheckpointManager(root) as manager:
        assert manager.steps() == [2, 3]
        target = state(0)
        report = manager.restore(target)
        assert report is not None
        assert report.step == 3
        assert torch.equal(target["x"], state(3)["x"])
        manager.save(target, 4)
    assert rights(root) == SHARED
