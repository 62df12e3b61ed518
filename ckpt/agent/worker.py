"""A worker as the agent sees it: a process that works on one job."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from ckpt.agent.client import surroundings
from ckpt.agent.messages import frames
from ckpt.agent.place import Lock, Place
from ckpt.agent.reports import Order, Report
from ckpt.errors import AgentError

_log = logging.getLogger("ckpt")
_REPORTS: Final = msgspec.msgpack.Decoder(Report)
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Workplace:
    """What the agent runs its workers with.

    Attributes:
        place: The folder of the agent.
        lock: The lock that workers hold.
        selector: Calls the data of each key that is ready.
    """

    place: Place
    lock: Lock
    selector: selectors.BaseSelector


class Worker:
    """A process that carries out an order. It ends with the agent, and holds the lock until then.

    Args:
        on_report: Called with each report.
        on_end: Called with the exit code when the process has ended, except by ``kill``.
        of: Whose reports they are, for the log.

    Thread safety: one thread, that of the selector.
    """

    def __init__(
        self,
        order: Order,
        where: Workplace,
        on_report: Callable[[Report], None],
        on_end: Callable[[int], object],
        *,
        of: str = "of a worker",
    ) -> None:
        """Raises ``OSError`` if no memory or no process is left."""
        self._selector, self._on_report, self._on_end = where.selector, on_report, on_end
        self._of = of
        descriptor = os.memfd_create("ckpt-agent-order", os.MFD_CLOEXEC)
        passed = [where.lock.descriptor, *([order.connection] if order.connection >= 0 else [])]
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(msgspec.msgpack.encode(order))
            os.lseek(descriptor, 0, os.SEEK_SET)
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and fixed words
                [sys.executable, "-P", "-m", "ckpt.agent", "work", str(os.getpid())],
                stdin=descriptor,
                stdout=subprocess.PIPE,
                cwd="/",
                env={**order.job.environment, **_python(surroundings(where.place))},
                pass_fds=passed,
                bufsize=0,
            )
        finally:
            os.close(descriptor)
        assert self._process.stdout is not None
        self._pipe, self._unread = self._process.stdout, bytearray()
        os.set_blocking(self._pipe.fileno(), False)
        self._selector.register(self._pipe, selectors.EVENT_READ, self._read)

    def kill(self) -> None:
        """End it at once. What it has begun is continued by the next one."""
        self._process.kill()
        self._await()

    def _read(self) -> None:
        """Take in what it has reported. The process ends when its reports end."""
        try:
            with suppress(BlockingIOError):
                data = os.read(self._pipe.fileno(), _READ_BYTES)
                if not data:
                    self._on_end(self._await())
                    return
                self._unread += data
            for frame in frames(self._unread):
                self._on_report(_REPORTS.decode(frame))
        except (AgentError, msgspec.MsgspecError) as error:
            _log.warning("ckpt: the reports %s cannot be read: %s", self._of, error)
            self._process.kill()
            self._on_end(self._await())

    def _await(self) -> int:
        """Return the exit code once it has ended, which it is about to."""
        self._selector.unregister(self._pipe)
        code = self._process.wait()
        self._pipe.close()
        return code


def _python(environment: dict[str, str]) -> dict[str, str]:
    """Return what a worker needs of the agent's environment to find the same package."""
    names = ("PYTHONPATH", "CKPT_AGENT_FOLDER", "PYTHONWARNINGS")
    return {name: environment[name] for name in names if name in environment}
