"""Which checkpoints of a tier may go, and which go first?"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from ckpt.config import Best, Tier, check_retention
from ckpt.model.keys import StepRef

NEWEST: Final = "newest"
NEWEST_OWN: Final = "newest of the running job"
Metrics = Mapping[StepRef, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a tier keeps. Without ``keep_last`` it keeps everything.

    Attributes:
        keep_last: This many of the newest steps.
        keep_every: Beside them, every step that is a multiple of this number.
        keep_best: Beside them, the steps with the best metric.
        best_counts: The best steps are among ``keep_last``, and not beside them.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: Best | None = None
    best_counts: bool = False

    def __post_init__(self) -> None:
        check_retention(self.keep_last, self.keep_every, self.keep_best)

    @classmethod
    def of(cls, tier: Tier) -> Retention:
        """Return the policy of a tier."""
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
    """Return why each of ``committed`` is kept; a step without a reason need not be kept.

    All attempts at a step stay or go together.

    Args:
        metrics: The metrics of the steps. Steps and names may be missing, and infinite values and
            NaN are never the best.
        own: The running attempt. Its newest step always stays: after a rollback the abandoned steps
            may have higher numbers.
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
    """Return a sentence if the rule names a metric that no step has, though they have others.

    Otherwise it is empty.
    """
    names = sorted({name for each in metrics for name in each})
    if rule.keep_best is None or not names or rule.keep_best.metric in names:
        return ""
    return (
        f"keep_best goes by {rule.keep_best.metric!r}, which no checkpoint has: there is "
        f"{', '.join(map(repr, names))}"
    )


def first_to_go(
    committed: Collection[StepRef],
    rule: Retention,
    metrics: Metrics | None = None,
    *,
    own: str = "",
) -> list[StepRef]:
    """Return all of ``committed`` in the order in which a full tier removes them: first what the
    rule does not keep, then what is kept as new, last what is kept for its number or metric. Each
    group is in ascending order.
    """
    why = reasons(committed, rule, metrics or {}, own=own)

    def rank(ref: StepRef) -> tuple[int, bool, StepRef]:
        # After a rollback, the steps of other attempts are the older ones.
        mine = bool(own) and ref.attempt.startswith(own)
        return (2 if set(why[ref]) - {NEWEST, NEWEST_OWN} else len(why[ref]), mine, ref)

    return sorted(committed, key=rank)


def newest(committed: Collection[StepRef], *, own: str = "") -> StepRef | None:
    """Return the step that a restarted job wants: the newest of the running attempt, else of
    all.
    """
    mine = [ref for ref in committed if own and ref.attempt.startswith(own)]
    return max(mine or committed, default=None)


def _best(committed: Collection[StepRef], rule: Best, metrics: Metrics) -> list[int]:
    """Return the best steps; of equal ones the newest."""
    values = [(metrics.get(ref, {}).get(rule.metric, math.nan), ref.step) for ref in committed]
    sign = -1 if rule.mode == "max" else 1
    ranked = sorted((sign * value, -step) for value, step in values if math.isfinite(value))
    return list(dict.fromkeys(-step for _, step in ranked))[: rule.count]
