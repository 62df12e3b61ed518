"""The warnings of a closing manager about steps that not all tiers have."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckpt.errors import CkptError
from ckpt.save.job_steps import JobSteps
from ckpt.save.slot_steps import SlotSteps
from ckpt.save.tier_writer import TierWriter

_log = logging.getLogger("ckpt")


def warn_of_untaken(step: int | None) -> None:
    """Log a warning if ``step`` was the last that was to be saved, and no tier takes it."""
    if step is not None:
        _log.warning(
            "ckpt: step %d, the last that was to be saved, was not: no tier takes it (every)", step
        )


def warn_of_last_step(
    newest: int, takers: Sequence[TierWriter], writers: Sequence[TierWriter]
) -> None:
    """Log a warning if some tiers of ``writers`` lack ``newest``, the newest step of this job,
    because of ``every``.

    Args:
        newest: The step; -1 if the job has saved none.
        takers: The writers of the tiers that the step goes to, nearest first.
        writers: The writers of all tiers.
    """
    other_writers = [writer for writer in writers if writer not in takers]
    source = next((writer for writer in takers if not writer.in_memory), None)
    if newest < 0 or not other_writers:
        return
    copy = f"ckpt copy {source.url} {other_writers[0].url} --step {newest}" if source else ""
    _log.warning(
        "ckpt: step %d, the last of this job, is not on %s: it is no multiple of every=%s. A "
        "save with final=True, and a planned stop (request_stop), go to every tier%s",
        newest,
        ", ".join(writer.url for writer in other_writers),
        ", ".join(str(writer.tier.tier.every) for writer in other_writers),
        f"; to have this one there: {copy}" if copy else "",
    )


def warn_of_steps_in_memory(
    writers: Sequence[TierWriter], steps: JobSteps, slot_steps: SlotSteps
) -> bool:
    """Log a warning if only the memory of this machine has what this job has saved: a tier in
    memory has a step, and no durable tier has the restored step or a newer one. If nothing was
    restored, durable tiers must have no step at all.

    Return True if the warning was logged.
    """
    durable = [writer for writer in writers if not writer.in_memory]
    in_memory = len(durable) < len(writers)
    restored_step = -1 if steps.restored is None else steps.restored.step
    newest_kept = max(restored_step, slot_steps.newest())
    if (
        not in_memory
        or not durable
        or newest_kept < 0
        or max(restored_step, 0) <= steps.durable_step
    ):
        return False
    try:
        newest = max(steps.durable_step, *(writer.newest_committed() for writer in durable))
    except CkptError:  # The store does not answer, which was logged before
        return False
    if newest >= max(restored_step, 0):
        return False
    text = (
        "no durable tier has any step of this run: all of it"
        if newest < 0
        else f"the newest durable step is {newest}, older than {restored_step}, which this job "
        "went on from: all after it"
    )
    _log.warning(
        "ckpt: step %d is in this machine's memory only: %s is lost with it. Save the last "
        "step to a durable tier too",
        newest_kept,
        text,
    )
    return True
