"""Records which steps the tiers in memory keep in which slots."""

from __future__ import annotations

import threading

from ckpt.coordination.step_files import delete_files
from ckpt.model.keys import StepRef, data_name, fragment_name
from ckpt.save.job_steps import JobSteps
from ckpt.storage.tiers import OpenTier


class SlotSteps:
    """Records the steps of this rank that tiers in memory keep in the slots in which they were
    staged.

    The slot pool asks this object before it fills a slot again. The writers of tiers in memory
    report to this object which steps they keep. Before a step is committed, each rank votes that
    its part is durable. The verdict on the step is the outcome. A step with a vote of this rank
    and without a verdict is in doubt.

    Args:
        rank: The number of this rank, which is a part of the names of its files.
        job_steps: The steps of the job. Their ``durable_step`` decides which slots are needed.

    Thread safety: all methods may be called from any thread. ``_lock`` guards ``_steps``,
    ``_in_doubt`` and ``_committed_step``. No request to a store is made under the lock; only the
    owner of a slot calls ``evict`` for it.
    """

    def __init__(self, rank: int, job_steps: JobSteps) -> None:
        self._job_steps, self.reservation = job_steps, job_steps.reservation
        self._names = (fragment_name(rank), data_name(rank, is_encoded=False))
        self._lock = threading.Lock()
        self._steps: dict[str, dict[str, tuple[OpenTier, StepRef]]] = {}
        """Path of the slot -> URL -> the tier, and the step that it keeps there."""
        self._in_doubt: set[int] = set()
        """The steps that this rank has voted for without having seen the verdict."""
        self._committed_step = -1

    def keep(self, path: str, tier: OpenTier, ref: StepRef) -> None:
        """Note that the slot ``path`` holds ``ref``, which ``tier`` keeps there."""
        with self._lock:
            self._steps.setdefault(path, {})[tier.url] = tier, ref

    def set_voted(self, ref: StepRef) -> None:
        """Note that this rank is about to vote that its part of ``ref`` is durable in a slot. From
        now on other ranks may commit ``ref``, even if this rank sees no verdict.
        """
        with self._lock:
            self._in_doubt.add(ref.step)

    def set_committed(self, ref: StepRef) -> None:
        """Note that ``ref``, which a slot holds, is committed on a tier in memory. An abandoned
        step does not count.
        """
        if self._job_steps.has_abandoned(ref):
            return
        with self._lock:
            self._committed_step = ref.step
            self._in_doubt = {step for step in self._in_doubt if step > ref.step}

    def set_restored(self, ref: StepRef) -> None:
        """Note that the job continues from ``ref``. Later steps are not needed any more."""
        with self._lock:
            self._committed_step, self._in_doubt = ref.step, set()

    def set_decided(self, ref: StepRef) -> None:
        """Note that this rank has seen the verdict on ``ref``, which is the same on all ranks."""
        with self._lock:
            self._in_doubt.discard(ref.step)

    def forget(self, path: str, tier: OpenTier) -> None:
        """Note that ``tier`` keeps nothing in the slot ``path`` any more."""
        with self._lock:
            self._steps.get(path, {}).pop(tier.url, None)

    def evict(self, path: str) -> None:
        """Remove the step in the slot ``path`` from the tiers that keep it there, manifest first.

        The slot is about to be filled with other bytes.

        Raises:
            StorageError: A tier did not delete a file. The step still counts as kept there.
        """
        with self._lock:
            steps_by_url = dict(self._steps.get(path, {}))
        for url, (tier, ref) in steps_by_url.items():
            delete_files(tier.backend, [ref.manifest, *map(ref.key, self._names)])
            with self._lock:
                self._steps[path].pop(url, None)

    def step_in(self, path: str) -> int:
        """Return the number of the step in the slot ``path``; -1 if the slot holds none."""
        with self._lock:
            return max((ref.step for _, ref in self._steps.get(path, {}).values()), default=-1)

    def is_needed(self, path: str) -> bool:
        """Return True if a restart may need the slot ``path``.

        This is so if durable tiers have only older steps, and the step in the slot is the newest
        step that is committed in memory. A step that this rank has voted for counts too, as long as
        this rank has seen no verdict, since it may be committed.
        """
        step, durable_step = self.step_in(path), self._job_steps.durable_step
        with self._lock:
            return (step == self._committed_step or step in self._in_doubt) and step > durable_step

    def kept_by(self, tier: OpenTier) -> dict[str, StepRef]:
        """Return the steps that ``tier`` keeps, by the paths of their slots."""
        with self._lock:
            kept_steps = {
                path: steps_by_url[tier.url]
                for path, steps_by_url in self._steps.items()
                if tier.url in steps_by_url
            }
        return {path: ref for path, (_, ref) in kept_steps.items()}

    def newest(self) -> int:
        """Return the number of the newest step of the branch in a slot; -1 if there is none."""
        with self._lock:
            refs = [ref for steps in self._steps.values() for _, ref in steps.values()]
        return max((ref.step for ref in refs if not self._job_steps.has_abandoned(ref)), default=-1)
