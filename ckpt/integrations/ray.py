"""Ray Train: saves that are reported to Ray, and resumes after a worker has failed.

    with RayCheckpoints() as checkpoints:
        checkpoints.restore(state)
        ...
        checkpoints.report({"loss": loss}, state, step)

The steps are in the folder ``ckpt`` of the run, under its ``storage_path``. Ray gets a reference to
a step as its checkpoint: a folder with the file ``ckpt.json``, which has the root, the URL of the
farthest tier, and the number of the step. The reference appears once the step is durable.

Importing this module imports Ray Train.

Ray may *preempt* a node: it announces a time at which it ends the workers. ``_stop_requests`` of a
`RayCheckpoints` lets all ranks stop after the same step, and ``_preemption_time`` is the announced
time.
"""

from __future__ import annotations

import json
import logging
import posixpath
import threading
import time
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self

import ray.train  # pyright: ignore[reportMissingImports]

from ckpt.checks import is_number
from ckpt.errors import (
    CkptError,
    ConfigError,
    NoCheckpoint,
    RestoreError,
    SaveSkipped,
    TierBehind,
)
from ckpt.integrations.shared.once_warnings import warn_of_untested
from ckpt.manager import CheckpointManager
from ckpt.pending import PendingSave
from ckpt.restore.report import RestoreReport
from ckpt.storage.tiers import Tiers, as_tiers, urls_of

REFERENCE: Final = "ckpt.json"
TESTED_RANGE: Final = ("2.60", "2.60")
_SCHEME_BY_FILESYSTEM: Final = {"local": "", "s3": "s3://", "gcs": "gs://"}
_MOST_REFERENCE_BYTES: Final = 64 << 10  # The largest size of a reference
_PREEMPTION_SECONDS: Final = 120.0  # The assumed time until a preemption without a deadline
_EXTRA_SECONDS: Final = 300.0  # How long Ray may take after the deadline to end the workers

_log = logging.getLogger("ckpt")


def run_root() -> str:
    """Return the folder or URL of this run's steps. Call this in a training function.

    Raises:
        ConfigError: The ``storage_path`` is not on a local file system, S3 or GCS.
    """
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    if kind not in _SCHEME_BY_FILESYSTEM:
        raise ConfigError(
            f"the storage_path is on a filesystem of the kind {kind!r}: give the place of the "
            "checkpoints, RayCheckpoints(tiers)"
        )
    return _SCHEME_BY_FILESYSTEM[kind] + posixpath.join(storage.experiment_fs_path, "ckpt")


class RayCheckpoints:
    """A ``CheckpointManager`` in a training function of Ray Train.

    Every worker makes an object of this class, and makes the same calls.

    Args:
        tiers: As for `CheckpointManager`. If it is None, the result of `run_root` is used.
        settings: Further arguments of the `CheckpointManager`.

    Attributes:
        root: The URL of the farthest tier. Each reference has this URL.
        manager: The `CheckpointManager` that saves and restores.

    Raises:
        ConfigError: A setting or URL is wrong. Nothing was written.
    """

    def __init__(
        self,
        tiers: Tiers | None = None,
        **settings: Any,
    ) -> None:
        warn_of_untested("ray", TESTED_RANGE, advice="kill a worker once and compare the losses")
        if settings.get("on_error") == "warn":
            raise ConfigError(
                'RayCheckpoints(on_error="warn"): Ray ends a run whose reported checkpoint fails; '
                "use the CheckpointManager itself, and report metrics alone"
            )
        places = as_tiers(run_root() if tiers is None else tiers)
        self.root: Final = urls_of(places)[-1]
        self.manager = CheckpointManager(places, **settings)
        self._stop_requests = self.manager.on_stop_request()
        self._preemption_time: float | None = None
        self._is_last_step = False  # Whether the last ``stop_requested`` has returned True

    def restore(
        self, state: MutableMapping[str, Any], checkpoint: Any = None, **options: Any
    ) -> RestoreReport | None:
        """Fill ``state`` with the newest intact step of the run, or with a reported step.

        Args:
            state: As for `CheckpointManager.restore`.
            checkpoint: A ``ray.train.Checkpoint`` that this class has reported in this run or
                another one, such as ``result.checkpoint``. If it is None, the newest step of the
                run is restored, which may be newer than ``ray.train.get_checkpoint()``.
            options: Further arguments of `CheckpointManager.restore`.

        Returns:
            The report, or None if the tiers have no step and no step was reported to Ray.

        Raises:
            RestoreError: The tiers lack a step that was reported, or the state does not fit.
            ConfigError: ``checkpoint`` was not reported by this class. Or ``checkpoint`` is None,
                the tiers have no step, and a step at another root was reported to Ray.
        """
        if checkpoint is not None:
            return self._restore_reported(state, checkpoint, options)
        latest = ray.train.get_checkpoint()
        report = self.manager.restore(state, **options)
        if latest is None:
            return report
        root, step = _read_reference(latest)
        if report is None:  # A step was reported, and these tiers have none
            if root != self.root:
                raise ConfigError(
                    f"Ray knows of step {step} at {root}, and the checkpoints of this run are at "
                    f"{self.root}: give restore(state, checkpoint=ray.train.get_checkpoint()) to "
                    "begin with that one"
                )
            return self._restore_reported(state, latest, options)
        if root == self.root and report.step < step:
            _log.warning(
                "ckpt: step %d was restored, and Ray knows of step %d: that one is damaged or was "
                "removed",
                report.step,
                step,
            )
        return report

    def _restore_reported(
        self, state: MutableMapping[str, Any], checkpoint: Any, options: dict[str, Any]
    ) -> RestoreReport:
        """Restore the step that a reported checkpoint refers to, which may be at another root."""
        root, step = _read_reference(checkpoint)
        if root == self.root:
            report = self.manager.restore(state, step, **options)
        else:
            with CheckpointManager(root) as source:
                report = source.restore(state, step, **options)
        if report is None:
            raise NoCheckpoint(root, f"Ray knows of step {step}")
        return report

    def report(
        self,
        metrics: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> PendingSave | None:
        """Report ``metrics`` to Ray, and save ``state`` in the background if it is given.

        All workers must make the same calls, as with ``ray.train.report``. Ray gets the checkpoint
        with these metrics as soon as the step is durable. If any worker skips the save, Ray gets
        only the metrics. If a save fails, Ray ends the run or restarts the workers, as
        ``FailureConfig`` says.

        Args:
            metrics: As for ``ray.train.report``. The step keeps those metrics that are numbers.
            state: The state to save; None saves nothing.
            step: The number of the step, as for `CheckpointManager.save_async`.

        Returns:
            The handle of the save; None without a state.

        Raises:
            CkptError: See `CheckpointManager.save_async`.
        """
        if state is None:
            ray.train.report(dict(metrics))
            return None
        numbers = {name: value for name, value in metrics.items() if is_number(value)}
        pending = self.manager.save_async(state, step, metrics=numbers)
        context = ray.train.get_context()
        checkpoint = None
        is_skipped = pending.done() and isinstance(pending.exception(), SaveSkipped)
        if context.get_world_rank() == 0 and not is_skipped:
            storage = context.get_storage()
            # Ray needs a checkpoint at once. Later, Ray uses the reference from
            # `_refer_when_durable` instead.
            checkpoint = ray.train.Checkpoint(
                storage.experiment_fs_path, storage.storage_filesystem
            )
        ray.train.report(
            dict(metrics),
            checkpoint=checkpoint,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=partial(_refer_when_durable, pending, self.root),
        )
        return pending

    def stop_requested(self, step: int) -> bool:
        """Return True on all workers if Ray preempts a node and ``step`` must be the last step.

        Then save ``step`` and leave the loop. ``close`` waits for Ray, which starts the workers
        again on other nodes. All workers must call this after the same steps, since
        ``ray.train.get_preemption_info()`` waits for all workers.
        """
        if self._preemption_time is None and (info := ray.train.get_preemption_info()) is not None:
            has_deadline = info.deadline_ms and info.deadline_ms / 1e3 > time.time()
            self._preemption_time = (
                info.deadline_ms / 1e3 if has_deadline else time.time() + _PREEMPTION_SECONDS
            )
            self.manager.request_stop(
                datetime.fromtimestamp(self._preemption_time, UTC) if has_deadline else None
            )
        self._is_last_step = self._stop_requests.requested(step)
        return self._is_last_step

    def close(self, timeout: float | None = None) -> None:
        """Finish every save (`CheckpointManager.close`).

        After a stop for a preemption, this method does not return, since Ray treats a training
        function that returns as finished. It waits until Ray ends the worker at the deadline.

        Raises:
            CkptError: Ray has not ended this worker five minutes after the deadline. See also
                `CheckpointManager.close`.
        """
        self.manager.close(timeout)
        if self._is_last_step and self._preemption_time is not None:
            _log.info("ckpt: all is saved; waiting for Ray to move the workers")
            seconds = self._preemption_time - time.time() + _EXTRA_SECONDS
            threading.Event().wait(max(0.0, seconds))
            raise CkptError(
                "Ray has announced a preemption and has not ended the workers: all is saved, and "
                "FailureConfig(max_failures=...) says whether this error starts them again"
            )

    def __enter__(self) -> Self:
        self.manager.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.manager.__exit__(kind, error, trace)
        if error is None:
            self.close()


class _NoCheckpoint(ray.train.Checkpoint):  # type: ignore[misc, unused-ignore]
    """The checkpoint of a step that a worker has skipped: there is none.

    Ray has no way to withdraw a checkpoint that was announced. It sends this object from the worker
    to its controller, which gets None, as for a report of metrics alone.
    """

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _refer_when_durable(pending: PendingSave, root: str, run: Any, name: str) -> Any:
    """Wait until the step of ``pending`` is durable, and return a reference to it.

    A farther tier that is behind the saves may have left out the step. Then a nearer tier has it.
    If another worker has skipped the save, there is no checkpoint.

    Ray calls this in the background. The reference is the folder ``name`` of ``run``.
    """
    error = pending.exception()
    if isinstance(error, SaveSkipped):
        return _NoCheckpoint(run.path, run.filesystem)
    if error is not None and not isinstance(error, TierBehind):  # A nearer tier has that step
        raise error
    folder = posixpath.join(run.path, name)
    run.filesystem.create_dir(folder)
    with run.filesystem.open_output_stream(posixpath.join(folder, REFERENCE)) as file:
        file.write(json.dumps({"root": root, "step": pending.step}).encode())
    return ray.train.Checkpoint(folder, run.filesystem)


def _read_reference(checkpoint: Any) -> tuple[str, int]:
    """Return the root and the number of the step that a reported checkpoint refers to.

    Raises:
        ConfigError: The checkpoint has no reference.
        RestoreError: The reference is damaged.
    """
    path = posixpath.join(checkpoint.path, REFERENCE)
    try:
        with checkpoint.filesystem.open_input_stream(path) as file:
            reference = json.loads(file.read(_MOST_REFERENCE_BYTES))
        return str(reference["root"]), int(reference["step"])
    except FileNotFoundError:
        raise ConfigError(
            f"{checkpoint.path} has no {REFERENCE}: it is a checkpoint that RayCheckpoints has not "
            "reported; load it as it was saved"
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise RestoreError(f"{path} is damaged: {error!r}") from error
