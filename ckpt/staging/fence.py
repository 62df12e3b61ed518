"""The fence: no optimizer steps while its tensors are still being copied, and nobody has to remember to wait."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ckpt.errors import StagingError, TensorChanged
from ckpt.staging.snapshot import Snapshot


class Fence:
    """Step pre-hooks on optimizers, each of which lets the step pass once every snapshot in flight may be overtaken.

    Threads: ``guard``, ``watch`` and ``remove`` from the training thread; hooks run wherever ``step`` is called.
    """

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )
        self._stepping: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._in_flight: list[Snapshot] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.captured = False
        """Whether a step was captured in a CUDA graph, whose replays no hook will see."""

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Hook these optimizers, once each.

        Raises:
            StagingError: Another thread is in the midst of a step: the state is of no step at all.
        """
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                before, after = _untraced(self._before_step), _untraced(self._after_step)
                self._hooks[optimizer] = [
                    optimizer.register_step_pre_hook(before),
                    optimizer.register_step_post_hook(after),
                ]
            # the end of a step that raised is never told; but a thread that asks here, or is gone, is not in it
            inside = self._stepping.get(optimizer, threading.get_ident())
            if inside != threading.get_ident() and inside in {
                thread.ident for thread in threading.enumerate()
            }:
                kind = type(optimizer).__name__
                raise StagingError(f"another thread is in the midst of {kind}.step(): save between two steps")

    def watch(self, snapshot: Snapshot) -> None:
        """Hold steps until ``snapshot`` has landed."""
        with self._lock:
            self._forget_landed()
            self._in_flight.append(snapshot)

    def wait(self) -> None:
        """Return when the tensors of all snapshots in flight may change."""
        if os.getpid() != self._pid:  # in a fork: its tensors are its own, and nobody copies here
            return
        with self._lock:
            waiting = list(self._in_flight)
        for snapshot in waiting:
            snapshot.fence()
        with self._lock:
            self._forget_landed()

    def remove(self) -> None:
        """Take the hooks off, and let go of the snapshots: their windows keep slots alive."""
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()
        with self._lock:
            self._in_flight = []

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._let_pass()
        self._stepping[optimizer] = threading.get_ident()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepping.pop(optimizer, None)

    def _let_pass(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            # the replayed graph runs no hook and moves no version counter: from now on nothing may be copied late
            self.captured = True
            for snapshot in self._in_flight:
                snapshot.wait_ended()
                _settle(snapshot)  # capturing moves the counters
            return
        self.wait()

    def _forget_landed(self) -> None:
        """Let go of them and of the slots they look at; no step to come may be held against them. Holds the lock."""
        landed = [snapshot for snapshot in self._in_flight if snapshot.landed]
        for snapshot in landed:
            _settle(snapshot)
        self._in_flight = [snapshot for snapshot in self._in_flight if snapshot not in landed]


def _untraced(hook: Callable[..., None]) -> Any:
    """A compiled step calls it as it is: locks and waits cannot be traced."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def _settle(snapshot: Snapshot) -> None:
    with suppress(TensorChanged):  # kept for those who wait for the save
        snapshot.settle()
