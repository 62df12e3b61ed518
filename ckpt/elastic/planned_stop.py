"""A planned stop: after a signal on any rank, all ranks stop after the same step.

They save that step within a grace time, and end as the signal would have ended them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

from ckpt.checks import is_number
from ckpt.coordination.api import Coordinator
from ckpt.elastic.last_step import LastStep
from ckpt.errors import ConfigError
from ckpt.pipeline.workers import Workers

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_PATIENCE_SECONDS: Final = 5.0
"""How many seconds ranks wait for each other's promise, which comes from a thread of its own."""
_CLOSE: Final = 0  # no signal has this number
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("ckpt")
_active: StopSignals | None = None


class alone_in:  # noqa: N801 - read as a word of the with statement
    """A block of a manager's method that may not begin inside of another such block in the same
    thread: raises ``ConfigError``.

    A signal handler makes such calls. What it has interrupted holds locks and slots until the
    handler returns, and a state that is being restored is of no step at all. The error is logged
    too, since it is raised wherever the signal has struck, and a loop may handle it as another
    error. A manager that is closed, or closes, answers as always.
    """

    def __init__(self, manager: Any, name: str) -> None:
        self._manager, self._name = manager, name

    def __enter__(self) -> None:
        manager, thread = self._manager, threading.get_ident()
        if (outer := manager._inside.get(thread)) is not None and not manager._closed:
            refused = ConfigError(
                f"{self._name}() was called inside of {outer}() in the same thread, as by a "
                "signal handler: let manager.on_signals() handle the signal, or raise SystemExit "
                "in the handler"
            )
            _log.error("ckpt: %s", refused)
            raise refused
        manager._inside[thread] = self._name

    def __exit__(self, *_: object) -> None:
        self._manager._inside.pop(threading.get_ident(), None)


def one_at_a_time(
    name: str,
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Decorate a method of a manager with `alone_in`."""

    def guarded(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with alone_in(self, name):
                return method(self, *args, **kwargs)

        return call

    return guarded


class StopSignals:
    """Handles signals between ``CheckpointManager.on_signals`` and the manager's ``close``.

    ``close`` restores the earlier handlers and raises the signal again, so the process ends as it
    would have ended without ckpt.

    If the grace time is over before that, or some rank does not answer, the default action of the
    signal ends the process at once. The save under way is lost, and older checkpoints are intact. A
    repeated signal changes nothing, since launchers often send several. A second SIGINT goes to the
    earlier handler, which raises ``KeyboardInterrupt``.

    Attributes:
        signal: The signal that arrived on this rank or on another one; None so far.

    Thread safety:
        Create and close it in the main thread. Call ``requested`` from the training thread.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        signals: tuple[int, ...],
        grace_seconds: float,
        *,
        reraise: bool = True,
        owner: object = None,
    ) -> None:
        """``owner`` closes this; it lives as long as the handlers do."""
        _check(signals, grace_seconds)
        self.signal: signal.Signals | None = None
        self._signals, self._grace, self._reraise, self._owner = (
            signals,
            grace_seconds,
            reraise,
            owner,
        )
        self._last = LastStep(coordinator, patience=min(_PATIENCE_SECONDS, grace_seconds / 2))
        self._closed = self._interrupted = False
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)  # a handler must never wait
        self._earlier: dict[int, Any] = {}
        self._wakes = False
        self._workers = Workers("stop", 3)
        self._workers.submit(self._watch)
        if coordinator.world_size > 1:
            self._workers.submit(self._listen)
        self._install()

    def requested(self, step: int) -> bool:
        """Return True if ``step``, which is over, is the last step.

        The answer is the same on all ranks if all of them ask after the same steps, in rising
        order. The call costs about a microsecond until there is a signal. After that it waits once
        for the other ranks.
        """
        return self._last.requested(step)

    def close(self, error: BaseException | None = None) -> None:
        """Put the earlier handlers back and, if a signal was heard, raise it again, unless
        ``error`` ends the process anyway.

        A second call does nothing.
        """
        if self._closed:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "a manager with on_signals() is closed in the main thread, as handlers are"
            )
        self._closed = True
        try:
            self._last.part()
        finally:
            os.write(self._mouth, bytes([_CLOSE]))
            self._workers.close()
            self.uninstall()  # not before: an earlier handler may raise
            while self.signal is None and (late := self._next(0)) != -1:
                self.signal = signal.Signals(late) if late in self._signals else None
            os.close(self._mouth)
            os.close(self._ear)
        if self.signal is not None and self._reraise and error is None:
            # the default action throws away what is in them
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            signal.raise_signal(self.signal)

    # -- signals, in the main thread ---------------------------------------------------------------

    def _install(self) -> None:
        global _active
        _active = self
        for signum in self._signals:
            self._earlier[signum] = signal.signal(signum, self._handle)
        # so that a signal is heard also while the main thread is stuck in a collective
        other = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._wakes = other == -1
        if not self._wakes:
            signal.set_wakeup_fd(other)

    def uninstall(self) -> None:
        """Give the signals back to the handlers that were there before."""
        global _active
        _active = None
        if self._wakes and (other := signal.set_wakeup_fd(-1)) != self._mouth:
            signal.set_wakeup_fd(other)
        for signum, earlier in self._earlier.items():
            if signal.getsignal(signum) == self._handle:  # else somebody has come after us
                signal.signal(signum, signal.SIG_DFL if earlier is None else earlier)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal. This runs between any two instructions of the main thread, so it takes
        no lock.
        """
        earlier = self._earlier[signum]
        if self._closed or (signum == signal.SIGINT and self._interrupted):
            if callable(earlier):
                earlier(signum, frame)
            return
        self._interrupted |= signum == signal.SIGINT
        with contextlib.suppress(BlockingIOError):  # it was heard long ago
            os.write(self._mouth, bytes([signum]))

    # -- in the background -------------------------------------------------------------------------

    def _watch(self) -> None:
        signum = -1
        while signum not in (*self._signals, _CLOSE):
            signum = self._next(None)
        if signum == _CLOSE:
            return
        began = time.monotonic()
        self.signal = signal.Signals(signum)
        if self._closed:
            return
        _log.warning("ckpt: %s: all ranks stop after the same step", self.signal.name)
        self._workers.submit(
            partial(self._agree, self.signal)
        )  # the job's store may hang: the grace time ends that too
        while (left := began + self._grace - time.monotonic()) > 0:
            if self._next(left) == _CLOSE:
                return
        self._end(self.signal, f"the grace time of {self._grace:g} s is over")

    def _agree(self, signum: signal.Signals) -> None:
        try:
            step = self._last.agree(str(int(signum)).encode())
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the training thread may wait for ever.
            self._end(signum, f"no last step was agreed on: {error}")
        _log.info("ckpt: step %d is the last", step)

    def _listen(self) -> None:
        if (word := self._last.listen()) is not None:
            os.write(self._mouth, bytes([int(word)]))

    def _next(self, seconds: float | None) -> int:
        """Return the next signal number; -1 if there is none within ``seconds``."""
        poll = select.poll()
        poll.register(self._ear, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * 1e3):
            return -1
        return os.read(self._ear, 1)[0]

    def _end(self, signum: signal.Signals, reason: str) -> NoReturn:
        """End the process by the default action of the signal, from any thread.

        Python would leave it to the main thread, which may be stuck.
        """
        _log.error("ckpt: %s: %s; ending now, older checkpoints are whole", signum.name, reason)
        ctypes.CDLL(None).signal(ctypes.c_int(signum), ctypes.c_void_p(0))
        os.kill(os.getpid(), signum)
        time.sleep(1)
        os._exit(128 + signum)  # what it does by default is nothing


def _check(signals: tuple[int, ...], grace_seconds: float) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "on_signals() must be called in the main thread: Python lets no other one handle "
            "signals"
        )
    if not is_number(grace_seconds) or not 0 < grace_seconds < float("inf"):
        raise ConfigError(
            f"grace_seconds={grace_seconds!r}: give a number of seconds above 0, such as 25"
        )
    if _active is not None:
        raise ConfigError(
            "signals are already handled: one on_signals() in a process, until that manager is "
            "closed"
        )
    for signum in signals:
        if signum not in signal.valid_signals() or signum in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"{signum!r} is not a signal that can be handled: take signal.SIGTERM, for instance"
            )


def _let_go() -> None:
    """Stop handling signals in a fork, such as a data loader's worker: its signals are not the
    job's.
    """
    if _active is not None:
        _active.uninstall()


os.register_at_fork(after_in_child=_let_go)
