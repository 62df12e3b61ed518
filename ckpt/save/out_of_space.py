"""What happens when the store of a tier is full: room is made, and the work is tried once more.

If there is no room to make, `OutOfSpace` fails the step on this tier. Other tiers, and the
checkpoints that are there, are not touched.
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
from ckpt.save.rank_files import SaveJob

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoomMaker:
    """Makes room on one tier.

    Attributes:
        quota: That of a tier with a capacity.
        pruner: That of a durable tier.
        steps: The steps of the job on the tier.
    """

    quota: Quota | None
    pruner: Pruner | None
    steps: TierSteps

    def write_step(self, job: SaveJob, write: Callable[[], T]) -> T:
        """Call ``write``, which writes the files of ``job``; once more if room was made."""
        return _once_more(write, partial(self._free_for, job))

    def request(self, work: Callable[[], T]) -> T:
        """Call ``work``, a small request; once more if room was made."""
        return _once_more(work, self._prune)

    def _free_for(self, job: SaveJob) -> bool:
        """Free room for a step. Returns whether ``job`` may be tried again."""
        restored = self.steps.restored
        if self.quota is not None:
            return not job.passes_by and self.quota.evict(job.ref, job.plan.size, restored=restored)
        return self._prune() and not job.passes_by

    def _prune(self) -> bool:
        return self.pruner is not None and self.pruner.make_room(self.steps.restored)


def _once_more(work: Callable[[], T], make_room: Callable[[], bool]) -> T:
    try:
        return work()
    except OutOfSpace:
        if not make_room():
            raise
    return work()
