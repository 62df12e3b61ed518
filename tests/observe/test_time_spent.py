"""Where the time of a run went, as its journal tells it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.observe.history import history_of
from ckpt.observe.journal_record import CLOSE_EVENT, OPEN_EVENT, Record
from ckpt.observe.time_spent import TimeSpent, time_spent
from tests.kit.examples import examples


def staged(at: float, step: int, job: str, seconds: float = 0.0) -> Record:
    return Record(at=at, event="SaveStaged", step=step, job=job, seconds=seconds, tiers=("a",))


def test_a_job_that_dies_and_goes_on_has_every_kind_of_time() -> None:
    records = [
        Record(at=0.0, event=OPEN_EVENT, job="1"),
        staged(10.0, 10, "1", 0.5),
        staged(20.0, 20, "1", 0.5),  # The step was lost with the job
        Record(at=40.0, event=OPEN_EVENT, job="2"),
        Record(at=43.0, event="Restored", step=10, job="2", seconds=2.0),
        staged(53.0, 21, "2", 1.0),
        Record(at=60.0, event=CLOSE_EVENT, job="2"),
    ]
    spent = time_spent(history_of(records), {"1": 30.0, "2": 60.0})
    # Repeated: from the save of step 10 to the death at 30, and from 40 to the restore at 41.
    assert spent == TimeSpent(training=25.5, stall=1.5, restore=2.0, repeats=21.0, down=10.0)
    assert spent.total == 60.0


def test_a_run_whose_jobs_only_restore_has_no_time() -> None:
    records = [
        Record(at=0.0, event=OPEN_EVENT, job="1"),
        Record(at=3.0, event="Restored", step=10, job="1", seconds=2.0),
    ]
    assert time_spent(history_of(records), {"1": 30.0}) is None
    assert time_spent(history_of([]), {}) is None


@st.composite
def journals(draw: st.DrawFn) -> tuple[list[Record], dict[str, float]]:
    """Draw jobs that follow each other, and that save and restore at whole seconds."""
    records: list[Record] = []
    ends: dict[str, float] = {}
    now, steps = 0, list[int]()
    for job in range(draw(st.integers(1, 3))):
        now += draw(st.integers(1, 5))
        records.append(Record(at=now, event=OPEN_EVENT, job=str(job)))
        for _ in range(draw(st.integers(1, 4))):
            now += draw(st.integers(1, 4))
            if draw(st.booleans()) and steps:
                step, seconds = draw(st.sampled_from(steps)), draw(st.integers(0, 3))
                now += seconds
                records.append(
                    Record(at=now, event="Restored", step=step, job=str(job), seconds=seconds)
                )
            else:
                steps.append(len(steps))
                records.append(staged(now, steps[-1], str(job)))
        now += draw(st.integers(0, 4))
        ends[str(job)] = now
    return records, ends


@settings(max_examples=examples(300))
@given(journals())
def test_each_second_counts_once_and_as_what_it_was(
    journal: tuple[list[Record], dict[str, float]],
) -> None:
    records, ends = journal
    history = history_of(records)
    savers = {record.job for record in records if record.event == "SaveStaged"}
    alive = [
        (int(job.start.at), int(ends[name])) for name, job in history.jobs.items() if name in savers
    ]
    restores = [
        (int(record.at - record.seconds), int(record.at), int(history.saves[record.step].at))
        for record in records
        if record.event == "Restored" and record.job in savers
    ]
    expected = dict.fromkeys(("training", "restore", "repeats", "down"), 0)
    for second in range(alive[0][0], alive[-1][1]) if alive else ():
        if not any(begin <= second < end for begin, end in alive):
            kind = "down"
        elif any(begin <= second < end for begin, end, _ in restores):
            kind = "restore"
        elif any(saved <= second < begin for begin, _, saved in restores):
            kind = "repeats"
        else:
            kind = "training"
        expected[kind] += 1
    spent = time_spent(history, ends)
    assert spent == (TimeSpent(**expected) if alive else None)
