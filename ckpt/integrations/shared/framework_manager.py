"""A manager for frameworks that load a step without ``restore``, or load only a part of it."""

from __future__ import annotations

from ckpt.manager import CheckpointManager
from ckpt.model.keys import StepRef


class FrameworkManager(CheckpointManager):
    """A `CheckpointManager` that learns from the framework which step the training continues
    from. A step that the framework asks for counts as a whole if it leaves out a part.
    """

    _goes_on_from_parts = True

    def continue_from(self, ref: StepRef) -> None:
        """Note that the training continues from the state of ``ref``.

        If an earlier job has saved steps after ``ref``, this manager may save them again, provided
        that it has saved nothing yet. All ranks must call this before their next save.
        """
        self._continue_from(ref)
