"""Begin a branch: after the restore of an older step, the later steps are abandoned.

The leader puts a rollback on every tier that answers, so that no later restore takes an abandoned
step for the newest one, also if this job dies before its first save. If the owner of the root may
be alive on another machine, this job may be an evaluation beside a training. Then the rollback is
put only when this job takes the root, which it does with its first save.

A *rollback* is the record on a tier that the run goes on from an older step. The last rollback
counts: the steps that it does not abandon are *on the branch*. The *heads* are the newest step of
each attempt. The *rivals* of a step are other committed attempts at it. ``listers`` are threads
that work on tiers, since a tier that does not answer may hold a thread for long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

import msgspec

from ckpt.catalog.candidates import LISTING_SECONDS
from ckpt.catalog.rollbacks import all_rollbacks, put_rollback
from ckpt.coordination.coordinator import LEADER
from ckpt.coordination.exchanges import Wait, leader_decides
from ckpt.errors import AccessDenied, CkptError, LinkRefused, StorageError
from ckpt.events import RolledBack
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback, abandons, is_newest, on_branch, roll_back
from ckpt.pipeline.workers import Workers
from ckpt.restore.discard import Discard
from ckpt.restore.restorer import RestoreContext
from ckpt.root.owner import Owner, read_owner
from ckpt.storage.api import StorageBackend
from ckpt.storage.tiers import OpenTier

_PATIENCE_SECONDS: Final = 10 * LISTING_SECONDS
_log = logging.getLogger("ckpt")

T = TypeVar("T")


class _Decision(msgspec.Struct, frozen=True):
    """What the leader has done.

    Attributes:
        rollback: The rollback; None if no branch begins.
        rival: The owner of the root, which may be alive on another machine. Then no tier has the
            rollback yet. Empty if there is no such owner.
        error: Why no tier has the rollback.
    """

    rollback: Rollback | None = None
    rival: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """The step from which a branch may begin, and what the ranks know about the run.

    Attributes:
        ref: The step that all ranks have restored, and its attempt.
        heads: On the leader, the newest step of each attempt on any tier or under way.
        rivals: On the leader, the rivals of ``ref`` (see ``rollback.is_newest``).
        last_rollback: The rollback that has counted until now; None if there is none.
        trial: The first try of this job at a step on the new branch; 0 if it has saved nothing.
        is_certain: On the leader, whether ``ref`` was restored into the state of the job. If not,
            no branch begins.
    """

    ref: StepRef
    heads: Collection[StepRef]
    rivals: Collection[StepRef]
    last_rollback: Rollback | None
    trial: int
    is_certain: bool


def begin_branch(
    context: RestoreContext, point: BranchPoint, *, subject: str, discards: bool = False
) -> Rollback | None:
    """Let the history of the run go on from ``point``. All ranks call this alike.

    Args:
        context: The tiers, connections and threads of the restore.
        point: The step, and what is known about the run.
        subject: The subject of the message, which no other call uses.
        discards: Whether the steps that are abandoned are removed now, if a tier has the rollback.

    Returns:
        The rollback, which at least one tier of the leader has, or which each tier gets when this
        job takes its root. None if the step is the newest one already, if the root belongs to
        another job that is alive, or if this job may write to no tier.

    Raises:
        StorageError: No tier took the rollback, and not only for lack of permission.
        CommitTimeout: The leader has not decided in time.
    """
    coordinator, step = context.coordinator, point.ref.step
    durable = [tier for tier in context.tiers if not tier.in_memory] or list(context.tiers)

    def decide() -> _Decision:
        """Put the rollback on the tiers, unless another job may own the root."""
        try:
            rollback = _roll_back(durable, context, point) if point.is_certain else None
            other_owners = _other_owners(durable, context) if rollback is not None else []
            if rollback is None or any(owner.alive for owner in other_owners):
                return _Decision()
            if other_owners:
                return _Decision(rollback, rival=str(other_owners[0]))
            error = _put_everywhere(durable, context.listers, rollback)
            if _is_denied(error):  # The job can save nothing either
                _log.warning("ckpt: %s", _error_text(step, error))
                return _Decision()
            return _Decision(rollback, error=str(error or ""))
        except CkptError as error:
            return _Decision(error=str(error))

    wait_for_leader = Wait(_PATIENCE_SECONDS, "the rollback", step)
    decision = leader_decides(coordinator, subject, decide, wait_for_leader, _Decision)
    if decision.error:
        raise StorageError(point.ref.folder, _error_text(step, decision.error))
    if (rollback := decision.rollback) is None:
        return None
    context.observers.notify(RolledBack(step=step, number=rollback.number))
    if (rank := coordinator.rank) == LEADER:
        other_owner = decision.rival
        _log.warning(
            "ckpt: the run goes on from step %d%s: %s (rollback %d)",
            step,
            f" with the first save of this job, since {other_owner} may be alive"
            if other_owner
            else "",
            _describe_losses(rollback, point),
            rollback.number,
        )
    elif not decision.rival:
        own_tiers = [tier for tier in durable if _leads(tier, rank)]
        _put_everywhere(own_tiers, context.listers, rollback)
    if discards and not decision.rival:
        Discard(context, rollback).run([tier for tier in durable if _leads(tier, rank)])
    return rollback


def _leads(tier: OpenTier, rank: int) -> bool:
    """Return True if ``rank`` is the lowest of those that share the store of a tier."""
    return rank in tier.nodes.lowest_ranks if tier.nodes else rank == LEADER


def share_rollback(tiers: Sequence[OpenTier], listers: Workers, rollback: Rollback | None) -> None:
    """Put ``rollback``, which some tier of the run has, on ``tiers``, which lack it: they were away
    when the run was rolled back. A `StorageError` is only logged. If this job may not write to a
    tier, the next job that saves there puts the rollback.
    """
    if rollback is None:
        return
    for url, error in _answers(tiers, listers, lambda store: put_rollback(store, rollback)).items():
        if error is None:
            _log.info("ckpt: %s has the rollback to step %d now", url, rollback.step)
        elif not _is_denied(error):
            _warn_of_absence(url, rollback, error)


def _warn_of_absence(url: str, rollback: Rollback, error: StorageError) -> None:
    _log.warning("ckpt: the rollback to step %d is not on %s: %s", rollback.step, url, error)


def _is_denied(error: StorageError | None) -> bool:
    """Return True if this job may not write to the store. A refused link is a fault of the folder,
    although its error is an ``AccessDenied``.
    """
    return isinstance(error, AccessDenied) and not isinstance(error, LinkRefused)


def _error_text(step: int, error: object) -> str:
    return (
        f"step {step} is restored, but the later steps are not abandoned: {error}; if the run is "
        "not to go on from this step, give rollback=False"
    )


def _describe_losses(rollback: Rollback, point: BranchPoint) -> str:
    """Return a phrase that says which steps ``rollback`` to ``point`` abandons.

    ``point.last_rollback`` is the one that counted before.
    """
    descriptions: list[str] = []
    if on_branch(point.last_rollback, [point.ref]):
        later_heads = [head for head in point.heads if head.step > rollback.step]
        if abandons(rollback, point.last_rollback, later_heads):
            descriptions.append("later steps")
        if on_branch(point.last_rollback, point.rivals):
            descriptions.append("other attempts at it")
    elif abandons(rollback, point.last_rollback, point.heads):
        # Another branch is taken up again, so lower steps of the present one are lost too.
        descriptions.append("steps of the branch until now")
    if not descriptions:
        return "it is on the current branch again, and no step is abandoned"
    return f"{' and '.join(descriptions)} are abandoned: a tier with a limit removes them first"


def _roll_back(
    tiers: Sequence[OpenTier], context: RestoreContext, point: BranchPoint
) -> Rollback | None:
    """Return a new rollback to ``point``, which no tier has yet; None if the step is the newest one
    already.
    """
    if is_newest(point.last_rollback, point.ref, point.heads, point.rivals):
        return None  # No tier is asked
    rollbacks = (
        _rollbacks_of_run(tiers, context.listers, point.last_rollback)
        if point.last_rollback
        else []
    )
    trials = {context.coordinator.attempt: point.trial} if point.trial else {}
    return roll_back(rollbacks, point.ref, point.heads, rivals=point.rivals, trials=trials)


def _other_owners(tiers: Sequence[OpenTier], context: RestoreContext) -> list[Owner]:
    """Return the owners of the roots that are other jobs and are not known to have ended."""
    owners = _answers(tiers, context.listers, read_owner).values()
    return [
        owner
        for owner in owners
        if isinstance(owner, Owner)
        and owner.attempt != context.coordinator.attempt
        and not (owner.has_ended or owner.gives_way)
    ]


def _rollbacks_of_run(
    tiers: Sequence[OpenTier], listers: Workers, last: Rollback
) -> list[Rollback]:
    """Return ``last`` and the rollbacks on the tiers that answer."""
    answers = _answers(tiers, listers, all_rollbacks).values()
    lists = [answer for answer in answers if isinstance(answer, list)]
    return [last, *chain.from_iterable(lists)]


def _put_everywhere(
    tiers: Sequence[OpenTier], listers: Workers, rollback: Rollback
) -> StorageError | None:
    """Put the rollback on ``tiers``. Return why no tier has taken it; None if one has, or if there
    is no tier. An error other than a lack of permission comes first.
    """
    answers = _answers(tiers, listers, lambda store: put_rollback(store, rollback))
    for url, error in answers.items():
        if error is not None:
            _warn_of_absence(url, rollback, error)
    errors = [error for error in answers.values() if error is not None]
    if len(errors) < len(answers):
        return None
    return min(errors, key=_is_denied, default=None)


def _answers(
    tiers: Sequence[OpenTier], listers: Workers, work: Callable[[StorageBackend], T]
) -> dict[str, T | StorageError]:
    """Return for each tier, by its URL, the result of ``work``, its error, or that the tier is
    slow. The threads ``listers`` do the work, each for one tier.
    """
    futures = {tier.url: listers.submit(_answer, tier.backend, work) for tier in tiers}
    wait(futures.values(), LISTING_SECONDS)
    timeout_error = StorageError("", f"no answer within {LISTING_SECONDS:.0f} s")
    return {
        url: future.result() if future.done() else timeout_error for url, future in futures.items()
    }


def _answer(store: StorageBackend, work: Callable[[StorageBackend], T]) -> T | StorageError:
    try:
        return work(store)
    except StorageError as error:
        return error
