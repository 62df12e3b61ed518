"""Where in Lightning's loops a step can be saved, and how a restored training goes on.

Lightning does not run a validation, or the end of an epoch, that came after a save. So ckpt saves
after them.
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
    """Let a restored training begin the next epoch, if its step was saved at the end of one.

    With ``max_steps``, Lightning takes each restored epoch for an unfinished one. It then trains
    one batch too many, and gives the samplers a wrong number of the epoch.
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
    loop._restarting = False  # The setter of the property takes True only, with max_steps
    loop.epoch_loop.restarting = False


def continues_epoch(trainer: Trainer) -> bool:
    """Return True if a restored training goes on within the epoch of its step."""
    loop = trainer.fit_loop
    return loop.restarted_mid_epoch or loop.restarted_on_epoch_end


def misses_plateau(trainer: Trainer) -> bool:
    """Return True if a restored step lacks a step of ``ReduceLROnPlateau``.

    Lightning makes that step after the last hook of an epoch, and a resume does not make it.
    """
    return ends_epoch(trainer) and any(
        each.reduce_on_plateau and each.interval == "epoch" for each in trainer.lr_scheduler_configs
    )
