"""Decide from listings which steps a farther tier gets. This module reads and writes nothing.

The backfill, the agent and ``ckpt prune`` decide with this module. So retention keeps on a nearer
tier what the backfill or the agent then copies. docs/decisions/0032 shows the cases as a table.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.catalog.inventory import StoredStep
from ckpt.config import Tier
from ckpt.retention.policy import Metrics, Retention, reasons


def missing_steps(
    tier: Tier, present: Metrics, nearer_steps: Sequence[StoredStep], limit: int | None = None
) -> list[StoredStep]:
    """Return those of ``nearer_steps`` that a tier lacks and would keep, newest first.

    The tier would keep a step if it takes the step (``Tier.every``), and if its retention policy
    keeps the step beside those of ``present`` and all others that the tier lacks. So no copy is
    made that the next pruning removes.

    Args:
        tier: The settings of the tier.
        present: The checkpoints on the tier, each with its metrics. If the tier keeps all steps,
            only those of ``nearer_steps`` matter, and no metrics do.
        nearer_steps: The steps to choose from, which are checkpoints on nearer tiers.
        limit: The most steps to return; None for all.
    """
    absent = {
        step.ref: step
        for step in nearer_steps
        if step.ref.step % tier.every == 0 and step.ref not in present
    }
    rule = Retention.of(tier)
    if not rule.keeps_all and absent:
        metrics = {**present, **{ref: step.metrics for ref, step in absent.items()}}
        # Why the policy keeps each step; a step without reasons is removed
        reasons_by_ref = reasons(metrics, rule, metrics)
        absent = {ref: step for ref, step in absent.items() if reasons_by_ref[ref]}
    return [absent[ref] for ref in sorted(absent, reverse=True)][:limit]
