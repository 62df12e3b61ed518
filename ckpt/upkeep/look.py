"""Read from a tier what `ckpt.upkeep.plan` decides with.

A *rollback* is the record that the run went on from an older step. The steps after that one are
*abandoned*, and the others are on the branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.catalog.step_listing import committed_among
from ckpt.config import Tier
from ckpt.model.keys import StepRef
from ckpt.model.rollback import Rollback, last_rollback, on_branch
from ckpt.retention.policy import Metrics, Retention
from ckpt.storage.api import StorageBackend


def checkpoints(
    backend: StorageBackend,
    tier: Tier,
    nearer_steps: Sequence[StoredStep],
    rollback: Rollback | None = None,
) -> Metrics:
    """Return the checkpoints on a tier that decide which of ``nearer_steps`` the tier lacks and
    would keep, with their metrics. An abandoned one decides nothing, whatever its number is.

    The manifests of the tier are read only if its retention policy removes steps and it lacks a
    step that it takes.

    Args:
        backend: The store of the tier.
        tier: The settings of the tier.
        nearer_steps: The steps that the tier may get, all of one branch.
        rollback: The rollback that counts on nearer tiers; None if there is none.

    Raises:
        StorageError: The store has failed.
    """
    taken_refs = [step.ref for step in nearer_steps if step.ref.step % tier.every == 0]
    present: dict[StepRef, Mapping[str, float]] = {
        ref: {} for ref in committed_among(backend, taken_refs)
    }
    if Retention.of(tier).keeps_all or len(present) == len(taken_refs):
        return present
    inventory = Inventory(backend)
    metrics = {step.ref: step.metrics for step in inventory.look() if step.state == "committed"}
    branch = on_branch(last_rollback([rollback, inventory.rollback]), metrics)
    return present | {ref: metrics[ref] for ref in branch}
