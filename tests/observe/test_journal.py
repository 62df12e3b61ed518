"""The journal that a run leaves beside its root, and what a reader makes of it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointManager, CkptError, Tier
from ckpt.errors import ConfigError, OutOfSpace
from ckpt.events import Repaired, Restored, SaveCommitted, SaveFailed, SaveStaged, TierMissed
from ckpt.observe import journal as journals
from ckpt.observe.history import history_of
from ckpt.observe.journal import (
    OPEN_EVENT,
    VERIFY_EVENT,
    Journal,
    JournalReader,
    Record,
    note_verified,
)


def staged(step: int, *tiers: str) -> SaveStaged:
    return SaveStaged(step=step, nbytes=5, stall_seconds=0.25, tiers=tiers)


def lines(root: Path) -> list[str]:
    return [record.event for record in JournalReader(str(root)).read()]


def test_a_run_leaves_its_events_beside_its_root(tmp_path: Path) -> None:
    near, far = str(tmp_path / "near"), str(tmp_path / "far")
    tiers: list[str | Tier] = [near, Tier(far, every=2)]
    with CheckpointManager(tiers, observers=[Journal(near)]) as manager:
        for step in (1, 2):
            manager.save({"x": torch.ones(2)}, step)
        manager.restore({"x": torch.zeros(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "near", "near.journal"]
    history = history_of(JournalReader(near).read())
    assert list(history.saves) == [1, 2]
    assert history.saves[1].tiers.keys() == {near}
    assert {each.state for each in history.saves[2].tiers.values()} == {"committed"}
    assert all(each.seconds > 0 for each in history.saves[2].tiers.values())
    assert history.saves[2].stall_seconds > 0
    (restore,) = history.restores
    assert (restore.record.step, restore.troubles) == (2, ())


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE://localhost{}"])
def test_a_journal_is_beside_the_root_however_the_root_is_spelled(
    tmp_path: Path, form: str
) -> None:
    plain = tmp_path / "my run"
    url = form.format(str(plain).replace(" ", "%20") if "://" in form else plain)
    with CheckpointManager(url, observers=[Journal(url)]) as manager:
        manager.save({"x": torch.ones(2)}, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my run", "my run.journal"]
    assert lines(plain) == lines(Path(plain))
    assert "SaveCommitted" in [record.event for record in JournalReader(url).read()]


def test_a_save_under_way_is_cut_when_the_next_job_begins(tmp_path: Path) -> None:
    first = Journal(tmp_path / "run", rank=0)
    first(staged(1, "a", "b"))
    first(SaveCommitted(step=1, tier="a", nbytes=5, durable_seconds=1))
    reader = JournalReader(str(tmp_path / "run"))
    assert history_of(reader.read()).saves[1].tiers["b"].state == "saving"
    second = Journal(tmp_path / "run", rank=0)
    second(staged(2, "a"))
    found = history_of(reader.read())
    assert [found.saves[1].tiers[tier].state for tier in "ab"] == ["committed", "cut"]
    assert found.saves[2].tiers["a"].state == "saving"
    first.close()
    second.close()


def test_a_journal_that_is_closed_during_a_job_goes_on_with_the_job(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run", rank=0)
    journal(staged(1, "a"))
    journal.close()
    journal(staged(2, "a"))
    journal.close()
    assert lines(tmp_path / "run") == ["Opened", "SaveStaged", "SaveStaged"]
    found = history_of(JournalReader(str(tmp_path / "run")).read())
    assert [found.saves[step].tiers["a"].state for step in (1, 2)] == ["saving", "saving"]


def test_what_a_restore_repaired_belongs_to_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, rank=0)
    journal(SaveFailed(step=1, error=OutOfSpace("x")))
    journal(TierMissed(step=1, tier="a", error=CkptError("slow")))
    journal(Repaired(step=1, tier="a", key="k", reason="r", nbytes=3))
    journal(Restored(step=1, tier="b", nbytes=3, seconds=1))
    journal(Restored(step=1, tier="b", nbytes=3, seconds=1))
    journal.close()
    found = history_of(JournalReader(str(tmp_path)).read())
    assert [[each.key for each in restore.troubles] for restore in found.restores] == [["k"], []]
    assert [record.error for record in found.failures] == ["OutOfSpace"]
    assert found.saves[1].tiers["a"].reason == "slow"


def test_other_ranks_write_what_went_wrong_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path, rank=3)
    journal(staged(1, "a"))
    journal(SaveCommitted(step=1, tier="a", nbytes=5, durable_seconds=1))
    assert not (tmp_path.parent / f"{tmp_path.name}.journal").exists()
    journal(SaveFailed(step=2, error=CkptError("x")))
    journal.close()
    assert lines(tmp_path) == ["SaveFailed"]


def test_a_journal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LIMIT_BYTES", 4000)
    journal = Journal(tmp_path / "run", rank=0)
    for step in range(500):
        journal(staged(step, "a"))
    journal.close()
    files = list((tmp_path / "run.journal").iterdir())
    assert len(files) == 2
    assert all(path.stat().st_size <= 4000 + 200 for path in files)
    saves = history_of(JournalReader(str(tmp_path / "run")).read()).saves
    assert list(saves)[-1] == 499
    assert len(saves) > 20


def test_events_of_many_threads_are_whole_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run", rank=0)
    threads = [
        threading.Thread(target=lambda: [journal(staged(step, "a")) for step in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert lines(tmp_path / "run").count("SaveStaged") == 800


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"at": "now", "event": "SaveStaged"}',
        b'{"at": 1, "event": 7}',
        b'{"event": "SaveStaged"}',
        b'{"at": 1, "event": "SaveStaged", "tiers": 5}',
        b"[" * 100_000,
        b'{"at": 1, "event": "SomethingLater", "step": 3}',
    ],
)
def test_a_line_that_is_no_record_is_passed_over(tmp_path: Path, line: bytes) -> None:
    journal = Journal(tmp_path / "run", rank=0)
    journal(staged(1, "a"))
    path = tmp_path / "run.journal" / "rank-00000.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes() + line)
    journal(staged(2, "a"))
    journal.close()
    assert set(history_of(JournalReader(str(tmp_path / "run")).read()).saves) >= {1}


@pytest.mark.timeout(60)
def test_a_file_that_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path / "run", rank=0)) as journal:
        journal(staged(1, "a"))
    os.mkfifo(tmp_path / "run.journal" / "rank-00001.jsonl")
    (tmp_path / "run.journal" / "rank-00002.jsonl").mkdir()
    assert lines(tmp_path / "run") == ["Opened", "SaveStaged"]


def test_what_is_read_of_all_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(4):
        with contextlib.closing(Journal(tmp_path / "run", rank=rank)) as journal:
            for step in range(10):
                journal(SaveFailed(step=step, error=OSError("disk")))
    reader = JournalReader(str(tmp_path / "run"))
    assert len(reader.read()) == 41
    size = (tmp_path / "run.journal" / "rank-00000.jsonl").stat().st_size
    monkeypatch.setattr(journals, "_MOST_BYTES", size + size // 2)
    found = reader.read()
    assert 11 < len(found) < 21
    assert found[-1].step == 9


def test_verifications_are_read_whatever_the_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "run")
    for rank in range(3):
        with contextlib.closing(Journal(root, rank=rank)) as journal:
            journal(SaveFailed(step=1, error=OSError("disk")))
    note_verified(root, 1, "")
    monkeypatch.setattr(journals, "_MOST_FILES", 3)
    found = JournalReader(root).read()
    assert [record.event for record in found].count("SaveFailed") == 2
    assert (1, root) in history_of(found).verifications


@pytest.mark.parametrize("event", ["SaveCommitted", "CommitFinished"])
def test_a_verification_does_not_count_for_a_later_attempt_at_the_step(event: str) -> None:
    records = [
        Record(at=1, event="SaveCommitted", step=1, tier="a"),
        Record(at=2, event=VERIFY_EVENT, step=1, tier="a", reason="1 fault found"),
        Record(at=3, event=VERIFY_EVENT, step=1, tier="b"),
        Record(at=4, event=event, step=1, tier="a"),
    ]
    assert history_of(records).verifications == {(1, "b"): records[2]}
    again = Record(at=5, event=VERIFY_EVENT, step=1, tier="a")
    assert history_of([*records, again]).verifications[1, "a"] == again


def test_many_jobs_and_many_saves_are_read_in_linear_time() -> None:
    saves = [Record(at=n, event="SaveStaged", step=n, tiers=("a",)) for n in range(8000)]
    begun = [Record(at=n, event=OPEN_EVENT) for n in range(8000, 16000)]
    began = time.process_time()
    found = history_of([*saves, *begun])
    assert time.process_time() - began < 1
    assert {save.tiers["a"].state for save in found.saves.values()} == {"cut"}


def test_a_folder_that_cannot_be_written_costs_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.journal").write_text("a file is in the way")
    journal = Journal(tmp_path / "run", rank=0)
    for step in range(3):
        journal(staged(step, "a"))
    assert caplog.text.count("was not written") == 1


@pytest.mark.parametrize("root", ["s3://bucket/run", "shm://x", "", b"run", 7])
def test_a_journal_needs_a_folder(root: Any) -> None:
    with pytest.raises((ConfigError, TypeError), match=r"journal is on this machine|PathLike"):
        Journal(root)


def test_a_check_is_noted_where_there_is_a_journal(tmp_path: Path) -> None:
    note_verified(str(tmp_path / "run"), 1, "")
    note_verified("s3://bucket/run", 1, "")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.journal").mkdir()
    note_verified(str(tmp_path / "run"), 1, "")
    note_verified(str(tmp_path / "run"), 1, "2 faults")
    found = history_of(JournalReader(str(tmp_path / "run")).read())
    assert [each.reason for each in found.verifications.values()] == ["2 faults"]
