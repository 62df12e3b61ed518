"""A worker: a process that carries out one order, and ends with the agent."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from ckpt.agent.copy_server import copy_files
from ckpt.agent.finish import Finish
from ckpt.agent.messages import encode
from ckpt.agent.reports import Ended, Order
from ckpt.agent.scrub import Scrub
from ckpt.agent.watched_job import end_with_parent
from ckpt.pipeline.workers import Workers

_THREADS: Final = 2
_NICE: Final = 19
_COPY_NICE: Final = 10
"""Training wins the core: no thread of it waits for a worker (decision 6)."""


def work(parent: int) -> int:
    """Carry out the order on standard input, for the agent ``parent``. Reports go to standard
    output.

    Args:
        parent: The process id of the agent. Without it, this process does not work.
    """
    end_with_parent(parent)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    reports = os.dup(1)
    os.dup2(2, 1)  # what a client of a store prints is no report
    lock = threading.Lock()

    def report(message: msgspec.Struct) -> None:
        with lock, os.fdopen(os.dup(reports), "wb") as pipe:
            pipe.write(encode(message))

    report(_carry_out(order, report))
    return 0


def _carry_out(order: Order, report: Callable[[msgspec.Struct], None]) -> Ended:
    match order.task:
        case "copy":
            os.nice(_COPY_NICE)
            return copy_files(order)
        case "scrub":
            return _scrub(order, report)
        case _:
            return _finish(order, report)


def _finish(order: Order, report: Callable[[msgspec.Struct], None]) -> Ended:
    with Workers("agent", _THREADS) as workers, Finish(order.job, workers, report) as finish:
        return finish.clean() if order.task == "free" else finish.run()


def _scrub(order: Order, report: Callable[[msgspec.Struct], None]) -> Ended:
    os.nice(_NICE)
    # one thread, so that not more than one piece is read at a time
    with Workers("scrub", 1) as workers, Scrub(order, workers, report) as scrub:
        return scrub.run()
