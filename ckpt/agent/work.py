"""A worker: a process that finishes one job, and ends with the agent."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

import msgspec

from ckpt.agent.entry import end_with_parent
from ckpt.agent.finish import Finish
from ckpt.agent.messages import Job, encode
from ckpt.pipeline.workers import Workers

_THREADS: Final = 2


def work(parent: int, *, clean: bool) -> int:
    """Finish the job on standard input, for the agent ``parent``. Reports go to standard output.

    Args:
        parent: The process id of the agent. Without it, this process does not work.
        clean: Free memory only.
    """
    end_with_parent(parent)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    reports = os.dup(1)
    os.dup2(2, 1)  # what a client of a store prints is no report
    lock = threading.Lock()

    def report(message: msgspec.Struct) -> None:
        with lock, os.fdopen(os.dup(reports), "wb") as pipe:
            pipe.write(encode(message))

    with Workers("agent", _THREADS) as workers, Finish(job, workers, report) as finish:
        ended = finish.clean() if clean else finish.run()
    report(ended)
    return 0
