"""One case in one layout.

The change is made between the call of ``save_async`` and the copy. The committed checkpoint is
compared with the state at the call.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final, Literal, cast

import msgspec
import torch.distributed as dist

from ckpt import CheckpointManager
from ckpt.config import CheckMode
from ckpt.errors import CkptError
from tests.overlap.window import Window, content
from tests.safety.cases import Case
from tests.safety.jobs import Job
from tests.state.saving import assert_same

Outcome = Literal["correct", "named error", "silent"]

PATIENCE: Final = 0.05
"""Seconds that a change is given to show that it waits for the copy."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the table."""

    way: str
    check: CheckMode
    column: str
    outcome: Outcome


def measure(
    case: Case, column: str, manager: CheckpointManager, window: Window, step: int
) -> Outcome:
    """Return what becomes of a save: the worst that a rank finds.

    Raises:
        AssertionError: The case proves nothing, since the state is not changed; the error names
            no
            value of the state; or ranks disagree.
    """
    here: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(here, _on_this_rank(case, column, manager, window, step))
    outcomes = {outcome for outcome, _ in here}
    if outcomes == {"refused"}:
        return "named error"
    assert any(changed for _, changed in here) is case.changes, (
        "what the case says about its change is not so"
    )
    if "silent" in outcomes:
        return "silent"
    (outcome,) = outcomes
    return cast(Outcome, outcome)


def _on_this_rank(
    case: Case, column: str, manager: CheckpointManager, window: Window, step: int
) -> tuple[str, bool]:
    """Return the outcome, and whether the state has changed."""
    job, target = case.job(column, 0), case.job(column, 5)
    case.before(job)
    case.before(target)
    reference = content(job.state)
    try:
        pending = window.save(manager, job.state, step)
    except CkptError as error:
        _must_name(error, job)
        return "refused", False
    window.overtake(lambda: case.act(job), patience=PATIENCE)
    changed = differs(content(job.state), reference)
    if (failure := pending.exception(60)) is not None:
        _must_name(failure, job)
        return "named error", changed
    manager.restore(target.state, step)
    return "silent" if differs(content(target.state), reference) else "correct", changed


def _must_name(error: CkptError, job: Job) -> None:
    assert any(f"'{name}" in str(error) for name in job.state), f"the error names nothing: {error}"


def differs(one: Any, two: Any) -> bool:
    with contextlib.suppress(AssertionError):
        assert_same(one, two)
        return False
    return True
