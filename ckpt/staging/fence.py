"""The fence: no optimizer steps while its tensors are still being copied."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from types import CodeType, FrameType
from typing import Any, Final, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ckpt.errors import StagingError, TensorChanged
from ckpt.staging.device import is_capturing
from ckpt.staging.snapshot import Snapshot

_log = logging.getLogger("ckpt")
_fences: Final[weakref.WeakSet[Fence]] = weakref.WeakSet()  # Those of all managers
_registering: Final = threading.Lock()


class Fence:
    """Step pre-hooks on optimizers. A hook lets the step pass once all copies of its tensors have
    ended.

    Thread safety:
        Call ``guard``, ``watch`` and ``remove`` from the training thread. Hooks run in the thread
        that calls ``step``.
    """

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )
        self._stepping: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._in_flight: list[Snapshot] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._stop_listening: Callable[[], object] = bool
        self.captured = weakref.WeakSet[torch.optim.Optimizer]()
        """Optimizers whose step was captured in a graph. No hook notices when the graph is
        replayed.
        """
        # Others may use it from here on, also if Ctrl-C ends the constructor.
        with _registering:
            _fences.add(self)

    def listen(self) -> None:
        """Notice captures by any optimizer of the process from now on, also before it is guarded.

        ``remove`` ends it.
        """
        fence = weakref.ref(self)

        def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (listening := fence()) is not None:
                listening.note_capture(optimizer)

        handle = register_optimizer_step_pre_hook(_untraced(on_step))
        self._stop_listening = weakref.finalize(self, handle.remove)

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Hook these optimizers, once each.

        Raises:
            StagingError: Another thread, or the code that a signal handler has interrupted, is in
                the midst of a step: the state is of no step at all.
        """
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                before, after = _untraced(self._before_step), _untraced(self._after_step)
                self._hooks[optimizer] = [
                    optimizer.register_step_pre_hook(before),
                    optimizer.register_step_post_hook(after),
                ]
            # A step that has raised never reports its end. But a thread that calls this, or that
            # has ended, is not in a step.
            inside = self._stepping.get(optimizer, threading.get_ident())
            if inside != threading.get_ident() and inside in {
                thread.ident for thread in threading.enumerate()
            }:
                kind = type(optimizer).__name__
                raise StagingError(
                    f"another thread is in the midst of {kind}.step(): save between two steps"
                )
            if _is_interrupted(optimizer):
                kind = type(optimizer).__name__
                refused = StagingError(
                    f"a signal handler that interrupts {kind}.step() cannot save: let "
                    "manager.on_signals() handle the signal"
                )
                # The interrupted loop may take this error for one of its own.
                _log.error("ckpt: %s", refused)
                raise refused

    def watch(self, snapshot: Snapshot) -> None:
        """Hold steps until ``snapshot`` has landed."""
        with self._lock:
            self._forget_landed()
            self._in_flight.append(snapshot)

    def wait(self) -> None:
        """Return when the tensors of all snapshots in flight may change."""
        if os.getpid() != self._pid:  # A fork has tensors of its own, and no thread copies
            return
        with self._lock:
            waiting = list(self._in_flight)
        for snapshot in waiting:
            snapshot.fence()
        with self._lock:
            self._forget_landed()

    @staticmethod
    def wait_for_all() -> None:
        """Return when the tensors of all snapshots in flight in this process may change: those of
        other managers too.
        """
        with _registering:
            fences = list(_fences)
        for fence in fences:
            fence.wait()

    def remove(self) -> None:
        """Take the hooks off, and let go of the snapshots: their windows keep slots alive."""
        self._stop_listening()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()
        with self._lock:
            self._in_flight = []

    def note_capture(self, optimizer: torch.optim.Optimizer) -> None:
        # A fork does not save, and must not use a device.
        if os.getpid() == self._pid and _is_captured(optimizer):
            self.captured.add(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._let_pass(optimizer)
        self._stepping[optimizer] = threading.get_ident()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepping.pop(optimizer, None)

    def _let_pass(self, optimizer: torch.optim.Optimizer) -> None:
        if _is_captured(optimizer):
            # The replayed graph runs no hook and moves no version counter. From now on, none of its
            # tensors may be copied late.
            self.captured.add(optimizer)
            for snapshot in self._in_flight:
                snapshot.wait_ended()
                _settle(snapshot)  # Capturing moves the version counters
            return
        self.wait()

    def _forget_landed(self) -> None:
        """Let go of snapshots that have landed, and of their slots. Later steps do not concern
        them.

        Holds the lock.
        """
        landed = [snapshot for snapshot in self._in_flight if snapshot.landed]
        for snapshot in landed:
            _settle(snapshot)
        self._in_flight = [snapshot for snapshot in self._in_flight if snapshot not in landed]


def _is_interrupted(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the calling thread is inside of ``step()``, as a signal handler may be.

    A closure that the step calls may save.
    """
    steps = _step_codes(cast("Any", type(optimizer)))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in steps:
            values = frame.f_locals
            if (
                values.get(frame.f_code.co_varnames[0]) is optimizer
                and values.get("closure") is None
            ):
                return True
        frame = frame.f_back
    return False


@cache
def _step_codes(kind: type) -> frozenset[CodeType]:
    """Return the code of each ``step()`` that an optimizer of the class may run."""
    found = (inspect.unwrap(vars(each)["step"]) for each in kind.__mro__ if "step" in vars(each))
    return frozenset(step.__code__ for step in found if inspect.isfunction(step))


def _is_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if this step becomes a part of a graph.

    The first parameter decides, so a state in host memory touches no device.
    """
    groups = optimizer.param_groups
    first = next((parameter for group in groups for parameter in group["params"]), None)
    return first is not None and is_capturing(first.device)


def _untraced(hook: Callable[..., None]) -> Any:
    """Let a compiled step call ``hook`` as it is, since locks and waits cannot be traced."""
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def _settle(snapshot: Snapshot) -> None:
    with suppress(TensorChanged):  # The snapshot keeps the error for callers that wait
        snapshot.settle()
