"""Which calls of a manager are possible now: of one thread one at a time, while it is open, and in
the process that made it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckpt.errors import ConfigError, ManagerClosed
from ckpt.pipeline.workers import has_script_ended

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("ckpt")


class CallGuard:
    """Refuses calls of one manager.

    Attributes:
        calls: The id of a thread -> the name of the method of the manager that it is in.
        is_closed: Whether the manager is closed, or being closed.
        pid: The process that made the manager. Another process was forked from it.

    Thread safety: all methods may be called from any thread. A thread changes only its own entry of
    ``calls``.
    """

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.is_closed = False
        self.pid = os.getpid()

    def check_open(self) -> None:
        """Raise ``ManagerClosed`` if the manager is closed, and ``ConfigError`` if this process was
        forked.
        """
        if self.is_closed:
            raise ManagerClosed(has_script_ended=has_script_ended())
        if os.getpid() != self.pid:
            raise ConfigError(
                "this CheckpointManager was made before a fork: build one in the process that "
                "uses it (spawn, not fork)"
            )

    def check_alone(self, name: str) -> None:
        """Raise ``ConfigError`` if the manager is open and this thread is inside one of its
        methods. A process that was forked inside of a method, such as a worker that a data loader
        starts in its ``state_dict()``, is not inside of it.
        """
        outer = self.calls.get(threading.get_ident())
        if outer is not None and not self.is_closed and os.getpid() == self.pid:
            error = ConfigError(
                f"{name}() was called inside of {outer}() in the same thread, as by a signal "
                "handler: let manager.on_signals() handle the signal, or raise SystemExit in the "
                "handler"
            )
            _log.error("ckpt: %s", error)
            raise error


def one_at_a_time(
    name: str,
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Return a decorator for methods of a manager that must not be called inside of each other. The
    manager has its `CallGuard` in ``_guard``.

    If a decorated method is called while another one runs in the same thread, it raises
    ``ConfigError``. A signal handler could make such a call. The call is refused because the
    interrupted method holds locks and slots until the handler returns, and may have restored only a
    part of the state. The error is logged too, since the code that the signal has interrupted may
    handle the error as one of its own. There is no such check for a manager that is closed or is
    being closed.

    Args:
        name: The name of the method in the error.
    """

    def decorate(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            guard: CallGuard = self._guard
            guard.check_alone(name)
            thread = threading.get_ident()
            # Ctrl-C may raise wherever a function begins or has returned. So no function is called
            # between ``method`` and ``pop``. Otherwise ``pop`` might not be reached, and the
            # manager would refuse every later call.
            try:
                guard.calls[thread] = name
                return method(self, *args, **kwargs)
            finally:
                guard.calls.pop(thread, None)

        return call

    return decorate
