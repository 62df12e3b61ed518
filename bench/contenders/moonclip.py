"""``moonclip``, as it comes: each tensor whole or as a difference to the last whole one,
compressed, written by a thread of the trainer. It fsyncs by itself.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from bench.contenders import Handle
from bench.contenders.trees import land, leaves
from bench.state import Subject

_PREFIX = "extra/"  # of the names of all that it is given


class Moonclip:
    """All steps are in one folder, since a step may refer to an earlier one. ``save`` returns when
    the state has been copied, and waits for the write of the previous step.
    """

    def prepare(self, subject: Subject, folder: str) -> None:
        self._subject, self._folder = subject, folder
        self._manager = _manager(folder)

    def save(self, step: int) -> Handle:
        name = self._manager.save(step, extra=self._subject.objects())
        return Handle(step, os.path.join(self._folder, "snapshots", name))

    def wait_safe(self, handle: Handle) -> None:
        """It was safe on return."""

    def wait_durable(self, handle: Handle) -> None:  # noqa: ARG002
        self._manager.flush()

    def load_back(self, path: str, into: Subject) -> None:
        folder = os.path.dirname(os.path.dirname(path))
        state = _manager(folder).load(os.path.basename(path))
        loaded = leaves({name.removeprefix(_PREFIX): value for name, value in state.items()})
        land(into, loaded.__getitem__)

    def close(self) -> None:
        self._manager.flush()


def _manager(folder: str) -> Any:
    return importlib.import_module("moonclip").CheckpointManager(folder)
