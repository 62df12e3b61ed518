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
"""How long a worker may be silent: it reports its progress several times in a second."""
_END_SECONDS: Final = 5.0
"""How long a worker may take to remove what it has written of a copy that is not wanted."""


class AgentCopier:
    """Lets a worker of this node's agent copy files of this process to one tier.

    The worker is asked for when it is first needed, and again if it has ended.

    Args:
        job: The job, with this process alone.
        rank: Whose files are copied.
        config: How to copy.
        target: The tier.

    Thread safety: one thread at a time.
    """

    def __init__(self, job: Job, rank: int, config: SaveConfig, target: OpenTier) -> None:
        self._job, self._rank, self._target, self._config = job, rank, target, config
        self._connection: Connection | None = None
        self._worker = Process(1, 0)

    def copy(self, ref: StepRef, source: OpenTier, on_bytes: OnBytes) -> tuple[int, ...]:
        """Copy the file of a step from ``source``, and wait until it is durable.

        Args:
            on_bytes: Called several times in a second. It ends the copy by an exception.

        Returns:
            The lengths of the chunks on the tier, if they are encoded there.

        Raises:
            AgentError: It could not be copied in this way. No worker writes to it any more.
            TransientStorageError, OutOfSpace: The store has failed.
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
        connection = self._borrow()
        try:
            connection.send(request)
            last = self._follow(connection, on_bytes)
        except BaseException:
            self._end()
            raise
        if isinstance(last, FileCopied):
            return last.lengths
        error = rebuild(last.reason, ref.step)
        if isinstance(error, TransientStorageError | OutOfSpace):
            raise error
        raise AgentError(last.reason.sentence)

    def close(self) -> None:
        """Let the worker end. No copy is under way."""
        if self._connection is not None:
            self._connection.interrupt()
            self._connection.close()
            self._connection = None

    def _borrow(self) -> Connection:
        """Return the connection to a worker that waits for requests.

        Raises:
            AgentError: There is no agent of this version, or it refuses.
        """
        if self._connection is not None and self._connection.has_ended(0):
            self.close()
        if self._connection is None:
            found, answer = reach_and_ask(AskWorker(self._job), _SILENCE_SECONDS)
            if not isinstance(answer, Lent):
                found.close()
                raise AgentError("the agent has answered something else")
            self._connection, self._worker = found, answer.process
        return self._connection

    def _follow(self, connection: Connection, on_bytes: OnBytes) -> FileCopied | FileFailed:
        done = 0
        while True:
            match connection.next_answer(_SILENCE_SECONDS):
                case Progress(now):
                    on_bytes(now - done)
                    done = now
                case FileCopied() | FileFailed() as last:
                    return last
                case _:
                    raise AgentError("the worker has answered something else")

    def _end(self) -> None:
        """Wait until the worker has ended, by force if that takes long: it must not write what this
        process is about to write.
        """
        if self._connection is not None:
            self._connection.end_requests()
            if not self._connection.has_ended(_END_SECONDS):
                _kill(self._worker)
            self.close()


def _kill(process: Process) -> None:
    """End a process, and wait for that, at most for a while."""
    with suppress(OSError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if process.lives:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                ended = select.poll()
                ended.register(descriptor, select.POLLIN)
                ended.poll(1e3 * _END_SECONDS)
        finally:
            os.close(descriptor)
