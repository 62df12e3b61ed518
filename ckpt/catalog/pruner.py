"""Pruning beside the saving: after each commit, by the leader, on a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckpt.catalog.holdings import Holdings
from ckpt.catalog.prune import prune
from ckpt.config import SaveConfig
from ckpt.model.layout import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.plan.retention import Retention, unknown_metric
from ckpt.storage.tiers import OpenTier

_log = logging.getLogger("ckpt")


class Pruner:
    """One tier's. Where everything is kept, what failed saves have left is cleared away once, after the first commit.

    Threads: ``ask`` from any; ``close`` from the owner, once.

    Args:
        own: The running attempt.
        protected: Steps that stay whatever the rule.
    """

    def __init__(
        self, tier: OpenTier, own: str, config: SaveConfig, *, protected: Callable[[], frozenset[StepRef]]
    ) -> None:
        self._tier, self._own, self._protected = tier, own, protected
        self._rule = Retention.of(tier.tier)
        self._holdings = Holdings(tier.backend, part=tier.tier.local is True)
        self._workers = Workers("prune", 1, nice=config.nice, cpus=config.cpus)
        self._queued = self._done = self._told = False

    def ask(self) -> None:
        """Prune soon. Returns at once."""
        if not self._queued and not (self._done and self._rule.keeps_all):
            self._queued = True
            self._workers.submit(self._prune)

    def close(self) -> None:
        """Finish what was asked for."""
        self._workers.close()

    def _prune(self) -> None:
        self._queued = False
        try:
            prune(
                self._tier.backend,
                self._rule,
                own=self._own,
                protected=self._protected,
                holdings=self._holdings,
            )
            self._done = True
            if not self._told and (told := unknown_metric(self._rule, self._holdings.metrics)):
                self._told = True
                _log.warning("ckpt: %s: %s", self._tier.url, told)
        except Exception as error:  # noqa: BLE001 - what is not removed now is removed after the next save
            _log.warning("ckpt: old steps on %s were not removed: %s", self._tier.url, error)
