"""Hold the step of an optimizer while its tensors are being copied.

A *snapshot* copies the state of a save into host memory, its *image*, and has *landed* when the
image is complete. Its *late sources*, tensors of optimizers, are copied while training goes on, and
``Snapshot.fence`` waits until they may change. ``Snapshot.settle`` compares their version counters
for the last time, so that later changes do not affect the snapshot.
"""

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
_fences: Final[weakref.WeakSet[Fence]] = weakref.WeakSet()  # The fences of all managers
_registry_lock: Final = threading.Lock()


class Fence:
    """Hold the steps of guarded optimizers while late copies are under way.

    A step pre-hook on each guarded optimizer waits for the copies of all snapshots *in flight*,
    which are the watched snapshots that have not landed.

    ``_in_flight`` are these snapshots, and ``_hooks`` has the hooks of each guarded optimizer.
    ``_step_threads`` has the thread of each guarded optimizer whose step is under way.
    ``captured_optimizers`` are those whose step a graph has captured: a replay runs no hook.
    ``_stop_listening`` ends what ``listen`` has begun, and ``_pid`` is the process that has made
    the fence.

    Thread safety:
        Call ``guard``, ``watch`` and ``remove`` from the training thread. Hooks run in the thread
        that calls ``step``.
    """

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = (
            weakref.WeakKeyDictionary()
        )
        self._step_threads: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._in_flight: list[Snapshot] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._stop_listening: Callable[[], object] = bool  # ``bool()`` does nothing
        self.captured_optimizers = weakref.WeakSet[torch.optim.Optimizer]()
        """The optimizers whose step was captured in a graph. When the graph is replayed, no hook
        runs.
        """
        # From here on, ``wait_for_all`` may use this object, even if Ctrl-C ends the constructor.
        # So this must be its last statement.
        with _registry_lock:
            _fences.add(self)

    def listen(self) -> None:
        """Begin to add to ``captured_optimizers`` each optimizer of the process whose step is
        captured in a graph, guarded or not.

        ``remove`` ends this.
        """
        fence_ref = weakref.ref(self)

        def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if (live_fence := fence_ref()) is not None:
                live_fence.note_capture(optimizer)

        handle = register_optimizer_step_pre_hook(_disable_tracing(on_step))
        self._stop_listening = weakref.finalize(self, handle.remove)

    def guard(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Add the hooks to those of ``optimizers`` that do not have them yet.

        Raises:
            StagingError: ``step()`` of one of the optimizers is under way, in another thread, or in
                this thread if a signal handler has interrupted it. The state is inconsistent then.
        """
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                pre_hook, post_hook = (
                    _disable_tracing(self._before_step),
                    _disable_tracing(self._after_step),
                )
                self._hooks[optimizer] = [
                    optimizer.register_step_pre_hook(pre_hook),
                    optimizer.register_step_post_hook(post_hook),
                ]
            # If ``step()`` raises, its post-hook does not run, and the optimizer stays in
            # ``_step_threads``. So an entry counts only if its thread still runs and is not the
            # calling thread.
            thread_id = self._step_threads.get(optimizer, threading.get_ident())
            if thread_id != threading.get_ident() and thread_id in {
                thread.ident for thread in threading.enumerate()
            }:
                class_name = type(optimizer).__name__
                raise StagingError(
                    f"another thread is in the midst of {class_name}.step(): save between two steps"
                )
            if _is_interrupted(optimizer):
                class_name = type(optimizer).__name__
                error = StagingError(
                    f"a signal handler that interrupts {class_name}.step() cannot save: let "
                    "manager.on_signals() handle the signal"
                )
                # Log the error too, since the interrupted code may catch it as an error of its own.
                _log.error("ckpt: %s", error)
                raise error

    def watch(self, snapshot: Snapshot) -> None:
        """Hold the steps of guarded optimizers until all late copies of ``snapshot`` have ended."""
        with self._lock:
            self._forget_landed()
            self._in_flight.append(snapshot)

    def wait(self) -> None:
        """Wait until the late sources of all snapshots in flight may change.

        In a forked process, the call returns at once.
        """
        if os.getpid() != self._pid:  # In a forked process, no thread copies tensors
            return
        with self._lock:
            snapshots = list(self._in_flight)
        for snapshot in snapshots:
            snapshot.fence()
        with self._lock:
            self._forget_landed()

    @staticmethod
    def wait_for_all() -> None:
        """Wait until the late sources of all snapshots in flight in this process may change,
        including those of other managers.
        """
        with _registry_lock:
            fences = list(_fences)
        for fence in fences:
            fence.wait()

    def remove(self) -> None:
        """Remove all hooks, and drop the references to snapshots, which keep the memory of their
        images alive.
        """
        self._stop_listening()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        self._hooks.clear()
        with self._lock:
            self._in_flight = []

    def note_capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the optimizer to ``captured_optimizers`` if its step is being captured in a graph."""
        # A forked process does not save, and must not use a device.
        if os.getpid() == self._pid and _is_captured(optimizer):
            self.captured_optimizers.add(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._wait_or_note_capture(optimizer)
        self._step_threads[optimizer] = threading.get_ident()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._step_threads.pop(optimizer, None)

    def _wait_or_note_capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Return when the step of the optimizer may change its tensors."""
        if _is_captured(optimizer):
            # When the graph is replayed, no hook runs and no version counter moves. From now on,
            # the tensors of this optimizer may not be copied late.
            self.captured_optimizers.add(optimizer)
            for snapshot in self._in_flight:
                snapshot.wait_ended()
                _settle_quietly(snapshot)  # The capture that follows moves the version counters
            return
        self.wait()

    def _forget_landed(self) -> None:
        """Settle the snapshots that have landed, and drop the references to them and their images.

        The caller must hold the lock.
        """
        landed_snapshots = [snapshot for snapshot in self._in_flight if snapshot.has_landed]
        for snapshot in landed_snapshots:
            _settle_quietly(snapshot)
        self._in_flight = [
            snapshot for snapshot in self._in_flight if snapshot not in landed_snapshots
        ]


def _is_interrupted(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the calling thread is inside ``step()`` of the optimizer, as a signal handler
    may be.

    A step with a closure does not count, since the closure may save.
    """
    step_codes = _step_codes(cast("Any", type(optimizer)))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in step_codes:
            frame_locals = frame.f_locals
            # The first argument is ``self`` under any name.
            if (
                frame_locals.get(frame.f_code.co_varnames[0]) is optimizer
                and frame_locals.get("closure") is None
            ):
                return True
        frame = frame.f_back
    return False


@cache
def _step_codes(kind: type) -> frozenset[CodeType]:
    """Return the code objects of ``step()`` of a class and its base classes."""
    functions = (
        inspect.unwrap(vars(base)["step"]) for base in kind.__mro__ if "step" in vars(base)
    )
    return frozenset(step.__code__ for step in functions if inspect.isfunction(step))


def _is_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a graph is being captured on the device of the optimizer's first parameter.

    If the parameter is in host memory, the call uses no device.
    """
    groups = optimizer.param_groups
    parameter = next((parameter for group in groups for parameter in group["params"]), None)
    return parameter is not None and is_capturing(parameter.device)


def _disable_tracing(hook: Callable[..., None]) -> Any:
    """Return ``hook`` marked so that ``torch.compile`` does not trace it in a compiled step, since
    locks and waits cannot be traced.
    """
    return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]


def _settle_quietly(snapshot: Snapshot) -> None:
    with suppress(TensorChanged):  # The snapshot keeps the error, and ``confirm`` raises it
        snapshot.settle()
