"""Free space when the store of a tier is full, and repeat the failed write once.

If no step can be removed, the save fails on this tier with `OutOfSpace`. Other tiers, and the
checkpoints on this tier, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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

    def write_step(self, job: SaveRequest, write: Callable[[], T]) -> T:
        """Call ``write``, which writes the files of ``job``, and return its result.

        If the store is full and space was freed, call ``write`` once more.
        """
        return _retry_after_eviction(write, partial(self._evict_for, job))

    def request(self, work: Callable[[], T]) -> T:
        """Call ``work``, which writes a small object, and return its result.

        If the store is full and space was freed, call ``work`` once more.
        """
        return _retry_after_eviction(work, self._evict)

    def _evict_for(self, job: SaveRequest) -> bool:
        """Remove steps to free space for ``job``.

        Return True if any were removed and ``job`` can be written again. An image that passes
        through memory in waves cannot be written again.
        """
        restored_ref = self.steps.restored
        if self.quota is not None:
            return not job.is_single_pass and self.quota.evict(
                job.ref, job.plan.size, restored_ref=restored_ref
            )
        return self._evict() and not job.is_single_pass

    def _evict(self) -> bool:
        return self.pruner is not None and self.pruner.evict(self.steps.restored)


def _retry_after_eviction(work: Callable[[], T], evict: Callable[[], bool]) -> T:
    """Call ``work``, and once more if the store was full and ``evict`` has returned True."""
    try:
        return work()
    except OutOfSpace:
        if not evict():
            raise
    return work()
