"""Checks of the position in Lightning's loops, for a save and after a restore.

If a save came before a validation or the end of an epoch, a training that resumes from the step
would skip these. So ckpt saves after them.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _ProcessedTracker


def validation_or_epoch_end_follows(trainer: Trainer) -> bool:
    """Return True if a validation or the end of the epoch follows the batch that has just ended."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    assert fetcher is not None
    return ends_epoch(trainer) or loop.epoch_loop._should_check_val_fx(fetcher)


def ends_epoch(trainer: Trainer) -> bool:
    """Return True if the batch that has just ended is the last batch of its epoch."""
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def begin_next_epoch(trainer: Trainer) -> None:
    """Make a restored training begin with the next epoch if its step was saved at the end of an
    epoch.

    With ``max_steps``, Lightning treats every restored epoch as unfinished. Without this function,
    Lightning would train one batch too many, and give a wrong epoch number to the samplers.
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


def start_loader_again(trainer: Trainer) -> None:
    """Make Lightning start the train loader again at the begin of a restored epoch, as it does
    without a resume. The loader then draws from the restored generators.
    """
    trainer.fit_loop._resuming_from_checkpoint = False


def continues_epoch(trainer: Trainer) -> bool:
    """Return True if a restored training continues in the epoch in which its step was saved."""
    loop = trainer.fit_loop
    return loop.restarted_mid_epoch or loop.restarted_on_epoch_end


def rebuild_train_loader(trainer: Trainer) -> bool:
    """Make Lightning build the train loader of a restored training once more, and return True, if
    ``reload_dataloaders_every_n_epochs`` builds one for the epoch that begins.
    """
    every: int = getattr(trainer, "reload_dataloaders_every_n_epochs", 0)
    loop = trainer.fit_loop
    if not every or trainer.current_epoch % every:
        return False
    loop._combined_loader = None
    return True


def lacks_plateau_step(trainer: Trainer) -> bool:
    """Return True if a ``ReduceLROnPlateau`` scheduler lacks the last epoch after a restore.

    Lightning steps this scheduler after the last hook of an epoch, so a save in that hook has the
    scheduler's state before the step. A resumed training does not repeat the scheduler's step.
    """
    return ends_epoch(trainer) and any(
        config.reduce_on_plateau and config.interval == "epoch"
        for config in trainer.lr_scheduler_configs
    )
