"""The worker that copies files to farther tiers for a living trainer.

The trainer asks for one file at a time. The worker writes the files to the folder of the trainer's
attempt, but writes no fragment, no marker and no manifest, since the trainer commits the step. The
worker ends when the trainer ends, when the trainer closes the connection, or after five minutes
without a request.

A *tier* is a store of the job. A `RankPart` copies the files of one rank.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from concurrent.futures import wait
from typing import Final

import msgspec

from ckpt.agent.folder import check_peer
from ckpt.agent.job_tiers import open_tier
from ckpt.agent.messages import (
    CopyFile,
    FileCopied,
    FileFailed,
    Lent,
    Progress,
    receive,
    send,
)
from ckpt.agent.worker_messages import REPORT_SECONDS, Ended, Order
from ckpt.catalog.transfer_by_rank import RankPart
from ckpt.catalog.verify import StepFolder
from ckpt.config import Tier
from ckpt.coordination.abort_reason import abort_reason
from ckpt.errors import AgentError, CkptError
from ckpt.model.keys import parse_folder
from ckpt.pipeline.image_writer import OnBytes
from ckpt.pipeline.workers import Workers
from ckpt.processes import Process
from ckpt.storage.api import StorageBackend

_log = logging.getLogger("ckpt")
_IDLE_SECONDS: Final = 300.0
"""How long a worker waits for the next request before it ends. It does not end sooner, because a
new worker needs a second to start its store client.
"""
_SEND_SECONDS: Final = 30.0
_ABORT_SECONDS: Final = 3.0
"""How long a cancelled copy may take to remove its data."""


def copy_files(order: Order) -> Ended:
    """Carry out the requests that a trainer sends over ``order.connection``, and return the outcome
    when no more requests come. The caller must then end the process, since a thread that hangs in a
    copy may still run.
    """
    try:
        _Service(order).run()
    except (OSError, EOFError):
        pass  # The trainer has ended, or has closed the connection
    except (AgentError, msgspec.MsgspecError) as error:
        return Ended("failed", f"a request of a trainer cannot be read: {error}")
    return Ended("done")


class _Service:
    """Carries out the requests of one trainer. Thread safety: one thread.

    The thread ``_copier`` copies, and ``_completion`` becomes readable when a copy has ended. The
    loop also waits for requests of the trainer, and for the end of its process. ``_open_stores``
    has the opened stores by the index of the tier.
    """

    def __init__(self, order: Order) -> None:
        self._job, self._tiers = order.job, order.job.tier_settings()
        self._open_stores: dict[int, StorageBackend] = {}
        self._copier = Workers("copying", 1)
        self._connection = socket.socket(fileno=order.connection)
        self._connection.settimeout(_SEND_SECONDS)
        # The trainer's process is watched too, since a child of the trainer may keep the connection
        # open after the trainer has ended.
        self._trainer_pidfd = os.pidfd_open(check_peer(self._connection, "the trainer"))
        self._completion = os.eventfd(0)  # Readable once a copy has ended
        self._selector = selectors.DefaultSelector()
        for source in (self._connection, self._trainer_pidfd, self._completion):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until no request has come for ``_IDLE_SECONDS``.

        Raises:
            EOFError: The trainer has ended or has closed the connection.
            OSError: The connection has failed.
            AgentError, MsgspecError: A request cannot be read.
        """
        send(self._connection, Lent(Process.of(os.getpid())))
        while self._connection in self._ready(_IDLE_SECONDS):
            request = msgspec.msgpack.decode(receive(self._connection), type=CopyFile)
            send(self._connection, self._copy(request))

    def _ready(self, seconds: float) -> set[object]:
        """Return the descriptors that are readable. Wait for at most ``seconds`` until one is.

        Raises:
            EOFError: The trainer has ended.
        """
        ready: set[object] = {key.fileobj for key, _ in self._selector.select(seconds)}
        if self._trainer_pidfd in ready:
            raise EOFError
        return ready

    def _copy(self, request: CopyFile) -> FileCopied | FileFailed:
        """Copy one file in another thread, send the progress meanwhile, and return the result.

        Raises:
            EOFError: The trainer has ended or has cancelled the copy.
        """
        byte_counts, cancellation = list[int](), threading.Event()

        def count(nbytes: int) -> None:
            if cancellation.is_set():
                raise AgentError("the trainer does not want this copy any more")
            byte_counts.append(nbytes)

        copy = self._copier.submit(self._copy_file, request, count)
        copy.add_done_callback(lambda _: os.eventfd_write(self._completion, 1))
        # The loop waits for ``_completion`` and not for the future, which is done a little earlier.
        # If ``_completion`` became readable after the answer, it would end ``run``, which waits for
        # the next request.
        while self._completion not in (ready := self._ready(REPORT_SECONDS)):
            # The trainer sends no request during a copy, so the connection has ended.
            if self._connection in ready:
                cancellation.set()
                wait([copy], _ABORT_SECONDS)
                raise EOFError
            send(self._connection, Progress(sum(byte_counts)))
        os.eventfd_read(self._completion)
        send(self._connection, Progress(sum(byte_counts)))
        try:
            return FileCopied(copy.result())
        except Exception as error:  # noqa: BLE001 - the trainer copies the file itself
            failure = error if isinstance(error, CkptError) else CkptError(repr(error))
            return FileFailed(abort_reason(failure))

    def _copy_file(self, request: CopyFile, on_bytes: OnBytes) -> tuple[int, ...]:
        """Copy one file, and return the lengths of its encoded chunks on the target, if any."""
        (_, source), (target_settings, target) = map(self._tier, (request.source, request.target))
        if (ref := parse_folder(request.folder)) is None:
            raise AgentError(f"{request.folder!r} is not the folder of a step")
        with Workers("copy", request.threads, nice=request.nice, cpus=request.cpus) as workers:
            rank_part = RankPart(
                StepFolder(source, ref, workers), request.rank, target_settings.codec
            )
            encoding = rank_part.write_data(StepFolder(target, ref, workers), on_bytes)
        return encoding.lengths if encoding else ()

    def _tier(self, index: int) -> tuple[Tier, StorageBackend]:
        """Return the settings and the store of a tier of the job, which is opened once."""
        if index >= len(self._tiers):
            raise AgentError(f"the job has {len(self._tiers)} tiers, and no tier {index}")
        if index not in self._open_stores:
            self._open_stores[index] = open_tier(self._job, index).backend
        return self._tiers[index], self._open_stores[index]
