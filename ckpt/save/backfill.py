"""Copies to the farther tiers the steps that an earlier job has committed on the nearest durable
tier only.

The backfill begins after the first commit of this job, because the roots belong to this job only
from then on. It copies nothing unless this job has restored a step of the earlier job. It copies
steps up to the restored step, which are a part of this job's history too, and no later steps. The
leader copies the files of all ranks from the nearest durable tier, newest step first. To each
farther tier it copies at most ``backlog`` steps, and only steps that this tier would keep. Steps of
the running job have priority. If the earlier job had an agent, the agent has copied these steps
right after the end of that job (``ckpt.agent.finish``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial

from ckpt.catalog.index import attempts
from ckpt.catalog.inventory import Inventory, StoredStep
from ckpt.config import SaveConfig
from ckpt.errors import CkptError
from ckpt.model.keys import StepRef
from ckpt.model.readable import size
from ckpt.pipeline.retry import RetryPolicy
from ckpt.pipeline.workers import Workers
from ckpt.retention.policy import FixedGuard
from ckpt.retention.step_copier import StepCopier
from ckpt.save.job_steps import EarlierSteps, JobSteps
from ckpt.save.tier_writer import TierWriter

_log = logging.getLogger("ckpt")


class Backfill:
    """Copies the steps of the earlier job from the nearest durable tier to the farther tiers, on a
    thread of its own.

    Args:
        near: The writer of the nearest durable tier.
        far: The writers of farther tiers, nearest first.
        earlier: Gets the steps to copy, so that the pruner of the nearest durable tier keeps them.
        steps: The steps of the running job.
        config: The threads to use, the backlog, and how long to retry requests.

    Thread safety: ``begin`` may be called from any thread. The owner calls ``close`` once. All
    fields are set once, or are thread-safe objects.
    """

    def __init__(
        self,
        near: TierWriter,
        far: Sequence[TierWriter],
        earlier: EarlierSteps,
        steps: JobSteps,
        config: SaveConfig,
    ) -> None:
        self._near, self._far, self._earlier = near, tuple(far), earlier
        self._steps, self._config = steps, config
        self._hurry = threading.Event()
        patience = config.commit_timeout_seconds
        self._retry = RetryPolicy(patience_seconds=patience, hurry=self._hurry)
        self._watcher = Workers("backfill", 1, nice=config.nice, cpus=config.cpus).started()

    def begin(self) -> None:
        """Start to copy in the background, and return at once.

        The saver calls this after each commit of a step on a durable tier. Only the first call has
        an effect.
        """
        if (restored := self._earlier.begin()) is not None:
            self._watcher.submit(self._run, restored)

    def close(self) -> None:
        """Wait until the backfill has copied its steps or has failed to copy them. A failure is
        only logged. If the backfill has not begun, do not wait. After a planned stop, whose grace
        time may be short, wait only for the copy of the step that is under way.

        From now on, the backfill does not wait for saves of the running job. It gives up a request
        after the usual number of tries, and no longer repeats it for ``commit_timeout_seconds``.
        """
        self._hurry.set()
        self._steps.wake()
        self._watcher.close()

    def _run(self, restored: StepRef) -> None:
        near = self._near.tier
        own = self._near.root.own
        try:
            found = [
                ref
                for ref in attempts(near.backend)
                if ref <= restored and ref.job == restored.job != own
            ]
            self._earlier.set_left(found)
            if found:
                held = {
                    one.ref: one
                    for one in Inventory(near.backend).look()
                    if one.state == "committed"
                }
                line = [held[ref] for ref in found if ref in held]
                for writer in self._far:
                    self._go(writer, line)
        except Exception as error:  # noqa: BLE001 - of no consequence for the running job
            _log.warning(
                "ckpt: what the job before left on %s was not taken farther: %s", near.url, error
            )
        finally:
            self._earlier.set_left([])
            self._near.prune_later()  # The near tier need not keep these steps any more

    def _go(self, writer: TierWriter, line: Sequence[StoredStep]) -> None:
        """Copy the steps of ``line`` that the tier of ``writer`` lacks."""
        near, far = self._near.url, writer.url
        others = [self._near.tier, *(other.tier for other in self._far if other is not writer)]
        durable = [other.backend for other in others if not other.in_memory]
        copier = StepCopier(
            writer.tier,
            writer.root,
            [other.backend for other in others],
            FixedGuard(elsewhere=durable),
            self._retry,
        )
        try:
            going = self._retry.call(partial(copier.lacking, line, self._config.backlog))
            if going:
                _log.info(
                    "ckpt: of the job before, %s lacks steps %s: they follow from %s",
                    far,
                    _numbers(going),
                    near,
                )
                writer.claim()
        except CkptError as error:
            _log.warning(
                "ckpt: what the job before left on %s is not taken to %s: %s", near, far, error
            )
            return
        for index, held in enumerate(going):
            self._steps.wait_idle(far, self._hurry)
            if self._hurry.is_set() and self._steps.last_step is not None:
                _log.warning(
                    "ckpt: steps %s of the job before are not taken to %s: a planned stop ends "
                    "this job",
                    _numbers(going[index:]),
                    far,
                )
                return
            self._take(copier, held)
            writer.prune_later()

    def _take(self, copier: StepCopier, held: StoredStep) -> None:
        """Copy the step ``held``. A failure is logged, and does not stop the other copies."""
        config, began = self._config, time.perf_counter()
        try:
            with Workers("backfill", config.threads, nice=config.nice, cpus=config.cpus) as workers:
                report = copier.copy(held, workers)
        except CkptError as error:
            _log.warning(
                "ckpt: step %d of the job before is not taken to %s: %s",
                held.ref.step,
                copier.tier.url,
                error,
            )
            return
        _log.info(
            "ckpt: step %d of the job before is on %s now: %s in %.2f s",
            held.ref.step,
            copier.tier.url,
            size(report.copied_bytes),
            time.perf_counter() - began,
        )


def _numbers(steps: Sequence[StoredStep]) -> str:
    return ", ".join(str(held.ref.step) for held in steps)
