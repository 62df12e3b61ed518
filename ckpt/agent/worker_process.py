"""The agent's side of a worker, which is a process that carries out one order for one job."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from ckpt.agent.client import process_environment
from ckpt.agent.folder import AgentFolder, Lock
from ckpt.agent.messages import frames
from ckpt.agent.worker_messages import Order, Report
from ckpt.errors import AgentError

_log = logging.getLogger("ckpt")
_REPORT_DECODER: Final = msgspec.msgpack.Decoder(Report)
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Workplace:
    """The resources that the agent needs to run workers.

    Attributes:
        folder: The folder of the agent.
        lock: ``work.lock``, which workers inherit.
        selector: The selector of the agent's loop. The loop calls ``key.data()`` for each key that
            is ready.
    """

    folder: AgentFolder
    lock: Lock
    selector: selectors.BaseSelector


class Worker:
    """A process that carries out an order. The process has ``work.lock`` while it runs, and is
    killed if the agent ends earlier.

    The process reports through ``_pipe``, its standard output. ``_buffer`` has the beginning of a
    report until the rest arrives.

    Args:
        order: The order.
        workplace: The resources for the process.
        on_report: Called with each report.
        on_end: Called with the exit code when the process has ended, but not after ``kill``.
        origin: A phrase that follows "the reports" in the log, such as "of a worker".

    Thread safety: the thread that runs the loop of the selector.
    """

    def __init__(
        self,
        order: Order,
        workplace: Workplace,
        on_report: Callable[[Report], None],
        on_end: Callable[[int], object],
        *,
        origin: str = "of a worker",
    ) -> None:
        """Start the process. Raises ``OSError`` if the system has no memory or process id left."""
        self._selector, self._on_report, self._on_end = workplace.selector, on_report, on_end
        self._origin = origin
        order_descriptor = os.memfd_create("ckpt-agent-order", os.MFD_CLOEXEC)
        shared_descriptors = [
            workplace.lock.descriptor,
            *([order.connection] if order.connection >= 0 else []),
        ]
        try:
            with os.fdopen(os.dup(order_descriptor), "wb") as file:
                file.write(msgspec.msgpack.encode(order))
            os.lseek(order_descriptor, 0, os.SEEK_SET)
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and fixed words
                [sys.executable, "-P", "-m", "ckpt.agent", "work", str(os.getpid())],
                stdin=order_descriptor,
                stdout=subprocess.PIPE,
                cwd="/",
                env={
                    **order.job.environment,
                    **_agent_variables(process_environment(workplace.folder)),
                },
                pass_fds=shared_descriptors,
                bufsize=0,
            )
        finally:
            os.close(order_descriptor)
        assert self._process.stdout is not None
        self._pipe, self._buffer = self._process.stdout, bytearray()
        os.set_blocking(self._pipe.fileno(), False)
        self._selector.register(self._pipe, selectors.EVENT_READ, self._read)

    def kill(self) -> None:
        """Kill the process, and wait until it has ended. The next worker continues its work."""
        self._process.kill()
        self._wait_for_end()

    def _read(self) -> None:
        """Receive the reports that have arrived, and pass them on. Once the process has closed its
        standard output, wait until the process has ended, and call ``on_end``. If a report cannot
        be read, kill the process first.
        """
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._on_end(self._wait_for_end())
            return
        self._buffer += data
        try:
            for frame in frames(self._buffer):
                self._on_report(_REPORT_DECODER.decode(frame))
        except (AgentError, msgspec.MsgspecError) as error:
            _log.warning("ckpt: the reports %s cannot be read: %s", self._origin, error)
            self._process.kill()
            self._on_end(self._wait_for_end())

    def _wait_for_end(self) -> int:
        """Wait until the process, which was killed or is about to end, has ended. Return its exit
        code.
        """
        self._selector.unregister(self._pipe)
        code = self._process.wait()
        self._pipe.close()
        return code


def _agent_variables(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that set the copy of ckpt, the folder of the agent,
    and the warnings of Python. A worker gets them from the agent, and not from its job.
    """
    names = ("PYTHONPATH", "CKPT_AGENT_FOLDER", "PYTHONWARNINGS")
    return {name: environment[name] for name in names if name in environment}
