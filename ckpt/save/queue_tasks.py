"""The tasks of the queue before a farther tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.model.keys import StepRef
from ckpt.save.active_save import ActiveSave, SaveOutcome
from ckpt.save.save_request import SaveRequest
from ckpt.save.tier_writer import TierWriter


@dataclass(frozen=True, slots=True)
class FromImage:
    """The task to write the image of ``save`` to the tier of the first of ``writers``. After that,
    the image or its files go to the tiers of the other writers.
    """

    writers: Sequence[TierWriter]
    save: ActiveSave


@dataclass(frozen=True, slots=True)
class FromFiles:
    """The task to copy ``request`` to the tier of ``writer`` from the files of a nearer tier."""

    writer: TierWriter
    request: SaveRequest
    outcome: SaveOutcome


@dataclass(frozen=True, slots=True)
class Abort:
    """The task to vote on the tier of ``writer`` that this rank's part of a step has failed. The
    queue holds this task in place of the step.
    """

    writer: TierWriter
    ref: StepRef
    trial: int
    reason: str

    def vote(self) -> None:
        self.writer.abort(self.ref, self.trial, self.reason)


Task = FromImage | FromFiles | Abort
