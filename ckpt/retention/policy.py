"""Decide which steps of a tier are kept and why, and in which order steps are removed.

``reasons`` applies a retention policy to checkpoints. ``judge`` also considers steps that are not
complete, the jobs that may still finish them, pins, and farther tiers that still read a step. This
module removes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from ckpt.catalog.index import is_committed
from ckpt.catalog.inventory import StoredStep
from ckpt.config import Best, Tier, check_retention
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef
from ckpt.retention.claim import Claim
from ckpt.storage.api import StorageBackend

GRACE_SECONDS: Final = 24 * 3600.0
"""How old the remains of a save must be before they are removed, since a process may still commit a
younger save.
"""

NEWEST: Final = "newest"
NEWEST_OWN: Final = "newest of the running job"
YOUNG: Final = "less than a day old, and its job may still finish it"
NEEDED: Final = "a farther tier waits for it"
PINNED: Final = "pinned"
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
    every = {step for step in numbers if rule.keep_every and step % rule.keep_every == 0}
    best = set(_best(committed, rule.keep_best, metrics)) if rule.keep_best else set[int]()
    most = len(numbers) if rule.keep_last is None else rule.keep_last
    if rule.best_counts:
        most = max(1, most - len(best - set(numbers[:most])))
    last = set(numbers[:most])
    mine = newest(committed, own=own)
    why = {
        NEWEST: last,
        f"multiple of {rule.keep_every}": every,
        f"best {rule.keep_best.metric}" if rule.keep_best else "": best,
        NEWEST_OWN: {mine.step} - last if mine else set(),
    }
    return {ref: tuple(name for name, kept in why.items() if ref.step in kept) for ref in committed}


def unknown_metric(rule: Retention, metrics: Collection[Mapping[str, float]]) -> str:
    """Return a warning if the steps have metrics, but none has the metric that ``rule`` names.

    Return an empty string in all other cases.
    """
    names = sorted({name for each in metrics for name in each})
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
    committed = [held for held in steps if held.state == "committed" and held.ref <= head]
    first = min(
        (held.ref.step for held in committed if held.ref.job == head.job), default=head.step
    )
    chosen: dict[int, StoredStep] = {}
    for held in sorted(committed, key=lambda held: (held.created_at, held.ref)):
        if held.ref.job == head.job or held.ref.step < first:
            chosen[held.ref.step] = held
    return [chosen[step] for step in sorted(chosen, reverse=True)]


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
    why = reasons(committed, rule, metrics or {}, own=own)

    def rank(ref: StepRef) -> tuple[int, bool, StepRef]:
        # After a rollback, steps of other attempts may have higher numbers, but they are older.
        mine = ref.job == own
        return (2 if set(why[ref]) - {NEWEST, NEWEST_OWN} else len(why[ref]), mine, ref)

    return sorted(committed, key=rank)


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
    mine = [ref for ref in committed if own and ref.job == own]
    known = dates or {}
    return max(
        mine or committed, key=lambda ref: (ref.step, known.get(ref, 0.0), ref), default=None
    )


def _best(committed: Collection[StepRef], rule: Best, metrics: Metrics) -> list[int]:
    """Return the numbers of the best steps, best first. If the metrics of steps are equal, the
    newer step is better.
    """
    values = [(metrics.get(ref, {}).get(rule.metric, math.nan), ref.step) for ref in committed]
    sign = -1 if rule.mode == "max" else 1
    ranked = sorted((sign * value, -step) for value, step in values if math.isfinite(value))
    return list(dict.fromkeys(-step for _, step in ranked))[: rule.count]


class StepGuard(Protocol):
    """The steps of one tier that are still needed.

    The answers change while a job runs, so a caller asks again after each listing of the tier.

    Thread safety: all methods may be called from any thread.
    """

    def waiting(self) -> frozenset[StepRef]:
        """Return the steps that a farther tier still reads from this tier."""
        ...

    def protected(self) -> frozenset[StepRef]:
        """Return the steps that no retention policy may remove: the steps of ``waiting``, and the
        steps that a subclass adds.
        """
        return self.waiting()

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
        elsewhere: The stores of the other durable tiers. One that does not answer counts as one
            that has no step.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(
        self, refs: Iterable[StepRef] = (), elsewhere: Iterable[StorageBackend] = ()
    ) -> None:
        self._refs, self._elsewhere = frozenset(refs), tuple(elsewhere)

    def waiting(self) -> frozenset[StepRef]:
        return self._refs

    def is_elsewhere(self, ref: StepRef) -> bool:
        for store in self._elsewhere:
            with suppress(CkptError):
                if is_committed(store, ref):
                    return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict on one attempt at a step.

    Attributes:
        held: The attempt.
        kept: The reasons to keep the attempt. Without a reason, the attempt is removed.
    """

    held: StoredStep
    kept: tuple[str, ...]


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
        undated: Whether a step that is not complete also counts as remains if its age is not known.
        guard: The steps that the policy may not remove. ``judge`` reads them after the steps were
            listed.
        claim: The claim of the job on the root; None if a person decides (``ckpt prune``).
    """

    own: str = ""
    alive: bool = True
    grace_seconds: float = GRACE_SECONDS
    undated: bool = False
    guard: StepGuard = field(default_factory=FixedGuard)
    claim: Claim | None = None


NO_JOB: Final = PruneContext()


def judge(
    found: Sequence[StoredStep], rule: Retention, context: PruneContext = NO_JOB
) -> list[Judged]:
    """Return the reasons to keep each of the steps ``found``, in the same order. Steps without a
    reason are to be removed.

    Args:
        found: The steps of the tier, as an inventory lists them.
        rule: The retention policy.
        context: The job that prunes, and the steps that it must keep beside those of ``rule``.
    """
    own, claim = context.own, context.claim
    metrics = {held.ref: held.metrics for held in found if held.state == "committed"}
    why = reasons(metrics, rule, metrics, own=own)
    needed = context.guard.protected()

    def kept(held: StoredStep) -> tuple[str, ...]:
        if held.ref in needed:
            return (*why.get(held.ref, ()), NEEDED)
        if held.pins:
            return (*why.get(held.ref, ()), PINNED)
        if held.state == "committed":
            foreign = claim is not None and not claim.may_remove(held)
            return why[held.ref] or ((FOREIGN,) if foreign else ())
        if held.state == "unsupported":
            return ("written in another format",)
        if held.state == "damaged" and not metrics:
            return ("nothing here is whole",)
        is_dead = claim is not None and claim.is_dead(held.ref) and not held.is_part
        # ``is_cut``: a removal of the step was interrupted, or is under way.
        if held.state == "incomplete" and (held.is_cut or is_dead):
            return ()
        old = is_old(held, context.grace_seconds)
        if context.alive and own and held.ref.job == own and not old:
            return ("the running job's",)
        young = not (old or (context.undated and held.last_change is None))
        in_use = held.objects or not all(cut.abandoned for cut in held.unfinished_writes)
        return (YOUNG,) if young and in_use else ()

    return [Judged(held=held, kept=kept(held)) for held in found]


def is_old(held: StoredStep, grace_seconds: float) -> bool:
    """Return True if no file of the step was put, and no unfinished write of it has changed, in the
    last ``grace_seconds``. Return False if this is not known (``held.last_change`` is None).

    A save that is under way puts files all the time.
    """
    return held.last_change is not None and time.time() - held.last_change > grace_seconds
