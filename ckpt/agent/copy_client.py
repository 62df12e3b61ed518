"""The trainer's side of a copy that a worker of the agent makes."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from typing import Final

from ckpt.agent.client import Connection, reach_and_ask
from ckpt.agent.messages import (
    AskWorker,
    CopyFile,
    FileCopied,
    FileFailed,
    Job,
    Lent,
    Progress,
)
from ckpt.config import SaveConfig
from ckpt.coordination.abort_reason import rebuild
from ckpt.errors import AgentError, OutOfSpace, TransientStorageError
from ckpt.model.keys import StepRef
from ckpt.pipeline.image_writer import OnBytes
from ckpt.processes import Process
from ckpt.storage.tiers import OpenTier

_SILENCE_SECONDS: Final = 30.0
"""How long to wait for the next message of a worker, which reports progress several times a
second.
"""
_END_SECONDS: Final = 5.0
"""How long a worker may take to remove the data of a cancelled copy. After that it is killed."""


class AgentCopier:
    """Asks a worker of this node's agent to copy the files of this process to one tier.

    The first call of ``copy`` gets a worker from the agent. A later call gets another worker if
    the first one has ended.

    ``_connection`` is None as long as no worker is lent. A worker that has ended is replaced.

    Args:
        job: The job of this process. ``job.processes`` contains only this process.
        rank: The rank of this process, whose files are copied.
        config: The settings of the save: threads, niceness and cores.
        target: The tier that gets the files.

    Thread safety: one thread at a time.
    """

    def __init__(self, job: Job, rank: int, config: SaveConfig, target: OpenTier) -> None:
        self._job, self._rank, self._target, self._config = job, rank, target, config
        self._connection: Connection | None = None
        self._worker = Process(1, 0)  # No process, until a worker is lent

    def copy(self, ref: StepRef, source: OpenTier, on_bytes: OnBytes) -> tuple[int, ...]:
        """Copy the data file of this rank from ``source``, and wait until the copy is durable.

        Args:
            ref: The step.
            source: The tier that has the file.
            on_bytes: Called several times a second with the number of bytes copied since the last
                call. An exception that it raises ends the copy.

        Returns:
            The lengths of the encoded chunks on the target, in bytes. Empty if the target has no
            codec.

        Raises:
            AgentError: The agent could not copy the file. No worker writes to the copy any more, so
                the caller may copy the file itself.
            TransientStorageError, OutOfSpace: A store has failed.
        """
        on_bytes(0)
        request = CopyFile(
            folder=ref.folder,
            rank=self._rank,
            source=source.index,
            target=self._target.index,
            threads=self._config.threads,
            nice=self._config.nice,
            cpus=self._config.cpus,
        )
        connection = self._borrow_worker()
        try:
            connection.send(request)
            outcome = self._follow(connection, on_bytes)
        except BaseException:
            self._end_worker()
            raise
        if isinstance(outcome, FileCopied):
            return outcome.lengths
        error = rebuild(outcome.reason, ref.step)  # The error that the worker has met
        if isinstance(error, TransientStorageError | OutOfSpace):
            raise error
        raise AgentError(outcome.reason.sentence)

    def close(self) -> None:
        """Close the connection to the worker, which ends the worker. Call this only while no copy
        is under way.
        """
        if self._connection is not None:
            self._connection.interrupt()
            self._connection.close()
            self._connection = None

    def _borrow_worker(self) -> Connection:
        """Return the connection to a worker that waits for requests.

        Raises:
            AgentError: No agent of this version could be reached, or the agent refuses.
        """
        if self._connection is not None and self._connection.has_ended(seconds=0):
            self.close()
        if self._connection is None:
            connection, answer = reach_and_ask(AskWorker(self._job), _SILENCE_SECONDS)
            if not isinstance(answer, Lent):
                connection.close()
                raise AgentError("the agent has answered something else")
            self._connection, self._worker = connection, answer.process
        return self._connection

    def _follow(self, connection: Connection, on_bytes: OnBytes) -> FileCopied | FileFailed:
        """Pass the progress of a copy to ``on_bytes``, and return the last message about the
        copy.
        """
        copied_bytes = 0
        while True:
            match connection.next_answer(_SILENCE_SECONDS):
                case Progress(done_bytes):
                    on_bytes(done_bytes - copied_bytes)
                    copied_bytes = done_bytes
                case FileCopied() | FileFailed() as outcome:
                    return outcome
                case _:
                    raise AgentError("the worker has answered something else")

    def _end_worker(self) -> None:
        """Ask the worker to end, and kill it if it has not ended after ``_END_SECONDS``. This
        process may write the same file next, so the worker must have ended before that.
        """
        if self._connection is not None:
            self._connection.end_requests()
            if not self._connection.has_ended(_END_SECONDS):
                _kill(self._worker)
            self.close()


def _kill(process: Process) -> None:
    """Kill a process, and wait for at most ``_END_SECONDS`` until it has ended."""
    with suppress(OSError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if process.lives:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(1e3 * _END_SECONDS)  # In milliseconds
        finally:
            os.close(descriptor)
