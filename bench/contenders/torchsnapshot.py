"""``torchsnapshot``, as it comes."""

from __future__ import annotations

import os
from typing import Any, cast

from torchsnapshot import Snapshot, StateDict
from torchsnapshot.snapshot import PendingSnapshot

from bench.contenders import Handle, fsync_tree
from bench.contenders.trees import land_values, leaves, own_state
from bench.state import Subject


class SnapshotTake:
    """``Snapshot.take``; returns when the files are written, the bench fsyncs them."""

    def prepare(self, subject: Subject, folder: str) -> None:
        self._subject, self._folder = subject, folder

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        Snapshot.take(path, _app_state(self._subject))
        return Handle(step, path)

    def wait_safe(self, handle: Handle) -> None:
        """It was safe on return."""

    def wait_durable(self, handle: Handle) -> None:
        fsync_tree(handle.path)

    def load_back(self, path: str, into: Subject) -> None:
        state = _app_state(into)
        Snapshot(path).restore(state)  # in place: its tensors are the live ones
        loaded = leaves(state) | {"step": state["step"]["value"]}
        land_values(into, loaded.__getitem__)

    def close(self) -> None:
        """Nothing is held."""


class SnapshotAsyncTake(SnapshotTake):
    """``Snapshot.async_take``; copies the state before it returns, then writes in a thread of
    the trainer.
    """

    def save(self, step: int) -> Handle:
        path = os.path.join(self._folder, f"step-{step}")
        return Handle(step, path, Snapshot.async_take(path, _app_state(self._subject)))

    def wait_durable(self, handle: Handle) -> None:
        cast(PendingSnapshot, handle.payload).wait()
        super().wait_durable(handle)


def _app_state(subject: Subject) -> dict[str, Any]:
    """Each object's own state, in place of the object: 0.1.0 does not know sharded tensors, so
    it gets this rank's part of them.
    """
    return {
        name: StateDict(value if isinstance(value, dict) else {"value": value})
        for name, value in own_state(subject).items()
    }
