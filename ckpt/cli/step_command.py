"""Run a shell command for a step, for ``ckpt watch``, ``ckpt bisect`` and ``ckpt prove``."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final

from ckpt.catalog.watching import CommittedStep

_END_SECONDS: Final = 30.0
"""The time that a stopped command, and the processes that it has started, get to end."""
_END_POLL_SECONDS: Final = 0.05
"""The time between two checks whether the processes have ended."""
_POLL_SECONDS: Final = 0.5
"""The time between two checks whether a command has done enough."""
_TERMINATED_CODE: Final = 128 + signal.SIGTERM
_PLACEHOLDER: Final = re.compile(r"\{(path|step|root)\}")


class StepSignals:
    """Turns SIGTERM and SIGINT into exceptions, which end the command and the pin of its step.

    The signals are held back while a command starts, because an exception in the constructor of
    ``Popen`` would leave the command running.

    Thread safety: only the main thread may use it.
    """

    def __init__(self) -> None:
        self._holds_back, self._pending = False, 0

    @contextmanager
    def as_exceptions(self) -> Generator[None]:
        """Return a context manager. A SIGTERM in its block raises ``SystemExit`` there, and a
        SIGINT raises ``KeyboardInterrupt``.
        """
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous_handlers = [signal.signal(number, self._on_signal) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, previous_handlers, strict=True):
                signal.signal(number, handler)

    def hold(self) -> None:
        """Hold back signals from now until ``release``."""
        self._holds_back = True

    def release(self) -> None:
        """Stop holding back signals. If a signal was held back, raise its exception."""
        self._holds_back = False
        if self._pending:
            self._raise(self._pending)

    def _on_signal(self, number: int, _: object) -> None:
        self._pending = number
        if not self._holds_back:
            self._raise(number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(_TERMINATED_CODE)


def run_for_step(command: str, step: CommittedStep, signals: StepSignals) -> int:
    """Run the command for a step, and return its exit code.

    If a signal raises an exception meanwhile, the command and the processes that it has started get
    SIGTERM, and SIGKILL after 30 s. This function waits until they have ended, and then raises the
    exception again.
    """
    with _process_of(command, step, signals) as process:
        return process.wait()


def run_until(
    command: str, step: CommittedStep, signals: StepSignals, is_enough: Callable[[], bool]
) -> int | None:
    """Run the command for a step until ``is_enough`` returns True, and then stop it: it gets
    SIGTERM, and SIGKILL after 30 s. If the command ends before, return its exit code, else None.
    """
    with _process_of(command, step, signals) as process:
        while not is_enough():
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
        _stop(process)
    return None


@contextmanager
def _process_of(
    command: str, step: CommittedStep, signals: StepSignals
) -> Generator[subprocess.Popen[bytes]]:
    """Return a context manager that starts the command for a step, and yields its process. If the
    block fails, the command is stopped.
    """
    values = {"path": step.path, "step": str(step.step), "root": step.root}
    command = _PLACEHOLDER.sub(lambda placeholder: shlex.quote(values[placeholder[1]]), command)
    inherited = os.environ  # noqa: TID251 - no setting is read here
    environment = {**inherited, **{f"CKPT_{key.upper()}": value for key, value in values.items()}}
    signals.hold()
    with subprocess.Popen(  # noqa: S602
        command, shell=True, env=environment, process_group=0
    ) as process:
        try:
            signals.release()
            yield process
        except BaseException:
            signals.hold()
            _stop(process)
            raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a command and the processes that it has started, and wait for their end."""
    # The processes may have just ended, or have changed their user.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process and all other processes of its group have ended. Kill the group after
    30 s.
    """
    deadline = time.monotonic() + _END_SECONDS
    # These errors mean that the group has ended, or that its processes have changed their user.
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            process.poll()  # Otherwise the process stays in its group as a zombie after its end
            os.killpg(process.pid, 0)  # Signal 0 is not sent: the call fails if the group has ended
            time.sleep(_END_POLL_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
