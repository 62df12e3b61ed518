"""A planned stop: after a signal or a request on any rank, all ranks stop after the same step.

After a signal, each rank must save that step and close its manager within a grace time. The rank
then ends as the signal would have ended it. After a request, the ranks have time until the deadline
of the request, if it has one.

Signal handlers and other threads write one byte for each signal, request or close into a pipe,
which a *watcher* thread reads. The watcher lets an *agreer* thread agree with the other ranks on
the last step (see ``last_step_agreement``). It ends the process when its time is over. A *listener*
thread waits for the signals and requests of other ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from datetime import datetime
from types import FrameType
from typing import Any, Final, NoReturn

from ckpt.checks import check_number, is_number
from ckpt.coordination.coordinator import Coordinator
from ckpt.elastic.last_step_agreement import LastStep
from ckpt.errors import ConfigError
from ckpt.pipeline.workers import Workers

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_PATIENCE_SECONDS: Final = 5.0
"""How many seconds a rank waits for the promises of the other ranks, which background threads
make.
"""
_CLOSE: Final = 0  # No signal has this number
_REQUEST: Final = 255  # No signal has this number either
_STOP_MESSAGE: Final = b"request"
"""The message that announces a request to stop to the other ranks. A deadline may follow it."""
_POLL_SECONDS: Final = 3600.0
_DEADLINE_REASON: Final = "the deadline of the request is over"
_log = logging.getLogger("ckpt")
_active: StopSignals | None = None


def as_deadline(value: object) -> float:
    """Return the deadline ``value`` in seconds since 1970; infinity if ``value`` is None.

    Args:
        value: A number of seconds from now, a datetime with a time zone, or None for no deadline.

    Raises:
        ConfigError: ``value`` is not one of these, or the deadline has passed already.
    """
    if value is None:
        return math.inf
    advice = "give seconds from now, or a datetime with a time zone, such as 120"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ConfigError(f"deadline={value!r} has no time zone: {advice}")
        deadline = value.timestamp()
    elif is_number(value):
        deadline = time.time() + float(value)
    else:
        raise ConfigError(f"deadline={value!r}: {advice}")
    if not deadline > time.time():
        raise ConfigError(f"deadline={value!r} is over: {advice}")
    return deadline


class StopSignals:
    """Handles signals and requests to stop, from ``CheckpointManager.on_signals`` or
    ``on_stop_request`` until the manager's ``close``.

    ``close`` restores the earlier handlers and raises the signal again, so the process ends as it
    would have ended without ckpt. ``CheckpointManager.request_stop`` stops the ranks as a signal
    does, but ``close`` then raises no signal.

    The process ends at once, by the default action of the signal (SIGTERM after a request), in two
    cases: the grace time or the deadline is over before ``close`` ends, or the ranks cannot agree
    on the last step, for example because one of them does not answer. Then the save under way is
    lost, and older checkpoints are intact.

    A repeated signal changes nothing, since launchers often send several. A second SIGINT goes to
    the earlier handler, which usually raises ``KeyboardInterrupt``.

    Attributes:
        signal: The signal that has arrived on this rank or on another one; None if there is none.

    Thread safety:
        Create and close the object in the main thread, unless it handles no signals. Call
        ``requested`` from the training thread, and ``request`` from any thread.
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
        """Install the handlers of ``signals``.

        Args:
            coordinator: The connection to the other ranks.
            signals: The signals to handle; empty to listen for requests only.
            grace_seconds: How many seconds after a signal ``close`` must have ended.
            reraise: Whether ``close`` raises the signal again.
            owner: The manager that closes this object. It is kept alive as long as the handlers are
                installed.

        Raises:
            ConfigError: ``signals`` is not empty, and the call is not in the main thread, an
                argument is not valid, or another object handles signals already.
            ThreadLimit: The system starts no more threads.
        """
        _check_arguments(signals, grace_seconds)
        # All threads start now, since the system may start no more when a signal arrives.
        self._watcher = Workers("stop", 1).start()
        self._agreer = Workers("stop-agree", 1).start()
        self._listener = Workers("stop-hear", 1)
        if coordinator.world_size > 1:
            self._listener.start()
        self.signal: signal.Signals | None = None
        self._signals, self._grace_seconds, self._reraise, self._owner = (
            signals,
            grace_seconds,
            reraise,
            owner,
        )
        self._last_step = LastStep(coordinator, patience=min(_PATIENCE_SECONDS, grace_seconds / 2))
        self._deadline = math.inf
        self._closed = self._has_interrupt = False  # An interrupt is a SIGINT
        self._read_end, self._write_end = os.pipe()
        # A signal handler may call ``request`` while its thread holds this lock in ``close``. So
        # the lock is reentrant.
        self._pipe_lock, self._is_pipe_closed = threading.RLock(), False
        os.set_blocking(self._write_end, False)  # A handler must never wait
        self._earlier_handlers: dict[int, Any] = {}
        self._has_wakeup_fd = False
        self._watcher.submit(self._watch)
        if coordinator.world_size > 1:
            self._listener.submit(self._listen)
        if signals:
            self._install()

    def request(self, deadline: float) -> None:
        """Stop all ranks after the same step, as after a signal.

        This has no effect after ``close``.

        Args:
            deadline: When this process ends at the latest, in seconds since 1970; infinity for no
                limit. A further request can only make that time earlier, and only for this rank.
        """
        with self._pipe_lock:
            if self._is_pipe_closed:
                return
            self._deadline = min(self._deadline, deadline)
            with contextlib.suppress(BlockingIOError):  # The pipe is full of earlier requests
                os.write(self._write_end, bytes([_REQUEST]))

    def requested(self, step: int) -> bool:
        """Return True if ``step``, which this rank has completed, is the last step or a later one.

        The answer is the same on all ranks if all ranks ask after the same steps, in rising order.
        Until there is a signal or a request, the call takes about a microsecond. After that, one
        call waits for the other ranks.
        """
        return self._last_step.is_last(step)

    def close(self, error: BaseException | None = None) -> None:
        """Restore the earlier handlers. If a signal has arrived and ``reraise`` is set, raise it
        again.

        A second call does nothing.

        Args:
            error: The error that ends the process; None if there is none. With an error, the signal
                is not raised, since the process ends anyway.

        Raises:
            ConfigError: The object handles signals, and this is not the main thread.
        """
        if self._closed:
            return
        if self._signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "a manager with on_signals() is closed in the main thread, as handlers are"
            )
        self._closed = True
        try:
            self._last_step.leave()
        finally:
            os.write(self._write_end, bytes([_CLOSE]))
            for workers in (self._watcher, self._agreer, self._listener):
                workers.close()
            self.uninstall()  # The threads are closed first, since a restored handler may raise
            while self.signal is None and (byte := self._next_byte(0)) != -1:
                self.signal = signal.Signals(byte) if byte in self._signals else None
            with self._pipe_lock:
                self._is_pipe_closed = True
                os.close(self._write_end)
                os.close(self._read_end)
        if self.signal is not None and self._reraise and error is None:
            # The default action of the signal discards the buffers of the streams.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            signal.raise_signal(self.signal)

    # -- signals, in the main thread ---------------------------------------------------------------

    def _install(self) -> None:
        """Install the handlers, and let the pipe get the signals too."""
        global _active
        _active = self
        for signum in self._signals:
            self._earlier_handlers[signum] = signal.signal(signum, self._handle)
        # Python's C code writes the number of a signal to the wakeup file descriptor, even if the
        # main thread is stuck in a collective.
        wakeup_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._has_wakeup_fd = wakeup_fd == -1
        if not self._has_wakeup_fd:  # It is that of another library, such as asyncio
            signal.set_wakeup_fd(wakeup_fd)

    def uninstall(self) -> None:
        """Put back the handlers that were installed before."""
        global _active
        _active = None if _active is self else _active
        if self._has_wakeup_fd and (wakeup_fd := signal.set_wakeup_fd(-1)) != self._write_end:
            signal.set_wakeup_fd(wakeup_fd)
        for signum, handler in self._earlier_handlers.items():
            # Another handler may have been installed later.
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal. Call the earlier handler instead if ``close`` was called before, or if
        the signal is a second SIGINT.

        This method may interrupt the main thread at any instruction, so it takes no lock.
        """
        earlier_handler = self._earlier_handlers[signum]
        if self._closed or (signum == signal.SIGINT and self._has_interrupt):
            if callable(earlier_handler):
                earlier_handler(signum, frame)
            return
        self._has_interrupt |= signum == signal.SIGINT
        with contextlib.suppress(BlockingIOError):  # The pipe is full of earlier signals
            os.write(self._write_end, bytes([signum]))

    # -- in the background -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Read the pipe until ``close``. At the first signal or request, begin the agreement on the
        last step. End the process when its time is over.
        """
        has_begun, grace_end = False, math.inf
        while (seconds := min(grace_end - time.monotonic(), self._deadline - time.time())) > 0:
            byte = self._next_byte(None if math.isinf(seconds) else min(seconds, _POLL_SECONDS))
            if byte == _CLOSE:
                return
            if byte in self._signals and self.signal is None:
                self.signal = signal.Signals(byte)
                grace_end = time.monotonic() + self._grace_seconds
            elif byte != _REQUEST:
                continue
            if self._closed:
                return
            if not has_begun:
                has_begun = True
                cause = self.signal.name if self.signal else "a stop was requested"
                _log.warning("ckpt: %s: all ranks stop after the same step", cause)
                # The job's store may hang. This thread goes on to watch the grace time.
                self._agreer.submit(self._agree)
        is_grace_over = grace_end <= time.monotonic()
        self._end_process(
            f"the grace time of {self._grace_seconds:g} s is over"
            if is_grace_over
            else _DEADLINE_REASON
        )

    def _agree(self) -> None:
        """Agree on the last step with all ranks. End the process if that fails."""
        request = (
            _STOP_MESSAGE
            if math.isinf(self._deadline)
            else b"%s%.3f" % (_STOP_MESSAGE, self._deadline)
        )
        try:
            step = self._last_step.agree(str(int(self.signal)).encode() if self.signal else request)
        except Exception as error:  # noqa: BLE001
            # After any error, the training thread might wait for ever.
            self._end_process(f"no last step was agreed on: {error}")
        _log.info("ckpt: step %d is the last", step)

    def _listen(self) -> None:
        """Pass on the signal or the request of another rank to the pipe of this one."""
        if (message := self._last_step.listen()) is None:
            return
        if message.startswith(_STOP_MESSAGE):
            self.request(float(message.removeprefix(_STOP_MESSAGE) or "inf"))
        else:
            os.write(self._write_end, bytes([int(message)]))

    def _next_byte(self, seconds: float | None) -> int:
        """Return the next byte in the pipe: a signal, ``_CLOSE`` or ``_REQUEST``. Return -1 if none
        comes within ``seconds``.
        """
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        if not poll.poll(None if seconds is None else seconds * 1e3):
            return -1
        return os.read(self._read_end, 1)[0]

    def _end_process(self, reason: str) -> NoReturn:
        """End the process by the default action of the signal. Any thread may call this.

        The C function ``signal`` restores the default action, since Python's function works only in
        the main thread, which may be stuck.
        """
        signum = self.signal or signal.SIGTERM
        cause = signum.name if self.signal else "a stop was requested"
        _log.error("ckpt: %s: %s; ending now, older checkpoints are whole", cause, reason)
        ctypes.CDLL(None).signal(ctypes.c_int(signum), ctypes.c_void_p(0))
        os.kill(os.getpid(), signum)
        time.sleep(1)
        os._exit(128 + signum)  # The signal's default action is to ignore it


def _check_arguments(signals: tuple[int, ...], grace_seconds: float) -> None:
    """Raise ``ConfigError`` if ``signals`` cannot be handled here."""
    if not signals:
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "on_signals() must be called in the main thread: Python lets no other one handle "
            "signals"
        )
    check_number("grace_seconds", grace_seconds, "seconds above 0, such as 25", above_zero=True)
    if _active is not None:
        raise ConfigError(
            "signals are already handled: one on_signals() in a process, until that manager is "
            "closed"
        )
    for signum in signals:
        # Most real-time signals have no name, and so are no `signal.Signals`.
        if signum not in set(signal.Signals) or signum in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"{signum!r} is not a signal that can be handled: take signal.SIGTERM, for instance"
            )


def _uninstall_in_child() -> None:
    """Stop handling signals in a forked process, such as a data loader's worker. A signal to that
    process does not concern the job.
    """
    if _active is not None:
        _active.uninstall()


os.register_at_fork(after_in_child=_uninstall_in_child)
