"""Decide which steps of a tier are kept and why, and in which order steps are removed.

``reasons`` applies a retention policy to checkpoints. ``judge`` also considers steps that are not
complete, the jobs that may still finish them, pins, and farther tiers that still read a step. Its
*verdict* on a step is the reasons to keep it. This module removes nothing.

Each try of a job at a step is an *attempt*, which a `StepRef` names, and a checkpoint is a
*committed* one. A *rollback* is the record that the run goes on from an older step, which begins a
*branch*: the later steps are *abandoned*. The *heirs* of a step are the steps that refer to its
files. An *outer* base is a step in another root that a step here refers to. On a tier that is local
to a node, a step may be a *part*: only the files of some ranks. A pin with the end ``BASE_END``
belongs to another run, whose increments refer to the step. The *claim* of a job decides which steps
of a root it may remove.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from ckpt.catalog.inventory import StoredStep, heirs_of
from ckpt.catalog.step_listing import is_committed
from ckpt.config import Best, Tier, check_retention
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef
from ckpt.model.metrics import best_steps
from ckpt.root.claim import Claim
from ckpt.root.pins import BASE_END
from ckpt.storage.api import StorageBackend

GRACE_SECONDS: Final = 24 * 3600.0
"""How old the remains of a save must be before they are removed, since a process may still commit a
younger save.
"""

NEWEST: Final = "newest"
NEWEST_OWN: Final = "newest of the running job"
YOUNG: Final = "less than a day old, and its job may still finish it"
FARTHER_NEED: Final = "a farther tier waits for it"
PIN: Final = "pinned"
OTHER_RUN: Final = "base of another run"
BRANCH_WITHOUT_STEP: Final = "abandoned, but the branch in its place has no step yet"
ABSENT_BASE: Final = "a part of it is in another root or folder, which may come back"
FOREIGN: Final = "another job's, committed after this one had taken the root"
Metrics = Mapping[StepRef, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The retention policy of a tier.

    Attributes:
        keep_last: How many of the newest steps are kept; None to keep all steps.
        keep_every: Every step that is a multiple of this number is kept in addition.
        keep_best: The steps with the best values of a metric are kept in addition.
        best_counts: Whether the best steps count towards ``keep_last``. Then fewer of the newest
            steps are kept, but at least one.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: Best | None = None
    best_counts: bool = False

    def __post_init__(self) -> None:
        check_retention(self.keep_last, self.keep_every, self.keep_best)

    @classmethod
    def of(cls, tier: Tier) -> Retention:
        """Return the retention policy that the settings of a tier describe."""
        return cls(
            keep_last=tier.keep_last,
            keep_every=tier.keep_every,
            keep_best=tier.best,
            best_counts=tier.best_counts,
        )

    @property
    def keeps_all(self) -> bool:
        return self.keep_last is None


def reasons(
    committed: Collection[StepRef], rule: Retention, metrics: Metrics, *, own: str = ""
) -> dict[StepRef, tuple[str, ...]]:
    """Return the reasons to keep each checkpoint of ``committed``. A checkpoint without a reason
    may be removed.

    All attempts at a step have the same reasons.

    Args:
        committed: The checkpoints of a tier.
        rule: The retention policy.
        metrics: The metrics of the steps. Steps and names may be missing. Infinite values and NaN
            are never the best.
        own: The running attempt; empty for none. Its newest step is always kept, since after a
            rollback the abandoned steps may have higher numbers.
    """
    numbers = sorted({ref.step for ref in committed}, reverse=True)
    multiples = {step for step in numbers if rule.keep_every and step % rule.keep_every == 0}
    best_numbers = set(_best(committed, rule.keep_best, metrics)) if rule.keep_best else set[int]()
    count = len(numbers) if rule.keep_last is None else rule.keep_last
    if rule.best_counts:
        count = max(1, count - len(best_numbers - set(numbers[:count])))
    newest_numbers = set(numbers[:count])
    newest_own = newest(committed, own=own)
    # Without ``keep_best``, no step is in the group of the best, and its name is not used.
    groups = {
        NEWEST: newest_numbers,
        f"multiple of {rule.keep_every}": multiples,
        f"best {rule.keep_best.metric}" if rule.keep_best else "": best_numbers,
        NEWEST_OWN: {newest_own.step} - newest_numbers if newest_own else set(),
    }
    return {
        ref: tuple(name for name, numbers in groups.items() if ref.step in numbers)
        for ref in committed
    }


def unknown_metric(rule: Retention, metrics: Collection[Mapping[str, float]]) -> str:
    """Return a warning if the steps have metrics, but none has the metric that ``rule`` names.

    Return an empty string in all other cases.
    """
    names = sorted({name for values in metrics for name in values})
    if rule.keep_best is None or not names or rule.keep_best.metric in names:
        return ""
    return (
        f"keep_best goes by {rule.keep_best.metric!r}, which no checkpoint has: there is "
        f"{', '.join(map(repr, names))}"
    )


def history(steps: Iterable[StoredStep], head: StepRef) -> list[StoredStep]:
    """Return the checkpoints of ``steps`` that led to the step ``head``, with ``head``, newest step
    first.

    These are the steps of the job of ``head`` up to ``head``, and the steps of other jobs before
    the first step of that job, over any number of jobs. A step of another job with a higher number
    was given up when the job of ``head`` went back. Of several attempts at a step, the one with the
    youngest manifest counts.
    """
    committed = [step for step in steps if step.state == "committed" and step.ref <= head]
    first_number = min(
        (step.ref.step for step in committed if step.ref.job == head.job), default=head.step
    )
    latest: dict[int, StoredStep] = {}
    for step in sorted(committed, key=lambda step: (step.created_at, step.ref)):
        if step.ref.job == head.job or step.ref.step < first_number:
            latest[step.ref.step] = step
    return [latest[step] for step in sorted(latest, reverse=True)]


def on_branch(committed: Sequence[StoredStep]) -> list[StoredStep]:
    """Return those of ``committed``, checkpoints of a tier, that no rollback has abandoned. If all
    are abandoned, return all.
    """
    return [step for step in committed if not step.is_abandoned] or list(committed)


def first_to_go(
    committed: Collection[StepRef],
    rule: Retention,
    metrics: Metrics | None = None,
    *,
    own: str = "",
) -> list[StepRef]:
    """Return all of ``committed`` in the order in which a full tier removes them.

    First come the steps that the policy does not keep, then the steps that are kept as newest ones,
    then the steps that are kept for their number or metric. In each group, the steps of other
    attempts than ``own`` come first, and steps are in ascending order.
    """
    reasons_by_ref = reasons(committed, rule, metrics or {}, own=own)

    def removal_order(ref: StepRef) -> tuple[int, bool, StepRef]:
        # No step is both ``NEWEST`` and ``NEWEST_OWN``. So the first entry is 0 for a step that is
        # not kept, 1 for one of the newest, and 2 for one that is kept for its number or metric.
        # After a rollback, steps of other attempts may have higher numbers, but they are older.
        is_own = ref.job == own
        return (
            2 if set(reasons_by_ref[ref]) - {NEWEST, NEWEST_OWN} else len(reasons_by_ref[ref]),
            is_own,
            ref,
        )

    return sorted(committed, key=removal_order)


def newest(
    committed: Collection[StepRef], *, own: str = "", dates: Mapping[StepRef, float] | None = None
) -> StepRef | None:
    """Return the step that a restarted job restores: the newest step of the attempt ``own``.

    If this attempt has no step, return the newest step of all; None if ``committed`` is empty. Of
    several attempts at a step, return the one with the youngest manifest.

    Args:
        dates: When the manifests were made, in seconds since 1970. Without a date, the attempts at
            a step are compared by their names.
    """
    own_refs = [ref for ref in committed if own and ref.job == own]
    known_dates = dates or {}
    return max(
        own_refs or committed,
        key=lambda ref: (ref.step, known_dates.get(ref, 0.0), ref),
        default=None,
    )


def _best(committed: Collection[StepRef], rule: Best, metrics: Metrics) -> list[int]:
    """Return the numbers of the best steps, best first."""
    values = [(ref.step, metrics.get(ref, {}).get(rule.metric, math.nan)) for ref in committed]
    return best_steps(values, rule.mode)[: rule.count]


class StepGuard(Protocol):
    """The steps of one tier that are still needed.

    The answers change while a job runs, so a caller asks again after each listing of the tier.

    Thread safety: all methods may be called from any thread.
    """

    def awaited_refs(self) -> frozenset[StepRef]:
        """Return the steps that a farther tier still reads from this tier."""
        ...

    def protected_refs(self) -> frozenset[StepRef]:
        """Return the steps that no retention policy may remove: the steps of ``awaited_refs``, and
        the steps that a subclass adds.
        """
        return self.awaited_refs()

    def is_owed(self, ref: StepRef) -> bool:
        """Return True if a farther tier may want and lack ``ref``, a step of an earlier job. A full
        tier removes such a step last. This sends no request.
        """
        del ref
        return False

    def is_elsewhere(self, ref: StepRef) -> bool:
        """Return True if another durable tier has the checkpoint ``ref``. This may send requests to
        the other tiers.
        """
        ...


class FixedGuard(StepGuard):
    """A guard whose steps do not change.

    Args:
        refs: The steps that must stay.
        other_stores: The stores of the other durable tiers. One that does not answer counts as one
            that has no step.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(
        self, refs: Iterable[StepRef] = (), other_stores: Iterable[StorageBackend] = ()
    ) -> None:
        self._refs, self._other_stores = frozenset(refs), tuple(other_stores)

    def awaited_refs(self) -> frozenset[StepRef]:
        return self._refs

    def is_elsewhere(self, ref: StepRef) -> bool:
        for store in self._other_stores:
            with suppress(CkptError):
                if is_committed(store, ref):
                    return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one attempt at a step.

    Attributes:
        step: The attempt.
        reasons: The reasons to keep the attempt. Without a reason, the attempt is removed.
    """

    step: StoredStep
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneContext:
    """The job that prunes, and the steps that it must keep beside those of the retention policy.

    Attributes:
        own: The running attempt; empty for none. Its newest step stays, even if other attempts have
            later steps.
        alive: Whether the running attempt is known to be alive. If so, its steps that are not
            complete stay until they are old. If their age is not known
            (``StoredStep.last_change`` is None), they always stay.
        grace_seconds: The age from which a step that is not complete counts as remains.
        includes_undated: Whether a step that is not complete also counts as remains if its age is
            not known.
        guard: The steps that the policy may not remove. ``judge`` reads them after the steps were
            listed.
        claim: The claim of the job on the root; None if a person decides (``ckpt prune``).
    """

    own: str = ""
    alive: bool = True
    grace_seconds: float = GRACE_SECONDS
    includes_undated: bool = False
    guard: StepGuard = field(default_factory=FixedGuard)
    claim: Claim | None = None


NO_JOB: Final = PruneContext()


def judge(
    steps: Sequence[StoredStep], rule: Retention, context: PruneContext = NO_JOB
) -> list[Verdict]:
    """Return the reasons to keep each of ``steps``, in the same order. Steps without a
    reason are to be removed.

    Args:
        steps: The steps of the tier, as an inventory lists them.
        rule: The retention policy.
        context: The job that prunes, and the steps that it must keep beside those of ``rule``.
    """
    own, claim = context.own, context.claim
    committed = [step for step in steps if step.state == "committed"]
    branch = on_branch(committed)
    metrics = {step.ref: step.metrics for step in branch}  # Of each checkpoint of the branch
    reasons_by_ref = reasons(metrics, rule, metrics, own=own)
    abandoned_refs = {step.ref for step in committed} - metrics.keys()
    abandoned_reasons: tuple[str, ...] = ()
    if rule.keeps_all:
        abandoned_reasons = (NEWEST,)
    elif not any(step.follows_rollback for step in branch):
        abandoned_reasons = (BRANCH_WITHOUT_STEP,)
    reasons_by_ref |= dict.fromkeys(abandoned_refs, abandoned_reasons)
    protected_refs = context.guard.protected_refs()

    def reasons_of(step: StoredStep) -> tuple[str, ...]:
        if step.ref in protected_refs:
            return (*reasons_by_ref.get(step.ref, ()), FARTHER_NEED)
        if step.pins:
            is_base = any(pin.until == BASE_END for pin in step.pins)
            return (*reasons_by_ref.get(step.ref, ()), OTHER_RUN if is_base else PIN)
        if step.state == "committed":
            is_foreign = claim is not None and not claim.may_remove(step)
            return reasons_by_ref[step.ref] or ((FOREIGN,) if is_foreign else ())
        if step.state == "unsupported":
            return ("written in another format",)
        if step.state == "damaged" and not metrics:
            return ("nothing here is whole",)
        if step.state == "damaged" and step.outer_bases:
            return (ABSENT_BASE,)
        is_dead = claim is not None and claim.is_dead(step.ref) and not step.is_part
        # ``has_removal_begun``: a removal of the step was interrupted, or is under way.
        if step.state == "incomplete" and (step.has_removal_begun or is_dead):
            return ()
        is_past_grace = is_old(step, context.grace_seconds)
        if context.alive and own and step.ref.job == own and not is_past_grace:
            return ("the running job's",)
        is_young = not (is_past_grace or (context.includes_undated and step.last_change is None))
        is_in_use = step.objects or not all(write.abandoned for write in step.unfinished_writes)
        return (YOUNG,) if is_young and is_in_use else ()

    verdicts = [Verdict(step=step, reasons=reasons_of(step)) for step in steps]
    heirs = heirs_of(verdict.step for verdict in verdicts if verdict.reasons)
    return [
        replace(verdict, reasons=(heir_reason(heirs[verdict.step.ref]),))
        if verdict.step.ref in heirs and not verdict.reasons
        else verdict
        for verdict in verdicts
    ]


def heirs_first(steps: Iterable[StoredStep]) -> list[StoredStep]:
    """Return ``steps`` in ascending order, each after those that refer to it."""
    present = list(steps)
    heirs = heirs_of(present)
    return sorted(present, key=lambda step: (step.ref in heirs, step.ref))


def heir_reason(heirs: Iterable[StepRef]) -> str:
    """Return the reason to keep a step that the increments of ``heirs`` refer to."""
    return f"step {max(heirs).step} refers to it"


def is_old(step: StoredStep, grace_seconds: float) -> bool:
    """Return True if no file of the step was put, and no unfinished write of it has changed, in the
    last ``grace_seconds``. Return False if this is not known (``step.last_change`` is None).

    A save that is under way puts files all the time.
    """
    return step.last_change is not None and time.time() - step.last_change > grace_seconds
