"""Rollbacks: which steps are on the branch, for any history of saves, restarts and rollbacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt.errors import CommitError
from ckpt.model.keys import StepRef, rollback_key, rollback_number
from ckpt.model.record_encoding import pack, unpack
from ckpt.model.rollback import (
    MOST_NUMBER,
    Rollback,
    heads_of,
    last_rollback,
    on_branch,
    roll_back,
)

A, B = "a" * 12, "b" * 12


def refs(job: str, *steps: int, trial: int = 0) -> list[StepRef]:
    return [StepRef(step, job).retry(trial) for step in steps]


def test_without_a_rollback_every_step_is_on_the_branch():
    assert on_branch(None, refs(A, 1, 2)) == refs(A, 1, 2)
    assert last_rollback([None, None]) is None


def test_the_steps_after_the_target_leave_the_branch():
    run = refs(A, 1, 2, 3)
    rollback = roll_back([], run[1], heads_of(run))
    assert rollback is not None
    assert on_branch(rollback, [*run, *refs(B, 3)]) == [*run[:2], *refs(B, 3)]
    assert [rollback.precedes(ref) for ref in (run[0], *refs(B, 3))] == [False, True]


def test_a_record_with_the_highest_number_is_named_by_the_next_rollback():
    """No run goes back so often. Without this error, nobody would read the next record."""
    run = refs(A, 1, 2, 3)
    last = roll_back([], run[1], heads_of(run))
    assert last is not None
    for number in (MOST_NUMBER - 1, MOST_NUMBER):
        assert rollback_number(rollback_key(number)) == number
    assert rollback_number(rollback_key(MOST_NUMBER + 1)) is None
    last = replace(last, number=MOST_NUMBER - 1)
    after = roll_back([last], run[0], heads_of(run))
    assert after is not None
    with pytest.raises(CommitError, match="delete rollbacks/999999999"):
        roll_back([last, after], run[2], heads_of(run))


def test_going_back_to_the_newest_step_is_no_rollback():
    run = refs(A, 1, 2)
    assert roll_back([], run[1], heads_of(run)) is None


def test_another_checkpoint_of_the_newest_step_leaves_the_branch():
    """It may be the younger one, which a restart would take."""
    run, rivals = refs(A, 1, 2), refs(B, 2)
    heads = heads_of([*run, *rivals])
    assert roll_back([], run[1], heads) is None
    rollback = roll_back([], run[1], heads, rivals=rivals)
    assert rollback is not None
    assert on_branch(rollback, [*run, *rivals]) == run
    assert roll_back([rollback], run[1], heads, rivals=rivals) is None
    back = roll_back([rollback], rivals[0], heads, rivals=run[1:])
    assert back is not None
    assert on_branch(back, [*run, *rivals]) == [run[0], *rivals]


def test_a_job_that_goes_on_tells_its_branches_apart_by_the_try():
    run = refs(A, 1, 2, 3)
    rollback = roll_back([], run[0], heads_of(run), trials={A: 1})
    assert rollback is not None
    later = refs(A, 2, 3, trial=1)
    assert on_branch(rollback, [*run, *later]) == [run[0], *later]


def test_an_abandoned_step_can_be_gone_back_to():
    run, branch = refs(A, 1, 2, 3), refs(B, 2, 3, 4)
    first = roll_back([], run[0], heads_of(run))
    assert first is not None
    second = roll_back([first], run[2], heads_of([*run, *branch]))
    assert second is not None
    assert second.number == 2
    assert on_branch(second, [*run, *branch]) == run


def test_another_attempt_at_the_target_is_not_on_the_branch():
    """A job that did not see the step, since a tier was away, has saved the number too."""
    run = [*refs(A, 1, 2, 3), *refs(A, 2, trial=1), *refs(A, 2, trial=2), *refs(B, 1, 2, 3)]
    target = StepRef(2, A).retry(1)
    rollback = roll_back([], target, heads_of(run))
    assert rollback is not None
    assert on_branch(rollback, run) == [*refs(A, 1), target, *refs(B, 1)]
    again = roll_back([rollback], target, heads_of(run))
    assert again is None


def test_a_record_survives_its_encoding():
    rollback = roll_back([], refs(A, 1)[0], heads_of(refs(A, 1, 2)), trials={A: 3})
    assert rollback is not None
    rollback = replace(rollback, reason="spike")
    assert unpack(pack(rollback), Rollback, key="k") == rollback


@pytest.mark.parametrize("key", ["rollbacks/1.json", "rollbacks/000001.json.x", "x/000001.json"])
def test_only_keys_that_ckpt_writes_are_rollbacks(key):
    assert rollback_number(key) is None
    assert rollback_number(rollback_key(1)) == 1


@dataclass
class Run:
    """A run as a tree: the parent of each step, the step that the job stands on, and the job."""

    parents: dict[StepRef, StepRef | None] = field(default_factory=dict)
    head: StepRef | None = None
    job: str = "j" * 6
    trial: int = 0
    jobs: int = 1
    rollbacks: list[Rollback] = field(default_factory=list)

    def save(self, distance: int) -> None:
        step = (self.head.step if self.head else 0) + distance
        ref = StepRef(step, self.job).retry(self.trial)
        self.parents[ref] = self.head
        self.head = ref

    def restart(self) -> None:
        self.job = "j" * 6 + chr(ord("k") + self.jobs // 10) + chr(ord("k") + self.jobs % 10)
        self.jobs, self.trial = self.jobs + 1, 0

    def roll_back(self, number: int, *, in_job: bool) -> None:
        if not self.parents:
            return
        target = sorted(self.parents)[number % len(self.parents)]
        if not in_job:
            self.restart()
        has_saved = any(ref.job == self.job for ref in self.parents)
        trials = {self.job: self.trial + 1} if has_saved else {}
        rollback = roll_back(self.rollbacks, target, heads_of(self.parents), trials=trials)
        if rollback is not None:
            self.rollbacks.append(rollback)
            self.trial += has_saved
        self.head = target

    def branch(self) -> Iterator[StepRef]:
        ref = self.head
        while ref is not None:
            yield ref
            ref = self.parents[ref]


ACTS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3)),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("back in the job"), st.integers(0, 50)),
    st.tuples(st.just("back in another job"), st.integers(0, 50)),
)


@given(st.lists(ACTS, max_size=25))
def test_the_branch_is_the_line_of_the_newest_step(acts):
    run = Run()
    for act, number in acts:
        if act == "save":
            run.save(number)
        elif act == "restart":
            run.restart()
        else:
            run.roll_back(number, in_job=act == "back in the job")
        last = last_rollback(run.rollbacks)
        assert sorted(on_branch(last, run.parents)) == sorted(run.branch())
