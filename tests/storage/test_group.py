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
from ckpt.observe.journal_files import journal_folder, open_file
from ckpt.observe.journal_reader import JournalReader
from tests.users import ATTACKER, act_as, fresh_user, only_root

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
    journal = Path(journal_folder(root))
    assert rights(journal) == {("file", MEMBER, 0o660)}
    assert (journal.stat().st_gid, stat.S_IMODE(journal.stat().st_mode)) == (MEMBER, 0o2770)


def test_a_run_is_for_its_user_alone_otherwise(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    assert {mode for _, _, mode in rights(tmp_path / "run")} == {0o700, 0o600}
    journal = Path(journal_folder(tmp_path / "run"))
    assert {mode for _, _, mode in rights(journal)} == {0o600}
    assert stat.S_IMODE(journal.stat().st_mode) == 0o700


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


@only_root
def test_another_user_of_the_group_reads_the_journal_and_writes_it(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def go_on() -> list[int]:
        target = state(0)
        with CheckpointManager(root) as manager:
            manager.restore(target)
            manager.save(target, 3)
        return [record.step for record in JournalReader(str(root)).read()]

    def steps_of(event: str) -> list[int]:
        records = JournalReader(str(root)).read()
        return [record.step for record in records if record.event == event]

    save(root, 1, 2)
    assert set(act_as(MEMBER, go_on)) >= {1, 2, 3}
    save(root, 4)
    assert steps_of("SaveCommitted") == [1, 2, 3, 4]
    assert steps_of("Restored") == [2]
    assert len(steps_of("Closed")) == 3
    assert not caplog.records
    assert act_as(MEMBER, partial(os.listdir, journal_folder(root))) == ["rank-00000.jsonl"]


@only_root
def test_a_journal_of_before_is_shared_as_soon_as_its_user_saves(root: Path) -> None:
    root.chmod(0o700)
    save(root, 1)
    journal = Path(journal_folder(root))
    assert stat.S_IMODE(journal.stat().st_mode) == 0o700
    root.chmod(0o2770)
    save(root, 2)
    assert rights(journal) == {("file", MEMBER, 0o660)}
    assert (journal.stat().st_gid, stat.S_IMODE(journal.stat().st_mode)) == (MEMBER, 0o2770)


@only_root
def test_a_file_of_a_user_outside_of_the_group_stays_private(root: Path) -> None:
    file = root / "rank-00000.jsonl"
    file.touch(0o600)
    os.chown(file, ATTACKER, ATTACKER)
    root.chmod(0o2777)
    act_as(ATTACKER, lambda: os.close(open_file(str(file))))
    assert rights(root) == {("file", ATTACKER, 0o600)}


@only_root
@pytest.mark.parametrize("kind", ["folder", "file", "hard link"])
def test_a_link_that_a_member_has_planted_in_place_of_the_journal_shares_nothing(
    root: Path, kind: str
) -> None:
    """It names a file or folder of the user who trains."""
    secret = root.parent / "secret"
    secret.mkdir(mode=0o700)
    (secret / "file").write_text("mine")
    (secret / "file").chmod(0o600)
    journal = Path(journal_folder(root))
    if kind == "folder":
        journal.symlink_to(secret)
    else:
        journal.mkdir()
        os.chown(journal, MEMBER, MEMBER)
        journal.chmod(0o2770)
        line = journal / "rank-00000.jsonl"
        line.symlink_to(secret / "file") if kind == "file" else line.hardlink_to(secret / "file")
    save(root, 1)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o700
    assert stat.S_IMODE((secret / "file").stat().st_mode) == 0o600
    if kind == "file":
        assert (secret / "file").read_text() == "mine"
