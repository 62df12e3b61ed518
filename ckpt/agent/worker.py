"""A worker as the agent sees it: a process that works on one job."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Final

import msgspec

from ckpt.agent.client import surroundings
from ckpt.agent.messages import frames
from ckpt.agent.place import Lock, Place
from ckpt.agent.reports import Order, Report

_REPORTS: Final = msgspec.msgpack.Decoder(Report)
_READ_BYTES: Final = 1 << 16


class Worker:
    """A process that carries out an order. It ends with the agent, and holds ``lock`` until then.

    Attributes:
        reports: The descriptor of its reports.

    Thread safety: one thread, which calls ``end`` or ``kill`` once.
    """

    def __init__(self, order: Order, place: Place, lock: Lock) -> None:
        """Raises ``OSError`` if no memory or no process is left."""
        descriptor = os.memfd_create("ckpt-agent-order", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(msgspec.msgpack.encode(order))
            os.lseek(descriptor, 0, os.SEEK_SET)
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and fixed words
                [sys.executable, "-P", "-m", "ckpt.agent", "work", str(os.getpid())],
                stdin=descriptor,
                stdout=subprocess.PIPE,
                cwd="/",
                env={**order.job.environment, **_python(surroundings(place))},
                pass_fds=[lock.descriptor, *([order.connection] if order.connection >= 0 else [])],
                bufsize=0,
            )
        finally:
            os.close(descriptor)
        assert self._process.stdout is not None
        self.reports = self._process.stdout.fileno()
        os.set_blocking(self.reports, False)
        self._unread = bytearray()

    def read(self) -> list[Report] | None:
        """Return what it has reported, or None if it has ended.

        Raises:
            AgentError, msgspec.MsgspecError: It cannot be read.
        """
        with suppress(BlockingIOError):
            data = os.read(self.reports, _READ_BYTES)
            if not data:
                return None
            self._unread += data
        return [_REPORTS.decode(frame) for frame in frames(self._unread)]

    def end(self) -> int:
        """Wait until it has ended, and return its exit code."""
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def kill(self) -> None:
        """End it at once. What it has begun is continued by the next one."""
        self._process.kill()
        self.end()


def _python(environment: dict[str, str]) -> dict[str, str]:
    """Return what a worker needs of the agent's environment to find the same package."""
    names = ("PYTHONPATH", "CKPT_AGENT_FOLDER", "PYTHONWARNINGS")
    return {name: environment[name] for name in names if name in environment}
