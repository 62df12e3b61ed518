"""Pruning beside the saving: after each commit, by the leader, on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from ckpt.config import SaveConfig
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef
from ckpt.model.units import size
from ckpt.pipeline.workers import Workers
from ckpt.retention.claim import Claim, job_of
from ckpt.retention.inventory import Inventory, StoredStep
from ckpt.retention.policy import Retention, unknown_metric
from ckpt.retention.prune import carry_out, discard_left, judge, prune
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")


class Pruner:
    """One tier's. Where everything is kept, what failed saves have left is cleared away once, after the first commit.

    Threads: ``ask`` and ``clear`` from any; ``make_room`` from any that serves the tier; ``close`` from the owner, once.

    Args:
        claim: The job's hold on the root.
        leads: Whether this rank prunes for all that share the store. Others only make room, of what they know to be in nobody's use.
        protected: Steps that stay whatever the rule.
    """

    def __init__(
        self,
        tier: OpenTier,
        claim: Claim,
        config: SaveConfig,
        *,
        leads: bool,
        protected: Callable[[], frozenset[StepRef]],
    ) -> None:
        self._tier, self._claim, self._leads, self._protected = tier, claim, leads, protected
        self._rule = Retention.of(tier.tier)
        self._inventory = Inventory(tier.backend, part=tier.tier.local is True)
        self._workers = Workers("prune", 1, nice=config.nice, cpus=config.cpus)
        self._queued = self._done = self._told = False

    def ask(self) -> None:
        """Prune soon. Returns at once."""
        if self._leads and not self._queued and not (self._done and self._rule.keeps_all):
            self._queued = True
            self._workers.submit(self._prune)

    def clear(self) -> None:
        """Free what jobs that have ended had begun, and what writes of theirs take. Returns at once if no job is known to have ended."""
        if self._leads:
            clearing = self._workers.submit(self._clear)
            if self._claim.has_heritage:
                clearing.result()  # kills in quick succession must not fill the store

    def make_room(self, restored: int | None) -> bool:
        """The store is full: remove now what need not be kept. Returns whether anything was removed.

        Args:
            restored: What the job goes on from; stays.
        """
        return self._workers.submit(self._make_room, restored).result()

    def close(self) -> None:
        """Finish what was asked for."""
        self._workers.close()

    def _prune(self) -> None:
        self._queued = False
        try:
            prune(
                self._tier.backend,
                self._rule,
                own=self._claim.own,
                protected=self._protected,
                inventory=self._inventory,
                claim=self._claim,
            )
            self._done = True
            if not self._told and (told := unknown_metric(self._rule, self._inventory.metrics)):
                self._told = True
                _log.warning("ckpt: %s: %s", self._tier.url, told)
        except Exception as error:  # noqa: BLE001 - what is not removed now is removed after the next save
            _log.warning("ckpt: old steps on %s were not removed: %s", self._tier.url, error)

    def _clear(self) -> None:
        try:
            discard_left(self._tier.backend, self._claim)
            if self._claim.has_heritage:
                found = self._inventory.look(begun=True)
                remains = [held for held in found if self._claim.is_dead(held.ref)]
                judged = judge(remains, self._rule, own=self._claim.own, claim=self._claim)
                carry_out(self._tier.backend, judged, claim=self._claim)
        except Exception as error:  # noqa: BLE001 - what is not removed now is removed after the next save
            _log.warning("ckpt: what dead jobs left on %s was not removed: %s", self._tier.url, error)

    def _make_room(self, restored: int | None) -> bool:
        try:
            self._claim.use()
            found = self._inventory.look(begun=self._rule.keeps_all)
            judged = judge(
                found, self._rule, own=self._claim.own, protected=self._protected, claim=self._claim
            )
            going = [
                replace(one, kept=()) if one.held.is_part and self._claim.is_dead(one.held.ref) else one
                for one in judged
                if one.held.ref.step != restored and (self._leads or self._is_ours(one.held))
            ]
            gone = carry_out(self._tier.backend, going, claim=self._claim)
        except CkptError as error:
            _log.warning("ckpt: %s is full, and no room could be made: %s", self._tier.url, error)
            return False
        if gone:
            freed = size(sum(one.nbytes for one in gone))
            _log.warning("ckpt: %s is full: %s of what need not be kept was removed", self._tier.url, freed)
        return bool(gone)

    def _is_ours(self, held: StoredStep) -> bool:
        """Whether every rank knows that it may go. Which steps of the job before a farther tier lacks, the leader alone knows."""
        remains = held.state == "begun" and (held.is_cut or self._claim.is_dead(held.ref))
        return remains or job_of(held.ref) == self._claim.own
