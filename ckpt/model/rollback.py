"""Rollbacks: records which say that the history of a run goes on from an older step.

The steps of a run form a tree. A rollback to a step begins a new branch there, and the later steps
are abandoned. Jobs cannot know from names and numbers alone which steps are abandoned, so each
rollback says for each attempt which of its steps are on the branch. The last rollback of a run
counts. The earlier ones describe the branches that existed before it.

An *attempt* is one try of a job at a step. A *trial* is the number of a try, which grows over the
life of a job. A rollback describes the steps of a job by *segments*, which are pairs (trial, last
step). Each pair is about the tries from its trial on, up to the trial of the next pair. Of these
tries, the steps up to the last step are on the branch. If the last step is None, all of them are.
The *heads* of a run are the newest steps of all attempts. The *rivals* of a step are other
committed attempts at it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from ckpt.errors import CommitError
from ckpt.model.keys import StepRef, rollback_key
from ckpt.model.manifest import FORMAT

_NO_LIMIT: Final = ((0, None),)
"""The segments of a job whose steps are all on the branch."""
_NO_STEP: Final = -1
"""The last step of a segment without steps."""
MOST_NUMBER: Final = 999_999_999
"""The highest number of a rollback."""

Segments = tuple[tuple[int, int | None], ...]
"""Pairs (trial, last step) of one job, by ascending trial. The tries of the job from this trial on,
up to that of the next pair, are on the branch up to the last step. None stands for no limit.
"""


class Rollback(msgspec.Struct, frozen=True, kw_only=True):
    """One rollback.

    Attributes:
        number: The number of the rollback, counted from 1. The highest number counts.
        step, attempt: The step from which the new branch begins.
        created_at: When the rollback was made, in seconds since 1970.
        jobs: For each job that had any step at that time, the steps that are on the branch. All
            steps of other jobs are on the branch, since these jobs began later.
        reason, author: The reason, and the user and machine, for people.
    """

    format: int = FORMAT
    number: int
    step: int
    attempt: str
    created_at: float
    jobs: dict[str, Segments]
    reason: str = ""
    author: str = ""

    @property
    def ref(self) -> StepRef:
        return StepRef(self.step, self.attempt)

    @property
    def order(self) -> tuple[int, float]:
        """The key by which the rollback that counts is the greatest."""
        return self.number, self.created_at

    def keeps(self, ref: StepRef) -> bool:
        """Return True if ``ref`` is on the branch that this rollback has begun."""
        last = self.limit(ref)
        return last is None or ref.step <= last

    def precedes(self, ref: StepRef) -> bool:
        """Return True if ``ref`` was saved by a job, or a part of a job, that began later."""
        return self.limit(ref) is None

    def limit(self, ref: StepRef) -> int | None:
        """Return the last step of the attempt of ``ref`` that is on the branch.

        None means that all of its steps are, and -1 that none is.
        """
        last_steps = [
            last for trial, last in self.jobs.get(ref.job, _NO_LIMIT) if trial <= ref.trial
        ]
        return last_steps[-1] if last_steps else _NO_STEP


def on_branch(rollback: Rollback | None, refs: Iterable[StepRef]) -> list[StepRef]:
    """Return those of ``refs`` that are on the branch. Without a rollback, these are all."""
    return [ref for ref in refs if rollback is None or rollback.keeps(ref)]


def current_branch(rollback: Rollback | None, refs: Collection[StepRef]) -> list[StepRef]:
    """Return those of ``refs`` from which the newest is taken: those on the branch, or all of them
    if the branch has none any more.
    """
    return on_branch(rollback, refs) or list(refs)


def last_rollback(rollbacks: Iterable[Rollback | None]) -> Rollback | None:
    """Return the rollback that counts; None if there is none."""
    present = (rollback for rollback in rollbacks if rollback is not None)
    return max(present, key=lambda rollback: rollback.order, default=None)


def history_of(rollbacks: Iterable[Rollback]) -> list[Rollback]:
    """Return the rollbacks that counted one after another: one for each number, oldest first.

    ``rollbacks`` are those of all tiers, in any order.
    """
    by_number: dict[int, Rollback] = {}
    for rollback in sorted(rollbacks, key=lambda rollback: rollback.order):
        by_number[rollback.number] = rollback
    return list(by_number.values())


def abandoned_by(rollbacks: Sequence[Rollback], ref: StepRef) -> Rollback | None:
    """Return the rollback that has abandoned ``ref``; None if ``ref`` is on the current branch.

    Later rollbacks have not taken the step up again. ``rollbacks`` are in ascending order.
    """
    result: Rollback | None = None
    for rollback in reversed(rollbacks):
        if rollback.keeps(ref):
            return result
        result = rollback
    return result


def heads_of(refs: Iterable[StepRef]) -> list[StepRef]:
    """Return the newest step of each attempt in ``refs``, in ascending order."""
    newest: dict[str, StepRef] = {}
    for ref in refs:
        newest[ref.attempt] = max(ref, newest.get(ref.attempt, ref))
    return sorted(newest.values())


def is_newest(
    rollback: Rollback | None,
    ref: StepRef,
    heads: Collection[StepRef],
    rivals: Collection[StepRef] = (),
) -> bool:
    """Return True if ``ref`` is the last step on the branch of ``rollback``, and no rival of it is
    there.

    Args:
        rollback: The last rollback; None if there is none.
        ref: The step.
        heads: The newest steps of all attempts.
        rivals: The rivals of ``ref``: other attempts at its step that are committed. A restore of
            the step by its number takes the youngest attempt, which may be one of them.
    """
    is_present = bool(on_branch(rollback, [ref]))
    is_last = all(_last_step(rollback, head) <= ref.step for head in heads)
    return is_present and is_last and not on_branch(rollback, rivals)


def abandons(rollback: Rollback, last: Rollback | None, heads: Collection[StepRef]) -> bool:
    """Return True if ``rollback`` abandons a step of the branch of ``last``, the one before it."""
    return any(_last_step(rollback, head) < _last_step(last, head) for head in heads)


def roll_back(
    rollbacks: Iterable[Rollback],
    ref: StepRef,
    heads: Collection[StepRef],
    *,
    rivals: Collection[StepRef] = (),
    trials: Mapping[str, int] | None = None,
) -> Rollback | None:
    """Return the rollback to ``ref``; None if ``ref`` is the newest step of the branch already.

    If ``ref`` is on the branch, the later steps leave it, and so do other attempts at this one. If
    ``ref`` is on an abandoned branch, the branch of ``ref`` up to ``ref`` takes the place of the
    present one.

    Args:
        rollbacks: The rollbacks of the run, on all tiers and in any order.
        ref: The step to go back to.
        heads: The newest step of each attempt of the run, committed or not.
        rivals: The rivals of ``ref`` (see ``is_newest``).
        trials: For each job that goes on after the rollback, the number of its first try then.

    Raises:
        CommitError: The last rollback has the highest number, so that none can follow.
    """
    history = history_of(rollbacks)
    last = history[-1] if history else None
    if is_newest(last, ref, heads, rivals):
        return None
    if last is not None and last.number >= MOST_NUMBER:
        raise CommitError(
            f"no rollback can follow rollback {last.number}, which has the highest number: no run "
            f"goes back so often, so delete {rollback_key(last.number)} on each tier that has it"
        )
    branch_start, branch_end = _branch_of(history, ref)
    jobs: dict[str, Segments] = {}
    for job in sorted({head.job for head in heads} | (last.jobs.keys() if last else set())):
        segments = branch_start.jobs.get(job, _NO_LIMIT) if branch_start is not None else _NO_LIMIT
        job_segments = _without_later_steps(
            segments, ref.step - 1
        )  # Without other attempts at the step
        if job == ref.job:
            job_segments = _with_step(job_segments, ref)
        jobs[job] = (*job_segments, *_later_tries(job, branch_end))
    for job, trial in (trials or {}).items():
        jobs[job] = (*jobs.get(job, ()), (trial, None))
    return Rollback(
        number=last.number + 1 if last else 1,
        step=ref.step,
        attempt=ref.attempt,
        created_at=time.time(),
        jobs=jobs,
    )


def _last_step(rollback: Rollback | None, head: StepRef) -> int:
    """Return the highest step that the attempt of ``head``, its newest step, may have on the
    branch.
    """
    limit = rollback.limit(head) if rollback is not None else None
    return head.step if limit is None else min(head.step, limit)


def _branch_of(
    history: Sequence[Rollback], ref: StepRef
) -> tuple[Rollback | None, Rollback | None]:
    """Return the rollbacks that began and ended the last branch that had ``ref``.

    The first is None if the branch began with the run, and the second if the branch is the present
    one.
    """
    end: Rollback | None = None
    for rollback in reversed(history):
        if rollback.keeps(ref):
            return rollback, end
        end = rollback
    return None, end


def _later_tries(job: str, end: Rollback | None) -> Segments:
    """Return a segment without steps for the tries of ``job`` on later branches than the one that
    ``end`` has ended.
    """
    if end is None:
        return ()
    return tuple((trial, _NO_STEP) for trial, last in end.jobs.get(job, _NO_LIMIT) if last is None)


def _without_later_steps(segments: Segments, step: int) -> Segments:
    """Return ``segments`` without the steps after ``step``."""
    return tuple((trial, step if last is None else min(last, step)) for trial, last in segments)


def _with_step(segments: Segments, ref: StepRef) -> Segments:
    """Return ``segments``, which end before the step of ``ref``, with ``ref`` itself."""
    # The tries after that of ``ref`` keep the last step that ``segments`` give them, if any.
    next_trial = ref.trial + 1
    next_last_steps = [last for trial, last in segments if trial <= next_trial]
    return (
        *((trial, last) for trial, last in segments if trial < ref.trial),
        (ref.trial, ref.step),
        *((next_trial, last) for last in next_last_steps[-1:]),
        *((trial, last) for trial, last in segments if trial > next_trial),
    )
