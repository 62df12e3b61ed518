"""Checks of the position in Lightning's loops, for a save and after a restore.

A training that resumes from a step does not run the validation or the end of the epoch that
followed the save. So ckpt saves after them.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _ProcessedTracker


def more_follows(trainer: Trainer) -> bool:
    """Return True if a validation or the end of the epoch follows the batch that has ended."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    assert fetcher is not None
    return ends_epoch(trainer) or loop.epoch_loop._should_check_val_fx(fetcher)


def ends_epoch(trainer: Trainer) -> bool:
    """Return True if the batch that has ended is the last one of its epoch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def begin_next_epoch(trainer: Trainer) -> None:
    """Let a restored training begin the next epoch if its step was saved at the end of an epoch.

    With ``max_steps``, Lightning treats every restored epoch as unfinished. Without this function,
    it would train one batch too many, and give the samplers a wrong number of the epoch.
    """
    loop = trainer.fit_loop
    total = loop.epoch_progress.total
    assert isinstance(total, _ProcessedTracker)
    if not loop.restarting or loop.restarted_mid_epoch or not ends_epoch(trainer):
        return
    if total.processed != total.ready:
        return
    if total.completed != total.processed:
        loop.epoch_progress.increment_completed()
    loop.reset_restart_stage()
    loop._restarting = False  # With max_steps, the setter of the property only accepts True
    loop.epoch_loop.restarting = False


def continues_epoch(trainer: Trainer) -> bool:
    """Return True if a restored training continues within the epoch of the step."""
    loop = trainer.fit_loop
    return loop.restarted_mid_epoch or loop.restarted_on_epoch_end


def misses_plateau(trainer: Trainer) -> bool:
    """Return True if the schedule of ``ReduceLROnPlateau`` lacks an epoch after a restore.

    Lightning steps this scheduler after the last hook of an epoch, so a save in that hook does not
    have the new state. A resume does not repeat the step of the scheduler.
    """
    return ends_epoch(trainer) and any(
        each.reduce_on_plateau and each.interval == "epoch" for each in trainer.lr_scheduler_configs
    )
