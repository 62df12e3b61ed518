"""The journal that a run leaves beside its root, and what a reader makes of it."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import CheckpointManager, CkptError, Tier
from ckpt.errors import ConfigError, OutOfSpace
from ckpt.events import Repaired, Restored, SaveCommitted, SaveFailed, SaveStaged, TierMissed
from ckpt.observe import journal as journals
from ckpt.observe import journal_files
from ckpt.observe import journal_reader as readers
from ckpt.observe.history import history_of
from ckpt.observe.job_life import JobLife, life_of
from ckpt.observe.journal import Journal, note_verified, record_of
from ckpt.observe.journal_reader import JournalReader
from ckpt.observe.journal_record import CLOSE_EVENT, OPEN_EVENT, PLANNED_STOP, VERIFY_EVENT, Record
from ckpt.processes import boot_identity


def staged(step: int, *tiers: str) -> SaveStaged:
    return SaveStaged(step=step, nbytes=5, stall_seconds=0.25, tiers=tiers)


def lines(root: Path) -> list[str]:
    return [record.event for record in JournalReader(str(root)).read()]


class Blocked:
    """A file system that does not answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = threading.Event()
        true = journal_files.open_file

        def wait_for_it(path: str) -> int:
            self.answer.wait(60)
            return true(path)

        monkeypatch.setattr("ckpt.observe.journal.open_file", wait_for_it)


def test_a_manager_writes_a_journal_by_itself_with_the_metrics(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    best = ("accuracy", "max")
    with CheckpointManager(Tier(root, keep_last=1, keep_best=best)) as manager:  # type: ignore[arg-type]
        for step in (1, 2, 3):
            metrics = {"loss": 1 / step, "accuracy": 0.5}
            manager.save({"x": torch.ones(2)}, step, metrics=metrics)
        manager.save({"x": torch.ones(2)}, 4, metrics={"loss": float("nan")})
        manager.add_metrics(4, {"accuracy": 0.25})
    history = history_of(JournalReader(root).read())
    assert [save.metrics["loss"] for save in history.saves.values()][:3] == [1.0, 0.5, 1 / 3]
    assert math.isnan(history.saves[4].metrics["loss"])
    assert history.saves[4].metrics["accuracy"] == 0.25
    assert history.modes == {"accuracy": "max"}
    (job,) = history.jobs.values()
    assert job.has_saved
    assert job.end is not None
    assert job.start.pid == os.getpid()
    with ckpt.open(root) as opened:
        rows = opened.history()
    assert [(row["step"], row["state"]) for row in rows] == [
        (1, "removed"), (2, "removed"), (3, "committed"), (4, "committed"),
    ]  # fmt: skip
    assert [row["loss"] for row in rows[:3]] == [1.0, 0.5, 1 / 3]
    assert rows[3]["accuracy"] == 0.25
    assert all(row["saved_at"].tzinfo and row["durable_seconds"] > 0 for row in rows)


@pytest.mark.parametrize("how", ["keyword", "memory", "own"])
def test_there_is_no_journal_where_none_is_wanted_or_there_is_no_folder(
    tmp_path: Path, how: str
) -> None:
    root = "memory://journal-test" if how == "memory" else str(tmp_path / "run")
    own = [Journal(tmp_path / "elsewhere")] if how == "own" else []
    with CheckpointManager(root, journal=how != "keyword", observers=own) as manager:
        manager.save({"x": torch.ones(2)}, 1)
    names = {path.name for path in tmp_path.iterdir()} - {"run"}
    assert names == ({"elsewhere.journal"} if how == "own" else set())


def test_a_job_that_only_restores_leaves_no_journal_where_there_is_none(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    with CheckpointManager(root, journal=False) as manager:
        manager.save({"x": torch.ones(2)}, 1)
    with CheckpointManager(root) as manager:
        manager.restore({"x": torch.zeros(2)})
    assert not (tmp_path / "run.journal").exists()
    with CheckpointManager(root) as manager:
        manager.restore({"x": torch.zeros(2)})
        manager.save({"x": torch.ones(2)}, 2)
    assert lines(tmp_path / "run") == [
        "Opened", "Restored", "SaveStaged", "SaveCommitted", "Closed",
    ]  # fmt: skip


def test_a_journal_whose_file_system_does_not_answer_delays_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = Blocked(monkeypatch)
    monkeypatch.setattr(journals, "_END_SECONDS", 0.01)
    try:
        with CheckpointManager(str(tmp_path / "run")) as manager:
            manager.save({"x": torch.ones(2)}, 1)
        assert caplog.text.count("cannot be written: no answer") == 1
    finally:
        blocked.answer.set()


def test_records_that_the_disk_cannot_take_yet_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = Blocked(monkeypatch)
    monkeypatch.setattr(journals, "_MOST_QUEUED_RECORDS", 10)
    journal = Journal(tmp_path / "run", rank=0)
    for step in range(100):
        journal(staged(step, "a"))
    blocked.answer.set()
    journal.close()
    assert 10 <= lines(tmp_path / "run").count("SaveStaged") <= 12


def test_a_new_file_names_the_job_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "LIMIT_BYTES", 2000)
    journal = Journal(tmp_path / "run", rank=0)
    for step in range(200):
        journal(staged(step, "a"))
    journal.close()
    history = history_of(JournalReader(str(tmp_path / "run")).read())
    assert [job.has_saved for job in history.jobs.values()] == [True]


def test_two_jobs_that_write_one_file_lose_no_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "LIMIT_BYTES", 3000)
    first, second = (Journal(tmp_path / "run", rank=0) for _ in range(2))
    second._write(record_of(staged(1000, "a")))
    step = 0
    while not (tmp_path / "run.journal" / "rank-00000.jsonl.old").exists():
        first._write(record_of(staged(step := step + 1, "a")))
    second._write(record_of(staged(1001, "a")))  # Its file is the older one now, and is full
    saves = history_of(JournalReader(str(tmp_path / "run")).read()).saves
    assert saves.keys() == {1000, 1001, *range(1, step + 1)}


def test_a_journal_of_ten_million_lines_is_read_in_part(tmp_path: Path) -> None:
    with contextlib.closing(Journal(tmp_path / "run", rank=0)) as journal:
        journal(staged(7, "a"))
    path = tmp_path / "run.journal" / "rank-00000.jsonl"
    path.write_bytes(b"\n" * 10_000_000 + path.read_bytes())
    began = time.process_time()
    assert lines(tmp_path / "run") == ["Opened", "SaveStaged"]
    assert time.process_time() - began < 5


# -- whether a job lives ---------------------------------------------------------------------------


def life(root: Path) -> JobLife | None:
    reader = JournalReader(str(root))
    return life_of(history_of(reader.read()), reader.beats(), time.time())


def test_a_job_lives_until_its_manager_is_closed_and_its_end_is_known(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert life(root) is None
    journal = Journal(root)
    manager = CheckpointManager(str(root), observers=[journal])
    manager.save({"x": torch.ones(2)}, 1)
    journal.close()  # Writes what waits; the manager goes on
    found = life(root)
    assert found is not None
    assert (found.state, found.pid) == ("lives", os.getpid())
    manager.save({"x": torch.ones(2)}, 2)
    manager.close()
    found = life(root)
    assert found is not None
    assert (found.state, found.is_alive) == ("ended", False)


def opened(job: str, *, at: float = 1.0, machine: str = "other", **fields: Any) -> Record:
    return Record(at=at, event=OPEN_EVENT, job=job, machine=machine, pid=1 << 22, **fields)


def saved(job: str, *, at: float = 2.0) -> Record:
    return Record(at=at, event="SaveStaged", step=1, job=job)


def evaluated(job: str, *, at: float = 4.0) -> Record:
    return Record(at=at, event="Restored", step=1, job=job, evaluates=True)


@pytest.mark.parametrize(
    ("records", "beats", "expected", "at"),
    [
        ([opened("a"), saved("a")], {"a": 990.0}, "lives", 1.0),
        ([opened("a"), saved("a")], {"a": 800.0}, "died", 800.0),
        ([opened("a"), saved("a", at=5.0)], {}, "died", 5.0),
        ([opened("a", machine=boot_identity()), saved("a")], {"a": 999.0}, "died", 999.0),
        ([opened("a"), saved("a"), opened("b", at=3.0)], {"b": 990.0}, "begins", 3.0),
        ([opened("a"), saved("a"), opened("b", at=3.0)], {"a": 990.0, "b": 990.0}, "lives", 1.0),
        ([opened("b"), opened("a", at=3.0), saved("a", at=4.0)], {"b": 990.0}, "died", 4.0),
        ([opened("a"), saved("a"), opened("b"), saved("b")], {"a": 990.0}, "lives", 1.0),
        ([opened("a"), opened("b", at=3.0)], {"a": 990.0}, "begins", 1.0),
        ([opened("b")], {}, None, 0.0),
        ([opened("b"), evaluated("b")], {"b": 990.0}, None, 0.0),
        ([opened("a"), saved("a"), opened("b"), evaluated("b")], {"b": 990.0}, "died", 2.0),
        ([opened("a"), evaluated("a"), saved("a", at=5.0)], {"a": 990.0}, "lives", 1.0),
    ],
)  # fmt: skip
def test_a_job_is_alive_by_its_process_or_by_the_time_of_its_file(
    records: list[Record], beats: dict[str, float], expected: str | None, at: float
) -> None:
    found = life_of(history_of(records), beats, 1000.0)
    assert (found and (found.state, found.time)) == (expected and (expected, at))


@pytest.mark.parametrize(
    ("error", "reason", "expected"),
    [("", "", "ended"), ("", PLANNED_STOP, "stopped"), ("ValueError", "no data", "failed")],
)
def test_the_end_of_a_job_is_told_apart(error: str, reason: str, expected: str) -> None:
    end = Record(at=9.0, event=CLOSE_EVENT, job="a", error=error, reason=reason)
    found = life_of(history_of([opened("a"), saved("a"), end]), {}, 10.0)
    assert found is not None
    assert (found.state, found.time, found.pid) == (expected, 9.0, 1 << 22)
    assert found.reason == ("ValueError: no data" if error else "")


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
    first.close()
    reader = JournalReader(str(tmp_path / "run"))
    assert history_of(reader.read()).saves[1].tiers["b"].state == "saving"
    second = Journal(tmp_path / "run", rank=0)
    second(Restored(step=1, tier="a", nbytes=5, seconds=1))
    second.close()  # A job that has only restored, such as an evaluation, says nothing of another
    assert history_of(reader.read()).saves[1].tiers["b"].state == "saving"
    second(staged(2, "a"))
    second.close()
    found = history_of(reader.read())
    assert [found.saves[1].tiers[tier].state for tier in "ab"] == ["committed", "cut"]
    assert found.saves[2].tiers["a"].state == "saving"


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
        b'{"at": 1, "event": "SaveStaged", "step": 3, "metrics": "of another version"}',
        b'{"at": 1, "event": "SaveStaged", "step": 3, "loss',
    ],
)
def test_a_line_that_is_no_record_is_passed_over(tmp_path: Path, line: bytes) -> None:
    journal = Journal(tmp_path / "run", rank=0)
    journal(staged(1, "a"))
    journal.close()
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
    monkeypatch.setattr(readers, "_MOST_BYTES", size + size // 2)
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
    monkeypatch.setattr(readers, "_MOST_FILES", 3)
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
    jobs = [
        Record(at=n, event=event, job=str(n), step=8000)
        for n in range(8000, 16000)
        for event in (OPEN_EVENT, "SaveStaged")
    ]
    began = time.process_time()
    found = history_of([*saves, *jobs])
    assert time.process_time() - began < 1
    assert found.saves.popitem()[0] == 8000
    assert {save.tiers["a"].state for save in found.saves.values()} == {"cut"}


def test_a_folder_that_cannot_be_written_costs_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run.journal").write_text("a file is in the way")
    journal = Journal(tmp_path / "run", rank=0)
    for step in range(3):
        journal(staged(step, "a"))
    journal.close()
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
