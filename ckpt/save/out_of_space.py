"""Free space when the store of a tier is full, and repeat the failed write once.

If no step can be removed, the save fails on this tier with `OutOfSpace`. Other tiers, and the
checkpoints on this tier, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckpt.errors import OutOfSpace
from ckpt.retention.pruner import Pruner
from ckpt.retention.quota import Quota
from ckpt.save.job_steps import TierSteps
from ckpt.save.save_request import SaveRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryWhenFull:
    """Frees space on a tier whose store is full, and then repeats the write that has failed.

    Attributes:
        quota: The quota of the tier; None if the tier has no capacity.
        pruner: The pruner of the tier; None if the tier is in memory.
        steps: The steps of the job on the tier.
    """

    quota: Quota | None
    pruner: Pruner | None
    steps: TierSteps

    def call(self, work: Callable[[], T], job: SaveRequest | None = None) -> T:
        """Call ``work``, which writes the files of ``job``, or else a small object, and return its
        result.

        If the store is full and space was freed, call ``work`` once more.
        """
        try:
            return work()
        except OutOfSpace:
            if not self._evict(job):
                raise
        return work()

    def _evict(self, job: SaveRequest | None) -> bool:
        """Remove steps to free space.

        Return True if any were removed and ``job`` can be written again. An image that passes
        through memory in waves cannot be written again.
        """
        restored_ref, can_repeat = self.steps.restored, job is None or not job.is_single_pass
        if job is not None and self.quota is not None:
            return can_repeat and self.quota.evict(
                job.ref, job.plan.size, restored_ref=restored_ref
            )
        return self.pruner is not None and self.pruner.evict(restored_ref) and can_repeat
