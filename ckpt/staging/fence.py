"""The fence: no optimizer steps while its tensors are still being copied, and nobody has to remember to wait."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from ckpt.staging.snapshot import Snapshot


class Fence:
    """Step pre-hooks on optimizers, each of which lets the step pass once every snapshot in flight may be overtaken.

    Threads: ``guard``, ``watch`` and ``remove`` from the training thread; hooks run wherever ``step`` is called.
    """

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = (
            weakref.WeakKeyDictionary()
        )
        self._in_flight: list[Snapshot] = []
        self._lock = threading.Lock()
        self.captured = False
        """Whether a step was captured in a CUDA graph, whose replays no hook will see."""

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Hook these optimizers, once each."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def watch(self, snapshot: Snapshot) -> None:
        """Hold steps until ``snapshot`` has landed."""
        with self._lock:
            self._in_flight = [other for other in self._in_flight if not other.landed]
            self._in_flight.append(snapshot)

    def wait(self) -> None:
        """Return when the tensors of all snapshots in flight may change."""
        with self._lock:
            waiting = list(self._in_flight)
        for snapshot in waiting:
            snapshot.fence()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _before_step(self, *_: object) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # the replayed graph runs no hook and moves no version counter: from now on nothing may be copied late
            self.captured = True
            for snapshot in self._in_flight:
                snapshot.wait_ended()
            return
        self.wait()
