"""The workers that the agent lends to trainers that live, to copy their files."""

from __future__ import annotations

import logging
import selectors
import socket
from functools import partial
from typing import Final

import msgspec

from ckpt.agent.messages import Job
from ckpt.agent.place import Lock, Place
from ckpt.agent.reports import Ended, Order
from ckpt.agent.worker import Worker
from ckpt.errors import AgentError

_log = logging.getLogger("ckpt")
_MOST: Final = 32
"""How many workers are lent at once: one for each process of a trainer and farther tier."""


class Lending:
    """Starts these workers, and ends them.

    Args:
        place: The folder of the agent.
        lock: The lock that workers hold.
        selector: Calls the data of each key that is ready.

    Thread safety: one thread.
    """

    def __init__(self, place: Place, lock: Lock, selector: selectors.BaseSelector) -> None:
        self._place, self._lock, self._selector = place, lock, selector
        self._lent: dict[Worker, str] = {}

    def __bool__(self) -> bool:
        """Whether a worker is lent."""
        return bool(self._lent)

    def lend(self, job: Job, connection: socket.socket) -> None:
        """Start a worker that serves the trainer at the other end of ``connection``.

        Raises ``AgentError`` if there are too many, or none can be started.
        """
        if len(self._lent) >= _MOST:
            raise AgentError(f"{_MOST} of its workers copy for trainers already")
        order = Order(job, "copy", connection=connection.fileno())
        try:
            worker = Worker(order, self._place, self._lock)
        except OSError as error:
            raise AgentError(f"no worker could be started: {error}") from None
        self._lent[worker] = job.owner.attempt
        on_report = partial(self._on_report, worker)
        self._selector.register(worker.reports, selectors.EVENT_READ, on_report)

    def end(self, attempt: str | None = None) -> None:
        """End the workers of a job, or of all jobs."""
        for worker, of in list(self._lent.items()):
            if attempt in (None, of):
                self._end(worker)

    def _on_report(self, worker: Worker) -> None:
        try:
            reports = worker.read()
        except (AgentError, msgspec.MsgspecError) as error:
            reports = None
            _log.warning("ckpt: the reports of a worker cannot be read: %s", error)
        for report in reports or ():
            if isinstance(report, Ended) and report.error:
                _log.warning("ckpt: %s", report.error)
        if reports is None:
            self._end(worker)

    def _end(self, worker: Worker) -> None:
        del self._lent[worker]
        self._selector.unregister(worker.reports)
        worker.kill()
