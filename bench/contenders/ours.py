"""``ckpt`` with its default settings.

It fsyncs files and folders itself before it says that a step is committed.
"""

from __future__ import annotations

import os
from typing import cast

from bench.contenders import Handle
from bench.state import Subject
from ckpt import CheckpointManager, PendingSave


class CkptSaveAsync:
    """``CheckpointManager.save_async``."""

    def prepare(self, subject: Subject, folder: str) -> None:
        self._subject, self._folder = subject, folder
        self._state = subject.objects()
        self._manager = CheckpointManager(folder)
        self._manager.prepare(self._state)

    def save(self, step: int) -> Handle:
        self._state["step"] = self._subject.step
        return Handle(step, self._path(step), self._manager.save_async(self._state, step))

    def wait_safe(self, handle: Handle) -> None:
        # The hook on an optimizer waits for this as well. Asked for by name so that the wait can be
        # timed apart from the step.
        cast(PendingSave, handle.payload).wait_staged()

    def wait_durable(self, handle: Handle) -> None:
        cast(PendingSave, handle.payload).result()

    def load_back(self, path: str, into: Subject) -> None:
        state = into.objects()
        root, _, step = path.rpartition(os.sep)
        with CheckpointManager(root) as manager:
            report = manager.restore(state, int(step), rollback=False)
        assert report is not None
        into.step = state["step"]

    def close(self) -> None:
        self._manager.close()

    def _path(self, step: int) -> str:
        return os.path.join(
            self._folder, str(step)
        )  # a root and a step: the folder's own name is the manager's


class CkptSave(CkptSaveAsync):
    """``CheckpointManager.save``: all of it in the foreground."""

    def save(self, step: int) -> Handle:
        self._state["step"] = self._subject.step
        pending = self._manager.save(self._state, step)
        return Handle(step, self._path(step), pending, durable=True)
