"""A restore finishes what the job before it could not: a save of which every part is durable, and
whose leader died before it put the manifest.

Only steps that are newer than the newest checkpoint are considered, and none newer than a step that
the caller names. Cheap checks come first: the owner, the later steps, the fragments, and the sizes
of the files. The data is not read here: the restore that follows reads all of it, compares it with
its checksums, and takes the step before if it is damaged.
"""

from __future__ import annotations

import logging

from ckpt.catalog.finalize import finalize
from ckpt.coordination.owner import Owner
from ckpt.errors import CkptError, IntegrityError, JobUnseen, StorageError
from ckpt.model.keys import StepRef
from ckpt.pipeline.workers import Workers
from ckpt.storage.api import StorageBackend

_log = logging.getLogger("ckpt")


class Finisher:
    """Finishes the commits of jobs that have ended.

    Thread safety: one thread.

    Args:
        me: This job. An earlier start of the same torchrun run is known to have ended.

    Attributes:
        finished: (step, URL), in the order in which they were finished.
    """

    def __init__(self, me: Owner, workers: Workers) -> None:
        self._me, self._workers = me, workers
        self._tried: set[tuple[str, StepRef]] = set()
        self.finished: list[tuple[int, str]] = []

    def finish(self, backend: StorageBackend, ref: StepRef) -> bool:
        """Return True if ``ref``, which has no manifest on ``backend``, is a checkpoint now.

        It never raises a `CkptError`, since there may be other steps to restore.
        """
        if (backend.url, ref) in self._tried:
            return False
        self._tried.add((backend.url, ref))
        try:
            finalize(
                backend, ref, workers=self._workers, job_is_dead=self._is_dead, read_data=False
            )
        except JobUnseen as error:
            _log.warning(
                "ckpt: %s (ckpt finalize %s --step %d --job-is-dead)", error, backend.url, ref.step
            )
        except (IntegrityError, StorageError) as error:
            _log.warning("ckpt: step %d on %s was not finished: %s", ref.step, backend.url, error)
        except CkptError as error:
            # The step is refused or incomplete, or its job is at work.
            _log.debug("ckpt: step %d on %s was not finished: %s", ref.step, backend.url, error)
        else:
            _log.warning(
                "ckpt: step %d on %s lacked only its manifest: this job has finished its commit",
                ref.step,
                backend.url,
            )
            self.finished.append((ref.step, backend.url))
            return True
        return False

    def _is_dead(self, owner: Owner) -> bool:
        return owner.went_before(self._me)
