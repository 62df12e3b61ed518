"""Remove the steps that a restore has abandoned, at once (``discard_newer=True``).

The rollback is on the tiers before the first step is removed. So a removal that is cut short leaves
abandoned steps, which retention removes later.

A *claim* is what this job knows about a root and its owner, and says what the job may remove. A
*verdict* has the reasons to keep a step, and ``carry_out`` removes the steps without a reason. A
*pin* keeps a step from being removed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef
from ckpt.model.readable import size
from ckpt.model.rollback import Rollback
from ckpt.restore.restorer import RestoreContext
from ckpt.retention.policy import Verdict
from ckpt.retention.pruner import carry_out
from ckpt.root.claim import Claim
from ckpt.root.owner import Owner
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Discard:
    """The steps of a tier that go: those that ``rollback`` has abandoned and that are newer than
    the step to which it goes back.
    """

    context: RestoreContext
    rollback: Rollback

    def run(self, tiers: Sequence[OpenTier]) -> None:
        """Remove the steps from ``tiers``, but those that are pinned or that saves under way still
        read. An error of a tier is only logged: retention removes the steps there later.
        """
        for tier in tiers:
            try:
                self._remove_from(tier)
            except CkptError as error:
                _log.warning("ckpt: abandoned steps stay on %s for now: %s", tier.url, error)

    def _remove_from(self, tier: OpenTier) -> None:
        """Remove the steps from ``tier``, and log how many."""
        context = self.context
        attempt = context.coordinator.attempt
        claim = context.claim_of(tier.url) or Claim(tier.backend, Owner.of_this_process(attempt))
        claim.use()  # Raises an error if the root belongs to another job that may be alive
        refs_in_use = context.steps_in_use()
        # A tier that is local to a node may have only a part of each step.
        steps = Inventory(tier.backend, part=tier.tier.local is True).look()
        verdicts = [
            Verdict(step=step, reasons=self._reasons(step, claim, refs_in_use)) for step in steps
        ]
        removals = carry_out(tier.backend, verdicts, claim=claim)
        _log.info(
            "ckpt: %d abandoned steps of %s were removed from %s",
            len(removals),
            size(sum(removal.nbytes for removal in removals)),
            tier.url,
        )

    def _reasons(
        self, step: StoredStep, claim: Claim, refs_in_use: Collection[StepRef]
    ) -> tuple[str, ...]:
        """Return the reasons to keep ``step``."""
        if step.ref.step <= self.rollback.step or self.rollback.keeps(step.ref):
            return ("it is not abandoned",)
        if step.pins or step.ref in refs_in_use or not claim.may_remove(step):
            return ("it is in use",)
        return ()
